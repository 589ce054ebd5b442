"""The comparison of a warm start: equal seconds of steps, and rewards of the same rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_rl.run.summary import write_evaluation

pytestmark = pytest.mark.nightly


def test_grpo_alone_gets_the_seconds_of_sft_as_further_steps(script, monkeypatch, tmp_path, capsys):
    warm_start = script("warm_start")
    asked = {}

    def run(command, check):
        folder = Path(command[-1].partition("=")[2])
        asked[folder.name] = command
        steps = (
            4 if folder.name == "sft" else int([w for w in command if "dialog_turns=" in w][-1].partition("=")[2]) // 16
        )
        folder.mkdir(parents=True)
        seconds = {"sft": 5.0, "warm": 10.0, "alone": 10.0}[folder.name]  # of a step; the clock and evaluations beside
        rows = [
            {"step": i + 1, "time/train_s": seconds, "time/at_s": 1e6, "time/evaluate_s": 1e3} for i in range(steps)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "summary.json").write_text(json.dumps({"steps": steps}))
        write_evaluation(folder, steps, [3.0, 2.0, 1.0] if folder.name == "warm" else [1.0, 1.0, 1.0])

    monkeypatch.setattr(warm_start.subprocess, "run", run)
    (tmp_path / "tiny").mkdir()
    warm_start.compare(0, 3, tmp_path, tiny=True, extra=[])
    assert f"train.total_dialog_turns={(3 + 2) * 16}" in asked["alone"]  # 4 x 5 s of SFT are two steps of 10 s
    assert f"model.name={tmp_path / 'sft' / 'model'}" in asked["warm"]
    out = capsys.readouterr().out
    assert "SFT 20 s, then 3 steps of GRPO 30 s; alone 5 steps 50 s" in out
    assert "2.000 warm, 1.000 alone; warm - alone +1.000" in out and "over 3 problems" in out
