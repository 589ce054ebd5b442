"""The simulation of faults: its seeds replay exactly, and the real code holds all invariants in hundreds of them."""

import asyncio
import functools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_rl.storage.whole_file import write_whole
from simulation.__main__ import main
from simulation.clock import Killed, Process
from simulation.disk import Disk
from simulation.simulation import simulate
from simulation.world import OFTEN

outcome_of = functools.cache(simulate)


@pytest.mark.cases(1)
@pytest.mark.parametrize("seeds", [range(30), range(30, 200)], ids=str)
def test_all_invariants_hold_in_every_seed(seeds):
    for outcome in map(outcome_of, seeds):
        replay = f"PYTHONPATH=tests python -m simulation --seed {outcome.seed} --trace"
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
    script = f"from simulation.simulation import simulate; print(simulate({seed}).digest)"
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[1])}
    other = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.split()[-1] == first.digest


def test_the_command_prints_a_failing_seed_with_its_last_events_and_how_to_replay_it(capsys, monkeypatch):
    monkeypatch.setattr("grpo_rl.collectors.rollout_scheduler.StalenessManager.check", lambda self: 1 / 0)
    assert main(["--seeds", "1", "--first", "5"]) == 1
    printed = capsys.readouterr().out
    assert "seed 5: FAILED: ZeroDivisionError" in printed and "the trainer starts" in printed
    assert "PYTHONPATH=tests python -m simulation --seed 5 --trace" in printed and "1 seeds in" in printed
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
