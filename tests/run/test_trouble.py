"""Runs in trouble: memory that runs out, and an advisory in the terminal, summary.json and the report."""

import json
from unittest.mock import MagicMock

import pytest
import torch

from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.training import micro_batches
from grpo_rl.training.optimizer import PolicyOptimizer
from tests.report.runs import unpacked
from tests.run.test_run import assert_resumes, run

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

    assert_resumes(whole, tiny, 2, tmp_path / "cut")


def test_memory_that_runs_out_in_the_optimizers_own_step_is_reported_in_one_line(tiny_run, tmp_path, monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    monkeypatch.setattr(PolicyOptimizer, "step", MagicMock(side_effect=error))
    with pytest.raises(SystemExit, match=r"^Stopped after step 0: memory ran out \(.* 2\.00 GiB\.\); docs/memory\.md"):
        run(tiny_run, tmp_path / "run")


BATCH = ["env.num_envs=8", "env.repeats=8", "train.optim_batch_size=64", "train.micro_batch_tokens=4096"]
STAMP = len("2026-01-31 12:00:00 ")


def advisories(tiny_run, folder, capsys, *overrides, steps):
    """Each advisory of a run's summary, and its lines in the terminal."""
    rest = [f"train.total_dialog_turns={64 * steps}", "train.checkpoint_frequency=0"]
    run([*tiny_run, *BATCH, *rest, *overrides], folder)
    told = [line[STAMP:] for line in capsys.readouterr().out.splitlines()]
    lines = [line for line in told if line.startswith("Advisory. ")]
    return json.loads((folder / "summary.json").read_text())["advisories"], lines


def test_a_run_says_what_is_wrong_once_also_over_a_resume(tiny_run, tmp_path, capsys):
    folder = tmp_path / "run"
    (told,), lines = advisories(tiny_run, folder, capsys, steps=7)
    assert (told["name"], told["since"], told["until"]) == ("cut_off", 1, None)
    assert lines == [
        f"Advisory. Responses are cut off, since step 1: {told['seen']}. Try {told['setting']}. See {told['page']}"
    ]
    assert "a higher sampling.max_new_tokens (now 8)" in told["setting"]
    assert told["page"] in unpacked(folder / "report.html")
    assert advisories(tiny_run, folder, capsys, f"resume={folder}", steps=9) == ([told], [])
