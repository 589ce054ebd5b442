from __future__ import annotations

import math
from types import SimpleNamespace

from grpo_rl.monitor.held_out_log import HeldOutLog
from grpo_rl.report import held_out


def evaluation(rewards, said):
    count = len(rewards)
    return SimpleNamespace(
        rewards=rewards,
        prompts=[f"Prompt {i}" for i in range(count)],
        completions=[f"{said} {i}" for i in range(count)],
        lengths=[2] * count,
        truncated=[False] * count,
    )


def test_rows_pair_the_first_and_the_last_evaluation(tmp_path):
    log = HeldOutLog(tmp_path)
    log.write(0, evaluation([0.0, 1.0, math.nan], "before"), ["4", None, "6"])
    log.write(5, evaluation([9.0, 9.0, 9.0], "between"), ["4", None, "6"])
    log.write(9, evaluation([2.0, 0.5, 1.0], "after"), ["4", None, "6"])
    data = held_out.build(tmp_path)
    assert data["steps"] == [0, 9] and (data["better"], data["worse"], data["same"]) == (1, 1, 0)
    assert [row["gain"] for row in data["rows"]] == [2.0, -0.5, None]  # a response without a reward gains nothing
    first = data["rows"][0]
    assert (first["prompt"], first["gold"]) == ("Prompt 0", "4")
    assert [(one["step"], one["text"], one["reward"]) for one in first["responses"]] == [
        (0, "before 0", 0.0),
        (9, "after 0", 2.0),
    ]
    assert data["rows"][2]["responses"][0]["reward"] is None


def test_a_run_that_was_only_evaluated_before_training_shows_that(tmp_path):
    assert held_out.build(tmp_path) is None
    HeldOutLog(tmp_path).write(0, evaluation([0.0], "before"), [None])
    data = held_out.build(tmp_path)
    assert data["steps"] == [0] and len(data["rows"][0]["responses"]) == 1 and data["rows"][0]["gain"] is None


def test_of_many_rows_those_that_changed_most_are_there_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(held_out, "ROWS", 8)
    log, gains = HeldOutLog(tmp_path), [0.0] * 40
    gains[11], gains[30], gains[20], gains[3] = 3.0, 2.0, -2.0, -1.0
    log.write(0, evaluation([5.0] * 40, "before"), [None] * 40)
    log.write(9, evaluation([5.0 + gain for gain in gains], "after"), [None] * 40)
    data = held_out.build(tmp_path)
    rows = [row["row"] for row in data["rows"]]
    assert len(rows) == 8 and rows == sorted(rows) and {3, 11, 20, 30, 0, 39} <= set(rows)
    assert (data["all"], data["better"], data["worse"], data["same"]) == (40, 2, 2, 36)
