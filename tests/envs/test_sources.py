"""Data of every form comes out as the same rows, under the task's names; what is wrong is named with its place."""

import bz2
import gzip
import json
import lzma
import re

import pytest

from grpo_rl.envs import countdown, gsm8k, ifeval, math, search_qa
from grpo_rl.envs.agent import AgentEnv
from grpo_rl.envs.calculator import load_rows as load_calculator
from grpo_rl.envs.gsm8k import GSM8K
from grpo_rl.envs.sources import Source
from grpo_rl.envs.tables import load_rows

ROWS = [{"question": "3 + 4?", "answer": "#### 7"}, {"question": "8 + 1?", "answer": "#### 9"}]
THEIRS = [{"problem": row["question"], "solution": row["answer"], "level": "easy"} for row in ROWS]
NAMES = {"question": "problem", "answer": "solution"}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(("ending", "opener"), [(".gz", gzip.open), (".bz2", bz2.open), (".xz", lzma.open)])
def test_a_compressed_file_is_read_as_the_file_in_it(tmp_path, ending, opener):
    csv = "question,answer\n3 + 4?,#### 7\n8 + 1?,#### 9\n"
    for name, text in ((f"rows.jsonl{ending}", lines(ROWS)), (f"rows.csv{ending}", csv)):
        with opener(tmp_path / name, "wt") as file:
            file.write(text)
        assert load_rows(tmp_path / name) == ROWS


def test_a_pattern_reads_all_its_files_in_order_and_a_broken_row_is_named_with_its_file_and_line(tmp_path):
    (tmp_path / "part-1.jsonl").write_text(lines(ROWS[1:]))
    (tmp_path / "part-0.jsonl").write_text(lines(ROWS[:1]))
    assert gsm8k.load_rows(tmp_path / "part-*.jsonl") == ROWS
    (tmp_path / "part-1.jsonl").write_text("\n" + lines([{"question": "?", "solution": "1"}]))
    with pytest.raises(ValueError, match=r"part-1\.jsonl, line 2 has no answer; its columns are \['question', 'sol"):
        gsm8k.load_rows(tmp_path / "part-*.jsonl")
    with pytest.raises(ValueError, match=r"env\.columns=\{question: ask\}: .*part-0\.jsonl, line 1 has no ask"):
        gsm8k.load_rows(Source(str(tmp_path / "part-*.jsonl"), columns={"question": "ask"}))


def test_a_folders_files_tell_their_splits_by_their_names(tmp_path):
    (tmp_path / "train-00000.jsonl").write_text(lines(ROWS[:1]))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "validation.jsonl").write_text(lines(ROWS[1:]))
    assert gsm8k.load_rows(tmp_path) == ROWS[:1]
    assert gsm8k.load_rows(Source(str(tmp_path), split="validation")) == ROWS[1:]
    with pytest.raises(ValueError, match=r"has no split test; it has train, validation: set env\.split"):
        gsm8k.load_rows(tmp_path, "test")


def test_what_datasets_saved_is_read_by_split(tmp_path):
    from datasets import Dataset, DatasetDict

    train, dev = Dataset.from_list(THEIRS[:1]), Dataset.from_list(THEIRS[1:])
    DatasetDict({"train": train, "dev": dev}).save_to_disk(str(tmp_path / "both"))
    train.save_to_disk(str(tmp_path / "one"))
    assert gsm8k.load_rows(Source(str(tmp_path / "both"), columns=NAMES)) == ROWS[:1]
    assert gsm8k.load_rows(Source(str(tmp_path / "both"), split="dev", columns=NAMES)) == ROWS[1:]
    assert gsm8k.load_rows(Source(str(tmp_path / "one"), columns=NAMES)) == ROWS[:1]


