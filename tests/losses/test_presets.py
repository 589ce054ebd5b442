"""The losses of config/loss: complete, explained, buildable, and with the classes' own defaults."""

import re

import pytest
from tiny_runs import run_script

from grpo_rl.assembly.training import make_advantages, make_loss
from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.settings.compose import FOLDER, compose_config
from grpo_rl.settings.derived import micro_batching, needs_old_log_probs
from grpo_rl.settings.schema import Settings

PRESETS = sorted(path.stem for path in (FOLDER / "loss").glob("*.yaml"))


def config(*overrides):
    return compose_config("grpo_gsm8k", overrides)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_says_where_it_comes_from_and_passes_the_checks(preset):
    path = FOLDER / "loss" / f"{preset}.yaml"
    comment = re.match(r"(#.*\n)+", path.read_text())[0]
    assert "https://" in comment and (" J = " in comment or " A = " in comment)
    assert preset == "grpo" or "Differs from g" in comment
    cfg = config(f"loss={preset}", "policy.kl_coef=0.1", "ref_model.name=another/model")  # distill wants a teacher
    settings = Settings.read(cfg)
    loss, advantages = make_loss(settings), make_advantages(settings)
    # The KL counts once: in the loss or in the reward.
    assert {loss.kl_coef, advantages.kl_coef} == {0.0, 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "annotated", "on_policy", "skips"),
    [
        ([], False, True, True),
        (["policy.kl_coef=0.1"], False, True, False),
        (["policy.entropy_coef=0.1"], False, True, False),
        (["train.epochs=2"], False, False, True),
        (["loss=tis"], False, True, True),  # what the policy says in the only step is what it said before
        (["loss=tis", "train.epochs=2"], True, False, True),
        (["loss=tis", "env.num_envs=8"], True, False, True),  # 64 responses, 32 a step
        (["loss=rloo"], False, True, True),
        (["loss=rloo", "policy.kl_coef=0.1"], True, True, True),  # in the reward, where it is part of the advantage
        (["loss.top_entropy_fraction=0.2"], True, True, True),
    ],
)
def test_the_policy_scores_beforehand_and_groups_without_advantage_count_only_where_something_reads_it(
    overrides, annotated, on_policy, skips
):
    cfg = config(*overrides)
    assert needs_old_log_probs(cfg) is annotated
    assert micro_batching(cfg).on_policy is on_policy and micro_batching(cfg).skip_zero_advantage is skips


@pytest.fixture(scope="module")
def tiny(tiny_run, own_cache):
    """One collection and four optimizer steps."""
    few = ["train.total_dialog_turns=16", "train.epochs=2", "optimizer.lr=1e-3", "policy.kl_coef=0.05"]
    return [*tiny_run, *few, "train.checkpoint_frequency=0"]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "overrides",
    [
        ["loss=dapo", "loss.mask_truncated=false", "loss.top_entropy_fraction=0.5"],  # a random model never ends
        ["loss=kl_cov", "loss.kl=reverse"],
        ["loss=icepop", "loss.aggregate=prompt_mean"],
        ["loss=dr_grpo"],
        ["loss=gspo"],
        ["loss=cispo", "loss.kl=k3_is"],
        ["loss=rloo"],
        ["loss=clip_cov", "policy.target_entropy=0.5"],
        ["loss=distill", "ref_model.hint='is {gold}'", "loss.kl=jensen_shannon"],
        ["loss=gdpo", "loss.dual_clip=3.0", "+loss.reward_weights.correctness=0.5"],
    ],
    ids=" ".join,
)
def test_the_script_trains_under_it(tiny, overrides, tmp_path, monkeypatch):
    (metrics,) = read_metrics(run_script(FOLDER.parent / "sota" / "grpo.py", [*tiny, *overrides], tmp_path))
    assert metrics["grad_norm"] > 0 and metrics["optimizer/skipped_steps"] == 0
    assert metrics["kl/ref"] > 0 and (metrics["loss/kl"] == 0) == (overrides[0] == "loss=rloo")
    corrected = overrides[0] in ("loss=gspo", "loss=icepop")
    # The engine computes in another way than the trainer, a little.
    assert corrected == ("correction/mean" in metrics) and abs(metrics.get("correction/mean", 1.0) - 1.0) < 0.1
    assert ("clip/dual_fraction" in metrics) == ("loss.dual_clip=3.0" in overrides)
