"""The simulation of faults: its seeds replay exactly, and the real code holds all invariants in hundreds of them."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from grpo_rl.faults import share
from grpo_rl.faults.__main__ import main
from grpo_rl.faults.clock import Killed, Process
from grpo_rl.faults.disk import Disk
from grpo_rl.faults.share import Failures, share_of
from grpo_rl.faults.simulation import simulate
from grpo_rl.faults.world import OFTEN
from grpo_rl.storage.whole_file import write_whole

outcome_of = functools.cache(simulate)


@pytest.mark.cases(1)
@pytest.mark.parametrize("seeds", [range(30), range(30, 200)], ids=str)
def test_all_invariants_hold_in_every_seed(seeds):
    for outcome in map(outcome_of, seeds):
        replay = f"python -m grpo_rl.faults --seed {outcome.seed} --trace"
        assert outcome.error is None, "\n".join([*outcome.events, outcome.error, replay])


@pytest.mark.nightly
def test_every_kind_of_fault_happens_in_them():
    outcomes = [outcome_of(seed) for seed in range(200)]
    assert {kind for outcome in outcomes for kind in outcome.faults} == OFTEN.keys()
    assert {reason for outcome in outcomes for reason in outcome.dropped} == {"alike", "unrewarded"}


@pytest.mark.nightly
def test_a_seed_replays_event_by_event():
    seed = 3
    first, second = simulate(seed, keeps_all=True), simulate(seed, keeps_all=True)
    assert first.events == second.events and first.digest == second.digest and len(first.events) > 50
    assert simulate(seed + 1).digest != first.digest
    # In another process, whose strings hash to other numbers.
    script = f"from grpo_rl.faults.simulation import simulate; print(simulate({seed}).digest)"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.split()[-1] == first.digest


def test_the_command_prints_a_failing_seed_with_its_last_events_and_how_to_replay_it(capsys, monkeypatch):
    monkeypatch.setattr("grpo_rl.collectors.staleness.StalenessManager.check", lambda self: 1 / 0)
    assert main(["--seeds", "1", "--first", "5"]) == 1
    printed = capsys.readouterr().out
    assert "seed 5: FAILED: ZeroDivisionError" in printed and "the trainer starts" in printed
    assert "python -m grpo_rl.faults --seed 5 --trace" in printed and "1 seeds in" in printed
    assert main(["--seed", "5"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_a_process_waits_in_virtual_time_until_a_call_or_a_deadline():
    process = Process(100.0, lambda: None, lambda: None)
    process.sleep(50.0)
    assert process.now() == pytest.approx(150.0)
    call = process.start(_after(20.0))
    assert process.wait({call}, timeout=5.0) == (set(), {call}) and process.now() == pytest.approx(155.0)
    assert process.wait({call}) == ({call}, set()) and process.now() == pytest.approx(170.0)
    process.call_later(3.0, process.ask_to_kill)
    with pytest.raises(Killed):
        process.sleep(1000.0)
    assert process.now() == pytest.approx(173.0)
    with pytest.raises(Killed):  # nothing happens to it any more
        process.sleep(1.0)
    process.end()


async def _after(seconds):
    await asyncio.sleep(seconds)


def test_a_power_cut_keeps_what_was_synced_and_loses_some_of_the_rest(tmp_path):
    states = set()
    for seed in range(40):
        root = tmp_path / str(seed)
        root.mkdir()
        disk = Disk(root, random.Random(seed), lambda what, path: None)
        with disk.watched():
            write_whole(root / "safe", "whole")
            (root / "late").write_text("abcdef")
            with (root / "safe").open("a") as file:
                file.write("!")
        assert disk.after_kill() == {"safe": b"whole!", "late": b"abcdef"}
        left = disk.after_power_cut()
        assert left["safe"] in (b"whole", b"whole!") and b"abcdef".startswith(left.get("late", b""))
        states.add((left["safe"], left.get("late")))
        disk.put(left)
        assert disk.after_power_cut() == left  # what was found there is safe
    assert len(states) > 5


def test_the_share_of_training_is_what_a_hand_computes():
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


def test_the_table_has_the_share_of_all_runs_of_each_case(monkeypatch):
    monkeypatch.setattr(share, "CASES", ((60.0, "nothing", 1), (60.0, "the trainer", 2)))
    lines: list[str] = []
    share.table(4, 2, lines.append)
    _, quiet, failing = (line.split(" | ") for line in lines)
    assert quiet[:4] == ["60 s", "nothing", "1", "none"] and failing[:3] == ["60 s", "the trainer", "2"]
    runs = [share_of(Failures(step_s=60.0, sample_s=48.0, chance=0.0, steps=4, seed=seed)) for seed in range(2)]
    assert quiet[4] == f"{100 * 480 / sum(run.seconds for run in runs):.1f} %"