def test_a_data_set_with_a_card_is_read_by_its_subset_and_split(tmp_path):
    """A folder in the hub's layout, read by `datasets` as the hub's own would be."""
    card = [
        *("---", "configs:", "- config_name: easy", "  data_files:", "  - {split: train, path: easy.jsonl}"),
        *("- config_name: hard", "  data_files:", "  - {split: dev, path: hard.jsonl}", "---", ""),
    ]
    (tmp_path / "README.md").write_text("\n".join(card))
    (tmp_path / "easy.jsonl").write_text(lines(ROWS[:1]))
    (tmp_path / "hard.jsonl").write_text(lines(ROWS[1:]))
    assert gsm8k.load_rows(Source(str(tmp_path), subset="easy")) == ROWS[:1]
    assert gsm8k.load_rows(Source(str(tmp_path), subset="hard", split="dev")) == ROWS[1:]
    with pytest.raises(ValueError, match=r"split train.*env\.split"):
        gsm8k.load_rows(Source(str(tmp_path), subset="hard"))
    with pytest.raises(ValueError, match=r"(?s)middle.*easy.*hard"):
        gsm8k.load_rows(Source(str(tmp_path), subset="middle"))


def test_the_hub_is_asked_for_the_subset_split_and_revision_that_are_set(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, subset=None, *, split, revision=None):
        asked.append((name, subset, split, revision))
        return datasets.Dataset.from_list(THEIRS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert gsm8k.load_rows(Source("hf:a/b", "main", "train[:2]", "3f1c2d9", NAMES)) == ROWS
    math.load_rows("a/b:algebra", "test")
    gsm8k.load_rows(Source(None, revision="v2", columns=NAMES), "test")
    own = ("openai/gsm8k", "main", "test", "v2")
    assert asked == [("a/b", "main", "train[:2]", "3f1c2d9"), ("a/b", "algebra", "test", None), own]


TASKS = {
    "calculator": (load_calculator, ROWS[0]),
    "math": (math.load_rows, {"problem": "?", "answer": "7"}),
    "countdown": (countdown.load_rows, {"numbers": [1, 2], "target": 3}),
    "ifeval": (
        ifeval.load_rows,
        {"key": 1, "prompt": "Hi.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    ),
    "search_qa": (search_qa.load_rows, {"question": "?", "answer": "A", "supporting_facts": [["B", 0]]}),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_tasks_columns_may_have_other_names(task, tmp_path):
    load, row = TASKS[task]
    (tmp_path / "ours.jsonl").write_text(lines([row]))
    (tmp_path / "theirs.jsonl").write_text(lines([{f"their_{name}": value for name, value in row.items()}]))
    (expected,), names = load(tmp_path / "ours.jsonl"), {name: f"their_{name}" for name in row}
    assert load(Source(str(tmp_path / "theirs.jsonl"), columns=names)) == [expected]


CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "3 + 4?"}]


@pytest.mark.parametrize("column", ["question", "prompt", "messages"])
def test_chat_messages_are_a_prompt_and_the_assistants_last_one_is_the_gold_answer(tmp_path, column):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines([{column: [*CHAT, {"role": "assistant", "content": "#### 7"}]}]))
    (row,) = gsm8k.load_rows(path)
    assert row == {"question": CHAT, "answer": "#### 7"}
    path.write_text(lines([{column: [*CHAT, {"role": "assistant", "content": "well"}], "answer": "#### 7"}]))
    assert gsm8k.load_rows(path) == [row]  # the row's own gold answer stays
    task = GSM8K([row], system_prompt="Ours.", examples=[{"question": "1 + 1?", "answer": "2"}])
    assert [message["content"] for message in task.prompt(row)] == ["S", "1 + 1?", "2", "3 + 4?"]
    assert task.score(row, "<answer>7</answer>").parts["correctness"] == 2.0


REASONED = {"role": "assistant", "content": "#### 7", "reasoning_content": "3 and 4."}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [*CHAT, REASONED]}, "reasoning_content"),
        ({"messages": CHAT, "answer": "#### 7", "tools": [{"name": "add"}]}, "has tools, which this task would leave"),
    ],
)
def test_what_a_task_can_not_read_of_a_row_is_named_with_its_line(tmp_path, row, message):
    (tmp_path / "rows.jsonl").write_text(lines([row]))
    with pytest.raises(ValueError, match=f"rows.jsonl, line 1.*{re.escape(message)}"):
        gsm8k.load_rows(tmp_path / "rows.jsonl")


def test_an_agents_data_has_held_out_rows_where_its_scorers_has():
    cases = [("calculator", "arithmetic", {}), ("verifiers", None, {"held_out": 0.1}), ("calculator", "mine.jsonl", {})]
    found = [AgentEnv.holds_out(path, {"scorer": name, "scorer_settings": own}) for name, path, own in cases]
    assert found == [True, True, False]
