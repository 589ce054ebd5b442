"""How long a checkpoint holds a run up: a slow disk shows, and steps with and without one are told apart."""

from __future__ import annotations

import json
import sys
import time

import pytest

from grpo_rl.storage import checkpoint_file

pytestmark = pytest.mark.nightly

SLOW_S = 0.5


def test_steps_beside_a_checkpoint_are_those_that_follow_it(script):
    times = script("checkpoint_stall").Times(ends=[0.0, 1.0, 3.0, 4.0, 6.5])
    assert times.steps() == ([1.0, 1.0], [2.0, 2.5])


def test_a_slow_disk_holds_up_the_next_step_and_misses_the_bar(script, tmp_path, monkeypatch, own_cache, capsys):
    stall, write = script("checkpoint_stall"), checkpoint_file.write

    def slow(path, state):
        time.sleep(SLOW_S)
        return write(path, state)

    monkeypatch.setattr(checkpoint_file, "write", slow)
    out = tmp_path / "stall.json"
    monkeypatch.setattr(sys, "argv", ["checkpoint_stall.py", "--tiny", "--steps", "2", "--force", "--out", str(out)])
    stall.main()
    found = json.loads(out.read_text())
    steps, table = found["steps"], found["table"][0]
    assert {name: len(values) for name, values in steps.items()} == dict.fromkeys(steps, 2)
    assert min(steps["written_s"]) >= SLOW_S and min(steps["held_s"]) > 0 and not found["bars"][0]["met"]
    assert max(beside - alone for alone, beside in zip(steps["alone_s"], steps["beside_s"], strict=True)) > 0
    assert table["written_in_s"] >= SLOW_S and "checkpoint_stall: " in capsys.readouterr().out.splitlines()[-1]
