"""Recipes through the main script: what changes in the course of a run does so, is logged, and survives a resume."""

from pathlib import Path

import pytest
import torch
from tiny_runs import run_script, without_clocks

from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.testing import save_tiny_model
from grpo_rl.training.checkpoint import checkpoints

SCRIPT = Path(__file__).parents[2] / "sota" / "grpo.py"


@pytest.fixture(scope="module")
def tiny(tiny_run):
    return [*tiny_run, "train.micro_batch_tokens=8192", "optimizer.warmup_steps=0"]


def run(overrides, folder):
    return [without_clocks(row) for row in read_metrics(run_script(SCRIPT, overrides, folder))]


EVERYTHING = [
    "policy.kl_coef=0.1", "policy.target_kl=0.001", "ref_model.refresh=average", "ref_model.decay=0.9",
    "train.max_resamples=2", "train.epochs=2", "train.reward_clip=0.5", "train.total_dialog_turns=80",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, run([*tiny, *EVERYTHING], folder)


def test_the_coefficient_moves_by_the_logged_kl_and_an_averaged_reference_follows_in_every_step(whole):
    rows = whole[1]
    assert rows[0]["kl/coef"] == 0.1 and len(rows) > 2
    for before, after in zip(rows, rows[1:], strict=False):
        error = max(-0.2, min(0.2, before["kl/ref"] / 0.001 - 1))
        assert after["kl/coef"] == pytest.approx(before["kl/coef"] * (1 + 0.1 * error))
    assert [row["reference/refreshes"] for row in rows] == list(range(1, len(rows) + 1))


def test_what_dynamic_sampling_left_out_is_counted(whole):
    folder, rows = whole
    counts = [row["sample/filtered_groups"] for row in rows]
    assert counts[-1] > 0
    # All that was sampled is kept or left out, step by step.
    collected = 0
    for step, filtered in enumerate(counts, 1):
        sampled = 4 + filtered - ([0, *counts][step - 1])
        collected += sampled * 4
    state = torch.load(checkpoints(folder / "checkpoints")[-1], weights_only=False)
    assert state["collected"] == collected >= 80
    assert all("reward/sampled_mean" in row for row in rows)


@pytest.mark.nightly
def test_the_weight_of_a_kl_in_the_reward_moves_and_resumes_exactly(tiny, tmp_path):
    settings = [
        *tiny, "loss=rloo", "policy.kl_coef=0.1", "policy.target_kl=0.001", "ref_model.refresh=steps",
        "ref_model.refresh_steps=1",
    ]  # fmt: skip
    rows = run(settings, tmp_path / "whole")
    assert [row["reference/refreshes"] for row in rows] == [1, 2, 3, 4]
    assert len({row["kl/coef"] for row in rows}) == 4
    (tmp_path / "copied.pt").write_bytes((tmp_path / "whole/checkpoints/checkpoint_000002.pt").read_bytes())
    resumed = run([*settings, f"resume={tmp_path / 'copied.pt'}"], tmp_path / "resumed")
    for ours, theirs in zip(resumed, rows[2:], strict=True):
        assert {k: (v, theirs[k]) for k, v in ours.items() if v != theirs[k]} == {}
    # The penalty is subtracted: another weight in the second step gives other advantages, and so another gradient. The
    # reference stays: one that was renewed in the step before is the policy, and at a KL of 0 no weight matters.
    short = [*settings, "ref_model.refresh=never", "train.total_dialog_turns=32"]
    moved = run(short, tmp_path / "moved")
    fixed = run([*short, "policy.target_kl=null"], tmp_path / "fixed")
    assert fixed[0]["grad_norm"] == moved[0]["grad_norm"] and fixed[1]["grad_norm"] != moved[1]["grad_norm"]


def test_all_of_it_resumes_exactly(whole, tiny, tmp_path):
    folder, rows = whole
    checkpoint = folder / "checkpoints" / "checkpoint_000002.pt"
    copy = tmp_path / "copied.pt"
    copy.write_bytes(checkpoint.read_bytes())
    resumed = run([*tiny, *EVERYTHING, f"resume={copy}"], tmp_path / "resumed")
    assert [row["step"] for row in resumed] == [row["step"] for row in rows[2:]]
    for ours, theirs in zip(resumed, rows[2:], strict=True):
        assert {k: (v, theirs[k]) for k, v in ours.items() if v != theirs[k]} == {}


@pytest.mark.nightly
def test_a_collection_is_left_when_the_policy_is_too_far_from_the_sampler(tiny, tmp_path):
    few = [*tiny, "train.epochs=4", "train.total_dialog_turns=32", "policy.kl_coef=0.01", "train_model.dtype=float32"]
    free = run(few, tmp_path / "free")
    held = run([*few, "policy.stop_kl=1e-6"], tmp_path / "held")
    assert [row["train/optimizer_steps"] for row in free] == [8, 8]
    # The first is on the sampler's own weights, the second sees what the first has moved.
    assert [row["train/optimizer_steps"] for row in held] == [2, 2]


@pytest.mark.nightly
def test_the_reference_may_be_another_model(tiny, tmp_path):
    other = save_tiny_model(tmp_path / "other", seed=1)
    settings = [*tiny, "policy.kl_coef=0.1", "train.total_dialog_turns=16", "optimizer.lr=0"]
    same = run(settings, tmp_path / "same")
    far = run([*settings, f"ref_model.name={other}"], tmp_path / "far")
    assert far[0]["kl/ref"] > 0.1 and same[0]["kl/ref"] < 1e-3
