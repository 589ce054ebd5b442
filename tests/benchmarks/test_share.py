"""The share of time that is training while parts fail: against a computation by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest


def test_the_share_of_training_is_what_a_hand_computes(script):
    share = script("share")
    Failures, share_of = share.Failures, share.share_of
    # Two steps of 100 s and two checkpoints of 10 s; before them an engine starts in 71 s, 10 % more or less, and the
    # first groups take 2 to 4 tokens of 80 / 3 s.
    quiet = Failures(step_s=100.0, sample_s=80.0, chance=0.0, steps=2, groups=2, engines=1)
    found = share_of(quiet)
    assert found.failed == {} and 220 + 0.9 * (71 + 2 / 3 * 80) < found.seconds < 225 + 1.1 * (71 + 4 / 3 * 80)
    assert found.share == pytest.approx(200 / found.seconds)
    # Each crash of the trainer costs the start of trainer and engine, and a part of a step is trained again.
    failing = share_of(replace(quiet, chance=0.5, roles=("trainer",), steps=12))
    crashes = failing.failed["crash of the trainer"]
    assert crashes > 0 and failing.seconds > 1200 + crashes * 0.9 * (43 + 71)


def test_the_table_has_the_share_of_all_runs_of_each_case(script, monkeypatch):
    share = script("share")
    Failures, share_of = share.Failures, share.share_of
    monkeypatch.setattr(share, "CASES", ((60.0, "nothing", 1), (60.0, "the trainer", 2)))
    lines: list[str] = []
    share.table(4, 2, lines.append)
    _, quiet, failing = (line.split(" | ") for line in lines)
    assert quiet[:4] == ["60 s", "nothing", "1", "none"] and failing[:3] == ["60 s", "the trainer", "2"]
    runs = [share_of(Failures(step_s=60.0, sample_s=48.0, chance=0.0, steps=4, seed=seed)) for seed in range(2)]
    assert quiet[4] == f"{100 * 480 / sum(run.seconds for run in runs):.1f} %"
