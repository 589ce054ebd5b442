"""The table of advisories: which value, beyond which bound over how many steps, what to change, and the docs' section.

A share is judged by the lower end of its interval, a value with a heavy tail by its median, all else by its mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from grpo_rl.monitor.advisory_history import EARLY, FEW_GROUPS, History, fall_of_reward

ALIKE, CUT, LENGTH, REWARD = (
    "reward/zero_std_fraction",
    "response/truncated_fraction",
    "response/mean_length",
    "reward/mean",
)
EVALUATION = "eval/"
"""Stands for the metric of rules that judge evaluations, whose step is that of the newest."""


@dataclass(frozen=True)
class Rule:
    """An advisory.

    Args:
        metric: the value that it is about; ``{now}``, ``{first}`` and ``{before}`` of ``seen`` are of this.
        holds: True if the value is beyond its bound over some steps.
        shows: True if the value of a single step is, which dates it; None: the metric is a counter, whose growth does.
        remedy: alternatives, divided by ``|``. ``NAME*2``, ``NAME+1`` and ``NAME=1`` become the setting's value to try;
            ``NAME?1`` too, where the setting is off. ``METRIC: `` leaves one out of a run without that metric.
        section: of ``docs/troubleshooting.md``.
        causes: advisories of which this follows, and while one of them lasts it is not raised.
    """

    metric: str
    holds: Callable[[History], bool]
    shows: Callable[[float, History], bool] | None
    seen: str
    remedy: str
    section: str
    causes: tuple[str, ...] = ()


def _collapsed(h: History) -> bool:
    """True if no prompt's responses differ in reward any more from one step to the next, where most did before."""
    steps = h.row.get("step", 0) - h.alike[0] + 1 if h.alike else 0
    return bool(h.alike) and steps >= max(EARLY, FEW_GROUPS / h.groups) and h.alike[1] <= 0.25


def _held_out_falls(h: History) -> bool:
    if len(h.evaluations) < 2 or "eval/reward" not in h.evaluations[1]:
        return False
    best, now = h.evaluations
    error = math.hypot(*(row.get("eval/standard_error", 0.0) for row in (best, now)))
    before = h.first(REWARD) if math.isnan(best["reward/then"]) else best["reward/then"]
    return best["eval/reward"] - now["eval/reward"] > max(2 * error, 0.0) and now["reward/then"] > before


def _held_out_loss_rises(h: History) -> bool:
    if len(h.evaluations) < 2 or "eval/loss" not in h.evaluations[1]:
        return False
    return h.evaluations[1]["eval/loss"] > 1.05 * h.evaluations[0]["eval/loss"]


def _kl_runs_away(h: History) -> bool:
    now, was, target = h.median("kl/ref"), h.before("kl/ref"), h.facts.get("policy.target_kl") or math.inf
    if math.isnan(was):
        return False
    useless = now > 0.2 and now > 2 * was and not h.rises(REWARD)
    return useless or (now > 3 * target and now >= was) or now > 5


