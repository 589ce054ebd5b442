from __future__ import annotations

import pyarrow as pa
import pytest

from grpo_rl.monitor.completions import CompletionsLog
from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts
from grpo_rl.monitor.token_log import SCHEMA
from grpo_rl.report import tokens


def write(run_dir, step, responses, group_id=7):
    """Tokens of a group: a list of texts for each response; a text that begins with ! was read."""
    rows = [
        {
            "step": step,
            "group_id": group_id,
            "response": number,
            "position": position,
            "token_id": 100 + position,
            "text": text.removeprefix("!"),
            "special": text.startswith("<|"),
            "trainable": not text.startswith("!"),
            "policy_version": 3 + (position > 0),
            "sampler_log_prob": None if text.startswith("!") else -0.5 - position,
            "log_prob": -0.75 - position,
            "entropy": 1.5,
        }
        for number, texts in enumerate(responses)
        for position, text in enumerate(texts)
    ]
    StepParts(run_dir / TOKENS_FOLDER).write(step, pa.Table.from_pylist(rows, schema=SCHEMA))


def test_a_response_is_there_token_by_token_with_its_numbers(tmp_path):
    write(tmp_path, 4, [["So", " 4", "!\ntool", "<|end|>"]])
    data = tokens.build(tmp_path)
    one = data["responses"][0]
    assert [data["texts"][i] for i in one["texts"]] == ["So", " 4", "\ntool", "<|end|>"]
    assert (one["step"], one["group"], one["response"], one["ids"]) == (4, 7, 0, [100, 101, 102, 103])
    assert one["sampler"] == [-0.5, -1.5, None, -3.5] and one["trainer"] == [-0.75, -1.75, -2.75, -3.75]
    assert (one["versions"], one["special"], one["read"]) == ([3, 4, 4, 4], [3], [2])
    # The gap is 0.25 everywhere, and so is its 99th percentile; that of 0.5, 1.5, 3.5 is 1.5 + 2 · 0.98.
    assert data["scales"] == {"log_prob": pytest.approx(3.46), "entropy": 1.5, "mismatch": 0.25}


def test_the_first_the_best_and_the_worst_response_come_before_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "RESPONSES_OF_STEP", 3)
    write(tmp_path, 1, [["a"], ["b"], ["c"], ["d"], ["e"]])
    common = {"row": 0, "prompt": "", "answer": None, "tokens": 1, "truncated": False, "policy_version": 0}
    rewards = [0.5, 0.4, 2.0, 0.3, -1.0]
    rows = [common | {"group_id": 7, "completion": "", "reward": reward, "advantage": 0.0} for reward in rewards]
    CompletionsLog(tmp_path).log(1, rows)
    found = tokens.build(tmp_path)["responses"]
    assert [one["response"] for one in found] == [0, 2, 4] and found[1]["reward"] == 2.0


def test_a_group_that_was_not_scored_has_no_numbers_of_the_trainer(tmp_path):
    write(tmp_path, 1, [["a", "b"]])
    parts = StepParts(tmp_path / TOKENS_FOLDER)
    table = parts.read(1)
    for name in ("log_prob", "entropy"):
        place = table.column_names.index(name)
        table = table.set_column(place, name, pa.nulls(2, pa.float32()))
    parts.write(1, table)
    one = tokens.build(tmp_path)["responses"][0]
    assert one["trainer"] == one["entropy"] == [None, None] and one["sampler"] == [-0.5, -1.5]
