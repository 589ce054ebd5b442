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