# Bounds as seen in healthy runs of the quickstart: it begins with 0.59 of its responses cut off, but is below 0.5 at
# the third step; its entropy ends at 0.1 of the first steps' while the reward still rises; responses shrink to 0.62.
RULES: dict[str, Rule] = {
    "unstable": Rule(
        REWARD, lambda h: _collapsed(h) or fall_of_reward(h) is not None, lambda v, h: v < h.halfway,
        "{fall}", "optimizer.lr*0.1|policy.kl_coef?0.01|an earlier checkpoint", "training-is-unstable",
    ),
    "bad_steps": Rule(
        "optimizer/skipped_steps", lambda h: len(h.growth("optimizer/skipped_steps")) >= 3, None,
        "optimizer steps are left out again and again, as they are not finite: {now:.0f} so far",
        "optimizer.lr*0.1|a higher optimizer.warmup_steps|train_model.dtype=float32", "nan-and-infinity",
    ),
    "scorers_fail": Rule(
        "sum/failed",
        lambda h: len(h.growth("sum/failed")) >= 3 and sum(n for _, n in h.growth("sum/failed")) >= 0.1 * h.responses,
        None, "scorers fail again and again: {now:.0f} responses so far (failed/)",
        "failed/timeout: env.score_timeout_s*2|env.reward, env.rewards: the first failure of each kind was printed",
        "scorers-fail",
    ),
    "cut_off": Rule(
        CUT,
        lambda h: (h.surely(CUT, EARLY) >= 0.8 or h.surely(CUT) >= 0.5) and not h.falls(CUT)
        and not h.facts.get("sampling.ignore_eos"),
        lambda v, h: v >= 0.5, "{now:.0%} of the responses are cut off",
        "sampling.max_new_tokens*2|shorter responses (env.system_prompt, env.examples)", "responses-are-cut-off",
        ("unstable",),
    ),
    "zero_rewards": Rule(
        REWARD, lambda h: h.surely("share/zero") >= 0.8 and h.mean("share/zero") == 1, lambda v, h: v == 0,
        "every reward is 0: nothing is learned",
        "read responses in completions.parquet; show the form in the prompt (env.examples), add a reward for it "
        "(env.rewards)|easier rows (env.path)", "all-rewards-are-equal-and-nothing-is-learned",
        ("unstable", "scorers_fail", "cut_off"),
    ),
    "entropy_collapse": Rule(
        "entropy",
        lambda h: h.mean("entropy") <= 0.1 and h.mean("entropy") <= 0.2 * h.first("entropy")
        and h.mean(ALIKE) >= 0.5 and not h.rises(REWARD)
        and h.median("reward/std") > 0.1 * abs(h.mean(REWARD)),
        lambda v, h: v <= min(0.1, 0.2 * h.first("entropy")),
        "entropy fell from {first:.2g} to {now:.2g} nats a token, and the reward no longer rises",
        "policy.entropy_coef?0.001|policy.kl_coef?0.01|optimizer.lr*0.5", "entropy-collapses", ("unstable",),
    ),
    "no_variance": Rule(
        ALIKE,
        lambda h: (h.surely(ALIKE, EARLY) >= 0.9 or (h.surely(ALIKE) >= 0.8 and not h.rises(REWARD)))
        and not h.falls(ALIKE) and h.largest(REWARD, EARLY) > 0,
        lambda v, h: v >= 0.5, "in {now:.0%} of the groups all responses earn the same",
        "train.max_resamples?5|env.repeats*2|policy.entropy_coef?0.001|a reward that tells responses apart "
        "(env.reward, env.rewards)|rows of another difficulty (env.path)",
        "all-rewards-are-equal-and-nothing-is-learned",
        ("unstable", "scorers_fail", "cut_off", "zero_rewards", "entropy_collapse"),
    ),
    "no_gradient": Rule(
        "grad_norm", lambda h: h.largest("grad_norm", EARLY) == 0 and h.mean(ALIKE, EARLY) < 1, lambda v, h: v == 0,
        "the gradient is 0, though rewards differ inside groups",
        "train.reward_clip=null|loss.mask_truncated=false|look at what else leaves tokens out",
        "the-gradient-is-0-though-rewards-differ",
    ),
    "held_out_loss_rises": Rule(
        EVALUATION, _held_out_loss_rises, lambda v, h: True,
        "the loss of held-out demonstrations rose from {best[eval/loss]:.3f} (step {best[step]}) to "
        "{newest[eval/loss]:.3f}: rows are learned by heart, or steps are too large",
        "train.epochs*0.5|optimizer.lr*0.5|more rows (env.path)", "the-held-out-loss-of-demonstrations-rises",
    ),
    "held_out_falls": Rule(
        EVALUATION, _held_out_falls, lambda v, h: True,
        "held-out reward fell from {best[eval/reward]:.3f} (step {best[step]}) to {newest[eval/reward]:.3f} while the "
        "training reward rose: the policy learns what pays and not what is wanted, or the problems by heart",
        "env.reward, env.path: read responses in completions.parquet, and go back to that step's checkpoint",
        "the-reward-rises-and-the-responses-get-worse",
    ),
    "paid_for_length": Rule(
        LENGTH, lambda h: h.mean(LENGTH) >= 1.5 * h.first(LENGTH) and h.mean("response/length_correlation") >= 0.5,
        lambda v, h: v >= 1.5 * h.first(LENGTH),
        "responses grew from {first:.0f} to {now:.0f} tokens, and inside a group the longer ones earn more",
        "env.rewards.soft_overlong_punishment takes from long responses; read them in completions.parquet",
        "the-reward-rises-and-the-responses-get-worse",
    ),
    "repetition": Rule(
        "response/repetition",
        lambda h: h.mean("response/repetition") >= 0.3
        and h.mean("response/repetition") >= h.first("response/repetition") + 0.15,
        lambda v, h: v >= 0.3, "responses repeat themselves: {now:.0%} of their 4-grams, {first:.0%} at first",
        "env.rewards.repetition_penalty takes from them; read them in completions.parquet",
        "the-reward-rises-and-the-responses-get-worse", ("unstable",),
    ),
    "length_limit": Rule(
        CUT,
        lambda h: h.mean(LENGTH) >= 1.25 * h.first(LENGTH) and h.surely(CUT) > h.first(CUT) and h.mean(CUT) >= 0.2
        and not h.facts.get("sampling.ignore_eos"),
        lambda v, h: v >= h.mean(CUT) / 2, "responses grew, and {now:.0%} are cut off, {first:.0%} at first",
        "sampling.max_new_tokens*2, if the length is of use|env.rewards.soft_overlong_punishment|loss=dr_grpo",
        "responses-grow-or-shrink", ("unstable", "cut_off", "paid_for_length"),
    ),
    "length_collapse": Rule(
        LENGTH, lambda h: h.mean(LENGTH) <= 0.4 * h.first(LENGTH) and not h.rose(REWARD),
        lambda v, h: v <= 0.4 * h.first(LENGTH),
        "responses shrank from {first:.0f} to {now:.1f} tokens, and earn no more for it",
        "optimizer.lr*0.5|policy.kl_coef?0.01|a reward that a short response can't earn (env.rewards)",
        "responses-grow-or-shrink", ("unstable", "zero_rewards"),
    ),
    "kl_runaway": Rule(
        "kl/ref", _kl_runs_away, lambda v, h: v > (h.before("kl/ref") + h.median("kl/ref")) / 2,
        "the KL to the reference went from {before:.2g} to {now:.2g} nats a token in ten steps",
        "policy.kl_coef*4|optimizer.lr*0.5", "the-kl-to-the-reference-runs-away", ("unstable",),
    ),
    "mismatch_rises": Rule(
        "mismatch/mean", lambda h: h.median("mismatch/mean") >= 0.1
        and h.median("mismatch/mean") >= 2 * h.first("mismatch/mean"),
        lambda v, h: v >= 0.1, "mismatch/mean, of sampler and trainer, went from {first:.2g} to {now:.2g} nats a token",
        "loss.correction=truncate|optimizer.lr*0.5|train_model.dtype=float32",
        "mismatchmean-is-high-or-the-run-stops-for-it",
    ),
    "off_policy": Rule(
        "ess", lambda h: h.median("ess") < 0.5 or h.median("clip/low_fraction") + h.median("clip/high_fraction") > 0.5,
        lambda v, h: v < 0.5,
        "ess is {now:.2f}, or most tokens are clipped: the policy is far from the one that sampled",
        "train.epochs=1|time/wait_s: train.max_staleness-1|optimizer.lr*0.5",
        "the-policy-is-far-from-the-one-that-sampled", ("unstable",),
    ),
    "trainer_waits": Rule(
        "share/wait", lambda h: h.mean("share/wait") >= 0.5, lambda v, h: v >= 0.5,
        "the trainer waits for responses {now:.0%} of a step's time",
        "inference_model.num_devices+1|env.num_envs*2|train.max_staleness+1", "time-goes-to-waiting-and-sampling",
    ),
    # Up to 64 responses, more of them take hardly any longer: each decoding step reads all weights.
    "sampling_dominates": Rule(
        "share/sample",
        lambda h: h.median("share/sample") >= 0.85
        and (h.responses <= 64 or h.facts.get("inference_model.engine") == "transformers"),
        lambda v, h: v >= 0.85, "sampling takes {now:.0%} of a step's time, of few responses or by a slow engine",
        "inference_model.engine=vllm|env.num_envs*4, train.optim_batch_size*4", "time-goes-to-waiting-and-sampling",
    ),
    # On an H100 a token of a micro-batch of 512 took 13 times as long as one of 16,384.
    "small_micro_batches": Rule(
        "train/micro_batch_tokens",
        lambda h: h.median("share/micro_batches") >= 4 and h.median("train/micro_batch_tokens") < 1024
        and bool(
            h.facts.get("train.gradient_accumulation_steps") or (h.facts.get("train.micro_batch_tokens") or 1024) < 1024
        ),
        lambda v, h: v < 1024,
        "an optimizer step is divided into many micro-batches, of {now:.0f} response tokens each",
        "train.gradient_accumulation_steps=null|train.micro_batch_tokens=8192", "micro-batches-are-small",
    ),
    "memory_full": Rule(
        "share/memory", lambda h: min(h.values("share/memory", EARLY)) >= 0.95, lambda v, h: v >= 0.95,
        "{now:.0%} of the memory is taken at the peak of a step",
        "train.micro_batch_tokens*0.5|train_model.gradient_checkpointing=true"
        "|reward/mean: inference_model.gpu_memory_utilization*0.8", "memory-is-nearly-full",
    ),
}  # fmt: skip
"""Causes come before what follows from them."""
