import json
import os
import subprocess
import sys

import pytest

from grpo_rl.envs import gsm8k
from grpo_rl.envs.gsm8k import GSM8K
from grpo_rl.envs.prompt_response import load_rows

CHAT = [{"role": "user", "content": "Say hi."}]
TABLE = [
    {"prompt": "Say hi.", "label": "2019-01-01", "count": 1},
    {"prompt": "None", "label": "two\nlines, and a comma", "count": 2},
]
NESTED = [{"prompt": CHAT, "tags": ["a", "b"]}, {"prompt": [{"role": "system", "content": "S"}, *CHAT], "tags": []}]


def table(rows):
    """The rows as a table of Hugging Face's; its import takes a second."""
    from datasets import Dataset

    return Dataset.from_list(rows)


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet", ".JSONL"])
def test_a_file_of_each_format_is_read_as_it_was_written(tmp_path, ending):
    path = tmp_path / f"rows{ending}"
    if ending.lower() == ".jsonl":
        path.write_text("\ufeff" + "\n\n".join(json.dumps(row) for row in TABLE), encoding="utf-8")
    elif ending == ".json":
        path.write_text(json.dumps(TABLE, indent=2), encoding="utf-8")
    elif ending == ".csv":
        table(TABLE).to_csv(str(path))
    else:
        table(TABLE).to_parquet(str(path))
    assert load_rows(path) == TABLE
    if ending == ".parquet":
        table(NESTED).to_parquet(str(path))
        assert load_rows(path) == NESTED


def test_a_number_where_a_task_reads_a_text_is_its_text(tmp_path):
    (tmp_path / "rows.csv").write_text("question,answer,level\n3 + 4?,7,1\n1 / 2?,0.50,2\n2 * 3?,006,3\n")
    rows = gsm8k.load_rows(tmp_path / "rows.csv")
    assert [row["answer"] for row in rows] == ["7", "0.50", "006"] and GSM8K(rows).gold(rows[2]) == "6"
    (tmp_path / "rows.jsonl").write_text('{"question": "3 + 4?", "answer": 7}\n{"question": "1 / 2?", "answer": 0.5}\n')
    assert [row["answer"] for row in gsm8k.load_rows(tmp_path / "rows.jsonl")] == ["7", "0.5"]
    # A file of other columns keeps its numbers: a reward function may well count with them.
    assert [row["level"] for row in load_rows(tmp_path / "rows.csv")] == [1, 2, 3]
    (tmp_path / "true.jsonl").write_text('{"question": "Is 7 odd?", "answer": true}\n')
    with pytest.raises(ValueError, match="line 1: answer is True, of type bool; it must be of type str"):
        gsm8k.load_rows(tmp_path / "true.jsonl")


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_unused_columns_are_left_out(tmp_path, ending):
    path = tmp_path / f"rows{ending}"
    data = table(TABLE)
    data.to_json(str(path)) if ending == ".jsonl" else data.to_parquet(str(path))
    assert load_rows(path, columns=("prompt", "answer", "count")) == [
        {"prompt": "Say hi.", "count": 1}, {"prompt": "None", "count": 2},
    ]  # fmt: skip
    # Where none of them is there, all stay, so that a message can tell what there is.
    assert load_rows(path, columns=("question",)) == TABLE


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b'{"prompt": "a"}\n{oops\n', r"rows\.jsonl, line 2 is not JSON"),
        ("rows.jsonl", b"[" * 100_000, r"rows\.jsonl is not JSON"),
        ("rows.jsonl", b'{"prompt": "a"}\n{"n": %s}' % (b"1" * 4301), r"line 2 is not JSON .*4300 digits"),
        ("rows.jsonl", b"", r"rows\.jsonl has no rows"),
        ("rows.jsonl", b'{"a": "\\ud83d\\ude00"}\n{"a": [{"b": "\\uDE00"}]}', r"line 2 has half of a character"),
        ("rows.jsonl", b"\xff\xfe", r"rows\.jsonl can't be read"),
        ("rows.json", b'[{"prompt": "a"}, 7]', r"rows\.json, row 1 is no object"),
        ("rows.parquet", b"PAR1\xff\xfe", r"rows\.parquet can't be read"),
        ("rows.csv", b'prompt,label\n"a,b\n', r"rows\.csv can't be read"),
        ("rows.txt", b"Say hi.", r"rows\.txt is no file that ends in \.jsonl, \.json, \.csv, \.parquet"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_rows(tmp_path / name)


def test_a_place_without_files_is_named_with_what_to_give(tmp_path):
    with pytest.raises(ValueError, match="is a folder without files that end in .jsonl, .json, .csv, .parquet"):
        load_rows(tmp_path)
    with pytest.raises(ValueError, match=r"part-\*\.jsonl matches no file"):
        load_rows(tmp_path / "part-*.jsonl")


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_says_to_use_a_file(tmp_path):
    code = """
from grpo_rl.envs import tables
try:
    tables.load_rows("openai/gsm8k:main")
except ValueError as error:
    print(error)
"""
    # In a process of its own: the libraries read these settings when they are imported.
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, timeout=400)
    assert result.stdout.startswith("openai/gsm8k, split train, of the hub can't be read"), result.stderr
    assert "set env.path=FILE.jsonl" in result.stdout
