"""Evaluation while a run trains: other tasks, sampled responses, the best model, early stopping, and resumes."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_rl.engines.base import Sampling
from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.run.held_out import BestTracker, HeldOut
from grpo_rl.settings.sections import Evaluate
from grpo_rl.training.checkpoint import checkpoints, load
from tests.run.test_run import assert_resumes, run

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.slow]


@pytest.fixture(scope="module")
def settings(tiny_run):
    path = next(word.split("=")[1] for word in tiny_run if word.startswith("env.eval_path="))
    tasks = f"evaluate.tasks=[{{task: gsm8k, rows: 3, samples: 2, path: {path}}}]"  # with its own system prompt
    return [
        *tiny_run, "evaluate.rows=4", "evaluate.frequency=1", "evaluate.samples=2", tasks, "evaluate.keep_best=true",
        "inference_model.max_model_len=512", "env.reward.reasoning_pattern='.'",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    return run(settings, tmp_path_factory.mktemp("evaluated") / "run")


def test_the_gain_is_what_rows_earn_after_training_over_what_they_earned_before():
    env = SimpleNamespace(by_task=lambda rows: {})
    before, after = [0.0, 0.0, 1.0, math.nan], [1.0, 1.0, 1.0, 0.0]  # the last was judged once alone
    held_out = HeldOut(env, [{}] * 4, Sampling(), Evaluate(), before=before, last=(7, after))
    summary = held_out.summary(7)
    assert (summary["eval_before"], summary["eval_after"]) == pytest.approx((1 / 3, 3 / 4))
    assert summary["eval_gain"] == pytest.approx(2 / 3) and summary["eval_gain_ci95"][0] < 2 / 3


def test_other_tasks_and_sampled_responses_are_logged_at_every_evaluation(finished):
    evaluated = [row for row in read_metrics(finished) if "eval/reward" in row]
    assert [row["step"] for row in evaluated] == [0, 1, 2, 3, 4]
    for row in evaluated:
        names = {"reward", "accuracy", "sampled_reward", "pass@1", "pass@2", "maj@2"}
        assert {f"eval/{name}" for name in names} | {f"eval/gsm8k/{name}" for name in names} <= set(row)
        assert 0 <= row["eval/pass@1"] <= row["eval/pass@2"] <= 1


def test_the_model_of_the_best_evaluation_is_kept_and_named_in_the_summary(finished):
    summary = json.loads((finished / "summary.json").read_text())
    rewards = {row["step"]: row["eval/reward"] for row in read_metrics(finished) if "eval/reward" in row}
    best = max(rewards, key=lambda step: (rewards[step], -step))
    assert (summary["best_step"], summary["best_reward"]) == (best, pytest.approx(rewards[best]))
    assert json.loads((finished / "best_model" / "best.json").read_text()) == {"step": best}
    tracker = BestTracker()
    tracker.restore(load(checkpoints(finished / "checkpoints")[-1])["eval_best"])
    assert tracker.best and tracker.best[0] == best and not any(map(math.isnan, tracker.best[1]))
    kept = AutoModelForCausalLM.from_pretrained(finished / "best_model").state_dict()
    if best:
        masters = load(finished / "checkpoints" / f"checkpoint_{best:06d}.pt")["optimizer"]["masters"]
        assert all(torch.equal(kept[name], tensor.to(kept[name].dtype)) for name, tensor in masters.items())


def test_a_resumed_run_evaluates_and_keeps_as_the_uninterrupted_one(finished, settings, tmp_path):
    # No exception: sampled evaluations must not move the generators that training samples with.
    assert_resumes(finished, settings, 2, tmp_path / "cut")


@pytest.mark.nightly
def test_a_run_that_does_not_get_better_is_stopped_says_why_and_stays_so(settings, tmp_path, capsys):
    # A learning rate of 0: no evaluation is better than the first.
    still = [*settings, "optimizer.lr=0", "evaluate.patience=2", "evaluate.samples=0", "evaluate.tasks=[]"]
    folder = run([*still, "evaluate.keep_best=false"], tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["finished"]
    assert "2 evaluations in a row are no better than that of step 0" in summary["stopped_early"]
    assert "Stopped early: 2 evaluations" in " ".join(capsys.readouterr().out.split())
    written = (folder / "summary.json").stat().st_mtime_ns, (folder / "report.html").stat().st_mtime_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_rl.assembly.training.make_policy", lambda *_: pytest.fail("a model is loaded"))
        run([*still, "evaluate.keep_best=false", f"resume={folder}"], tmp_path / "unused")
    assert "nothing is left to do; to go on, set evaluate.patience=0" in " ".join(capsys.readouterr().out.split())
    assert ((folder / "summary.json").stat().st_mtime_ns, (folder / "report.html").stat().st_mtime_ns) == written
