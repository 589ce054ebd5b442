"""A run whose memory runs out: it goes on, says so and counts it, goes on from a checkpoint as before, or ends."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
import torch

from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.testing import run_script, without_clocks
from grpo_rl.training import micro_batches
from grpo_rl.training.checkpoint import checkpoints, load
from grpo_rl.training.optimizer import PolicyOptimizer

run = functools.partial(run_script, Path(__file__).parents[2] / "sota" / "grpo.py")
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.nightly
def test_a_run_goes_on_in_its_memory_and_from_a_checkpoint_as_if_never_cut_off(tiny_run, tmp_path, monkeypatch, capsys):
    # With an entropy term zero-variance groups are scored, too: there are always two in an optimizer step.
    tiny = [*tiny_run, "train.micro_batch_tokens=256", "train.total_dialog_turns=48", "policy.entropy_coef=0.01"]
    scored, calls = micro_batches.scored_micro_batches, []

    def scarce(*arguments):
        for tokens in scored(*arguments):
            calls.append(len(tokens["group_id"].unique()))
            if len(calls) == 3:  # in the second of three steps
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            yield tokens

    with monkeypatch.context() as patch:
        patch.setattr(micro_batches, "scored_micro_batches", scarce)
        whole = run(tiny, tmp_path / "whole")
    # Two optimizer steps of two groups in each step: the third begins again, with each group for itself.
    assert calls == [2, 2, 2, *[1] * 8]
    rows = read_metrics(whole)
    assert [row["train/out_of_memory"] for row in rows] == [0, 1, 0]
    assert [row["train/micro_batches"] for row in rows] == [2, 4, 4]
    assert "Memory ran out with a micro-batch of 2 groups" in capsys.readouterr().out

    shutil.copytree(whole, cut := tmp_path / "cut")
    run([*tiny, f"resume={checkpoints(cut / 'checkpoints')[1]}"], tmp_path / "unused")
    assert list(map(without_clocks, read_metrics(cut))) == list(map(without_clocks, read_metrics(whole)))
    ours, theirs = (load(checkpoints(folder / "checkpoints")[-1])["optimizer"]["masters"] for folder in (cut, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_memory_that_runs_out_in_the_optimizers_own_step_is_reported_in_one_line(tiny_run, tmp_path, monkeypatch):
    def none(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(PolicyOptimizer, "step", none)
    with pytest.raises(SystemExit, match=r"^Stopped after step 0: memory ran out \(.* 2\.00 GiB\.\); docs/memory\.md"):
        run(tiny_run, tmp_path / "run")
