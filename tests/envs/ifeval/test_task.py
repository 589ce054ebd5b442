import json
import shutil
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock

import nltk
import pytest

from grpo_rl.envs.ifeval import IFEval, load_rows, split_of
from grpo_rl.envs.ifeval import language as language_module
from grpo_rl.envs.ifeval.task import HUB_NAME

ROW = {
    "key": 7,
    "prompt": "Say hello in JSON, without commas, in at least 2 words.",
    "instruction_id_list": ["detectable_format:json_format", "punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{}, {}, {"num_words": 2, "relation": "at least"}],
}
COUNTS_SENTENCES = {
    "key": 8,
    "prompt": "Write at least 2 sentences.",
    "instruction_id_list": ["length_constraints:number_sentences"],
    "kwargs": [{"num_sentences": 2, "relation": "at least"}],
}


def test_the_parts_are_paid_by_their_weights():
    task = IFEval([ROW], strict=3, all=1, loose=6)
    assert task.reward_parts == ("strict", "all", "loose")
    for answer, strict, everything, loose in [
        ('["hello world"]', 3, 1, 6),  # all three
        ("hello world", 2, 0, 4),  # no JSON
        ("hello, world", 1, 0, 2),  # words only
        ('Sure, hello:\n["hello world"]', 1, 0, 6),  # words; without its first line all three
        ("", 0, 0, 0),
    ]:
        assert task.score(ROW, answer).parts == {"strict": strict, "all": everything, "loose": loose}, answer


def test_a_key_is_in_the_same_split_as_a_number_and_as_a_text():
    assert all(split_of(key) == split_of(str(key)) for key in range(100))


def test_the_hubs_rows_are_parted_by_key(real_data, monkeypatch):
    import datasets

    every = load_rows(real_data / "ifeval" / "input_data.jsonl")
    columns = {name: None for row in every for kwargs in row["kwargs"] for name in kwargs}
    as_on_the_hub = [{**row, "kwargs": [{**columns, **kwargs} for kwargs in row["kwargs"]]} for row in every]
    asked, data = [], datasets.Dataset.from_list(as_on_the_hub)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or data)
    train, test = load_rows(None, "train"), load_rows(None, "test")
    assert asked == [((HUB_NAME, None), {"split": "train", "revision": None})] * 2
    assert (len(every), len(train), len(test)) == (541, 436, 105)
    assert not {row["key"] for row in train} & {row["key"] for row in test}
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    held_out = Counter(name for row in test for name in row["instruction_id_list"])
    assert len(held_out) == 25 and min(held_out.values()) >= 2  # every type is measured


def test_a_broken_row_is_named_with_its_line(tmp_path):
    lacking = {**ROW, "kwargs": [{}]}
    for row, why in (({"key": 1}, "has no prompt"), (lacking, r"\(key 7\) has 3 instructions and 1 sets of arguments")):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [ROW, row])))
        with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2 {why}"):
            load_rows(tmp_path / "rows.jsonl")


@pytest.fixture
def no_punkt(tmp_path, monkeypatch):
    """A machine without NLTK's data, with a cache folder of its own."""
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(nltk.data, "path", [])
    language_module.punkt.cache_clear()
    yield
    language_module.punkt.cache_clear()


def test_missing_data_is_downloaded_once(punkt, no_punkt, monkeypatch):
    calls = []

    def download(name, download_dir, **_options):
        calls.append(name)
        shutil.copytree(punkt / "tokenizers", Path(download_dir) / "tokenizers")

    monkeypatch.setattr(nltk, "download", download)
    task = IFEval([COUNTS_SENTENCES])
    assert task.score(COUNTS_SENTENCES, "One. Two.").total == 2.0
    assert task.score(COUNTS_SENTENCES, "One.").total == 0.0
    assert calls == ["punkt_tab"]


def test_data_that_cannot_be_downloaded_is_an_error_that_says_what_to_do(no_punkt, monkeypatch, tmp_path):
    monkeypatch.setattr(nltk, "download", MagicMock(side_effect=OSError("no network")))
    with pytest.raises(ValueError, match="punkt_tab.*no network.*NLTK_DATA"):
        IFEval([COUNTS_SENTENCES])
    assert not list((tmp_path / "nltk_data" / "tokenizers").iterdir())
