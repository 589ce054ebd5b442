"""The table of advisories: which value, beyond which bound over how many steps, what to change, and the docs' section.

A value with a heavy tail is judged by its median, all else by its mean.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any

from grpo_rl.monitor.metrics import step_seconds

ALIKE, CUT, LENGTH, REWARD = (
    "reward/zero_std_fraction",
    "response/truncated_fraction",
    "response/mean_length",
    "reward/mean",
)
EVALUATION = "eval/"
"""Stands for the metric of rules that judge evaluations, whose step is that of the newest."""
WINDOW = 10
"""Steps over which a metric is averaged before it is judged: the mean of ten scatters a third as much as one step."""
EARLY = 5
"""Steps after which what is extreme is judged: so many that a smoke run of three or four steps is never judged."""
Z = 2.0
"""Standard errors that a difference must exceed: 95 % of a normal distribution lie between them."""

Row = Mapping[str, float]


class History:
    """The metrics of a run so far, as much of them as advisories need: its size does not grow with the run.

    A statistic of too few values is NaN, which is neither above nor below any bound.

    Args:
        facts: the run's settings by their dotted names.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.groups = max(int(facts.get("env.num_envs") or 1), 1)
        self.responses = self.groups * int(facts.get("env.repeats") or 8)
        self.best: Row = {}
        """The step at which the reward of the last ``WINDOW`` steps was highest, and their medians."""
        self.best_eval: Row = {}
        """The evaluation of the best reward, or the lowest loss, before the newest."""
        self.last_eval: Row = {}
        self._first: dict[str, list[float]] = defaultdict(list)
        self._last: dict[str, list[float]] = defaultdict(list)

    def add(self, row: Row) -> None:
        """Takes a line of metrics."""
        if "reward/mean" in row or "loss/sft" in row:  # a training step
            for name, value in {**row, **_derived(row)}.items():
                if math.isfinite(value):
                    self._first[name] = [*self._first[name], value][:WINDOW]
                    self._last[name] = [*self._last[name], value][-2 * WINDOW :]
            if (reward := self.mean(REWARD)) > self.best.get(REWARD, -math.inf):
                medians = {name: self.median(name) for name in ("reward/std", ALIKE, "grad_norm", "entropy")}
                self.best = {"step": row["step"], REWARD: reward, **medians}
        for name, better in (("eval/reward", max), ("eval/loss", min)):
            if math.isfinite(row.get(name, math.nan)):
                earlier = [found for found in (self.best_eval, self.last_eval) if found]
                self.best_eval = better(earlier, key=lambda found: found[name], default={})
                self.last_eval = {**row, "reward/then": self.mean(REWARD)}

    def values(self, name: str, steps: int = WINDOW) -> list[float]:
        """The metric's values in the last steps; NaN alone where there are fewer."""
        found = self._last[name][-steps:]
        return found if len(found) == steps else [math.nan]

    def mean(self, name: str, steps: int = WINDOW) -> float:
        """The mean over the last steps."""
        return fmean(self.values(name, steps))

    def median(self, name: str) -> float:
        """The median of the last ``WINDOW`` steps, where single values may be far off."""
        return median(self.values(name))

    def first(self, name: str) -> float:
        """The mean over the first ``WINDOW`` steps, once there are twice as many."""
        return fmean(self._first[name]) if len(self._last[name]) == 2 * WINDOW else math.nan

    def before(self, name: str) -> float:
        """The median of the ``WINDOW`` steps before the last."""
        return median(self.values(name, 2 * WINDOW)[:WINDOW])

    def rises(self, name: str) -> bool:
        """True if the metric is higher in the last steps than in those before, beyond chance."""
        values = self.values(name, 2 * WINDOW)
        return _above(values[:WINDOW], values[WINDOW:])

    def falls(self, name: str) -> bool:
        """True if the metric falls within the last steps, beyond chance: it is already getting better."""
        values = self._last[name][-WINDOW:]
        return _above(values[len(values) // 2 :], values[: len(values) // 2])

    def growth(self, counter: str) -> list[float]:
        """How much a counter of the whole run grew, in those of the last ``WINDOW`` steps in which it did."""
        return [now - was for was, now in pairwise(self._last[counter][-WINDOW - 1 :]) if now > was]

    def since(self, steps: int) -> float:
        """The first of so many last steps."""
        return self._last["step"][-steps:][0]


def _derived(row: Row) -> dict[str, float]:
    """Further values of a step: shares of its time and of the memory, and responses so far whose scorers failed."""
    # A kind that has not occurred yet has no count.
    failed = [value for name, value in row.items() if name.startswith("failed/") and name != "failed/groups"]
    found = {"sum/failed": sum(failed)}
    if seconds := step_seconds(row):
        found |= {f"share/{phase}": row.get(f"time/{phase}_s", math.nan) / seconds for phase in ("wait", "sample")}
    if row.get("memory/limit_gib"):
        found["share/memory"] = row["memory/peak_gib"] / row["memory/limit_gib"]
    if row.get("train/optimizer_steps") and "train/micro_batches" in row:
        found["share/micro_batches"] = row["train/micro_batches"] / row["train/optimizer_steps"]
    return found


def _above(before: Sequence[float], after: Sequence[float]) -> bool:
    """True if the mean of the second values is above that of the first, beyond chance."""
    if min(len(before), len(after)) < 2:
        return False
    error = math.hypot(*(stdev(values) / math.sqrt(len(values)) for values in (before, after)))
    return fmean(after) - fmean(before) > Z * error


@dataclass(frozen=True)
class Rule:
    """An advisory.

    Args:
        metric: the value that it is about; ``{now}``, ``{last}``, ``{first}`` and ``{before}`` of ``seen`` are of this.
        holds: True if the value is beyond its bound over some steps.
        remedy: alternatives, divided by ``|``; one whose ``SETTING=VALUE`` a run has already is left out.
        section: of ``docs/troubleshooting.md``.
        causes: advisories of which this follows, and while one of them lasts it is not raised.
        steps: how many last steps are judged.
    """

    metric: str
    holds: Callable[[History], bool]
    seen: str
    remedy: str
    section: str
    causes: tuple[str, ...] = ()
    steps: int = WINDOW

    def since(self, h: History) -> int:
        """The first step that showed it."""
        return int(h.last_eval["step"] if self.metric == EVALUATION else h.since(self.steps))

    def seen_in(self, h: History) -> str:
        """The finding with its numbers."""
        numbers = {"now": h.mean(self.metric, self.steps), "last": h.values(self.metric, 1)[0]}
        numbers |= {"first": h.first(self.metric), "before": h.before(self.metric)}
        return self.seen.format(**numbers, best=h.best, best_eval=h.best_eval, last_eval=h.last_eval)


def _is_unstable(h: History) -> bool:
    """True if the reward fell far below its best with another sign that the policy went off course.

    The fall is half of a response's standard deviation, and four standard errors of the two means of groups.
    """
    if not h.best:
        return False
    high, low = h.best[REWARD], h.mean(REWARD)
    spreads = h.best["reward/std"], h.median("reward/std")
    if not high - low > max(4 * math.hypot(*spreads) / math.sqrt(WINDOW * h.groups), 0.5 * max(spreads)):
        return False
    entropy = (h.best["entropy"], h.median("entropy"))
    signs = h.median("grad_norm") > 3 * h.best["grad_norm"], max(entropy) > 3 * min(entropy), h.median("ess") < 0.5
    alike = h.best[ALIKE] < 0.5 and h.median(ALIKE) >= 0.8
    return max(h.values(REWARD)) < (high + low) / 2 and (alike or any(signs))


def _held_out_falls(h: History) -> bool:
    best, now = h.best_eval, h.last_eval
    if "eval/reward" not in best or "eval/reward" not in now:
        return False
    error = math.hypot(*(row.get("eval/standard_error", 0.0) for row in (best, now)))
    before = h.first(REWARD) if math.isnan(best["reward/then"]) else best["reward/then"]
    return best["eval/reward"] - now["eval/reward"] > 2 * error and now["reward/then"] > before


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
        REWARD, _is_unstable,
        "the reward fell from {best[reward/mean]:.3g} (step {best[step]}) to {now:.3g}, while the gradient's norm, the "
        "entropy, the effective sample size or the share of zero-variance groups went off course",
        "a tenth of optimizer.lr|a higher policy.kl_coef|an earlier checkpoint", "training-is-unstable",
    ),
    "bad_steps": Rule(
        "optimizer/skipped_steps", lambda h: len(h.growth("optimizer/skipped_steps")) >= 3,
        "optimizer steps are left out again and again, as they are not finite: {last:.0f} so far",
        "a tenth of optimizer.lr|a higher optimizer.warmup_steps|train_model.dtype=float32", "nan-and-infinity",
    ),
    "scorers_fail": Rule(
        "sum/failed",
        lambda h: len(h.growth("sum/failed")) >= 3 and sum(h.growth("sum/failed")) >= 0.1 * h.responses,
        "scorers fail again and again: {last:.0f} responses so far (failed/)",
        "a higher env.score_timeout_s|env.reward, env.rewards: the first failure of each kind was printed",
        "scorers-fail",
    ),
    "cut_off": Rule(
        CUT,
        lambda h: (h.mean(CUT, EARLY) >= 0.85 or h.mean(CUT) >= 0.6) and not h.falls(CUT)
        and not h.facts.get("sampling.ignore_eos"),
        "{now:.0%} of the responses are cut off",
        "a higher sampling.max_new_tokens|shorter responses (env.system_prompt, env.examples)",
        "responses-are-cut-off", ("unstable",), EARLY,
    ),
    "zero_rewards": Rule(
        REWARD, lambda h: not any(h.values(REWARD) + h.values("reward/std")), "every reward is 0: nothing is learned",
        "read responses in completions.parquet; show the form in the prompt (env.examples), add a reward for it "
        "(env.rewards)|easier rows (env.path)", "all-rewards-are-equal-and-nothing-is-learned",
        ("unstable", "scorers_fail", "cut_off"),
    ),
    "entropy_collapse": Rule(
        "entropy",
        lambda h: h.mean("entropy") <= 0.1 and h.mean("entropy") <= 0.2 * h.first("entropy")
        and h.mean(ALIKE) >= 0.5 and not h.rises(REWARD) and h.median("reward/std") > 0.1 * abs(h.mean(REWARD)),
        "entropy fell from {first:.2g} to {now:.2g} nats a token, and the reward no longer rises",
        "a higher policy.entropy_coef, such as 0.001|a higher policy.kl_coef|a lower optimizer.lr",
        "entropy-collapses", ("unstable",),
    ),
    "no_variance": Rule(
        ALIKE,
        lambda h: (h.mean(ALIKE, EARLY) >= 0.97 or (h.mean(ALIKE) >= 0.9 and not h.rises(REWARD)))
        and not h.falls(ALIKE) and any(h.values(REWARD, EARLY)),
        "in {now:.0%} of the groups all responses earn the same",
        "a higher train.max_resamples, such as 5|a higher env.repeats|a higher policy.entropy_coef, such as 0.001"
        "|a reward that distinguishes responses (env.reward, env.rewards)|rows of another difficulty (env.path)"
        "|a tenth of optimizer.lr, if it came at once",
        "all-rewards-are-equal-and-nothing-is-learned",
        ("unstable", "scorers_fail", "cut_off", "zero_rewards", "entropy_collapse"), EARLY,
    ),
    "no_gradient": Rule(
        "grad_norm", lambda h: max(h.values("grad_norm", EARLY)) == 0 and h.mean(ALIKE, EARLY) < 1,
        "the gradient is 0, though rewards differ inside groups",
        "train.reward_clip=null|loss.mask_truncated=false|look at what else leaves tokens out",
        "the-gradient-is-0-though-rewards-differ", steps=EARLY,
    ),
    "held_out_loss_rises": Rule(
        EVALUATION, lambda h: h.last_eval.get("eval/loss", 0.0) > 1.05 * h.best_eval.get("eval/loss", math.inf),
        "the loss of held-out demonstrations rose from {best_eval[eval/loss]:.3f} (step {best_eval[step]}) to "
        "{last_eval[eval/loss]:.3f}: rows are learned by heart, or steps are too large",
        "a lower train.epochs|a lower optimizer.lr|more rows (env.path)", "the-held-out-loss-of-demonstrations-rises",
    ),
    "held_out_falls": Rule(
        EVALUATION, _held_out_falls,
        "held-out reward fell from {best_eval[eval/reward]:.3f} (step {best_eval[step]}) to "
        "{last_eval[eval/reward]:.3f} while the training reward rose: the policy learns what pays and not what is "
        "wanted, or the problems by heart",
        "env.reward, env.path: read responses in completions.parquet, and go back to that step's checkpoint",
        "the-reward-rises-and-the-responses-get-worse",
    ),
    "paid_for_length": Rule(
        LENGTH, lambda h: h.mean(LENGTH) >= 1.5 * h.first(LENGTH) and h.mean("response/length_correlation") >= 0.5,
        "responses grew from {first:.0f} to {now:.0f} tokens, and inside a group the longer ones earn more",
        "env.rewards.soft_overlong_punishment takes from long responses; read them in completions.parquet",
        "the-reward-rises-and-the-responses-get-worse",
    ),
    "repetition": Rule(
        "response/repetition",
        lambda h: h.mean("response/repetition") >= 0.3
        and h.mean("response/repetition") >= h.first("response/repetition") + 0.15,
        "responses repeat themselves: {now:.0%} of their 4-grams, {first:.0%} at first",
        "env.rewards.repetition_penalty takes from them; read them in completions.parquet",
        "the-reward-rises-and-the-responses-get-worse", ("unstable",),
    ),
    "length_limit": Rule(
        CUT,
        lambda h: h.mean(LENGTH) >= 1.25 * h.first(LENGTH) and h.mean(CUT) >= max(0.2, 1.5 * h.first(CUT))
        and not h.facts.get("sampling.ignore_eos"),
        "responses grew, and {now:.0%} are cut off, {first:.0%} at first",
        "a higher sampling.max_new_tokens, if the length is of use|env.rewards.soft_overlong_punishment|loss=dr_grpo",
        "responses-grow-or-shrink", ("unstable", "cut_off", "paid_for_length"),
    ),
    "length_collapse": Rule(
        LENGTH, lambda h: h.mean(LENGTH) <= 0.4 * h.first(LENGTH) and h.mean(REWARD) <= h.first(REWARD),
        "responses shrank from {first:.0f} to {now:.1f} tokens, and earn no more for it",
        "a lower optimizer.lr|a higher policy.kl_coef|a reward that a short response can't earn (env.rewards)",
        "responses-grow-or-shrink", ("unstable", "zero_rewards"),
    ),
    "kl_runaway": Rule(
        "kl/ref", _kl_runs_away,
        "the KL to the reference went from {before:.2g} to {now:.2g} nats a token in ten steps",
        "a higher policy.kl_coef|a lower optimizer.lr", "the-kl-to-the-reference-runs-away", ("unstable",),
    ),
    "mismatch_rises": Rule(
        "mismatch/mean", lambda h: h.median("mismatch/mean") >= 0.1
        and h.median("mismatch/mean") >= 2 * h.first("mismatch/mean"),
        "mismatch/mean, of sampler and trainer, went from {first:.2g} to {now:.2g} nats a token",
        "loss.correction=truncate|a lower optimizer.lr|train_model.dtype=float32",
        "mismatchmean-is-high-or-the-run-stops-for-it",
    ),
    "off_policy": Rule(
        "ess", lambda h: h.median("ess") < 0.5 or h.median("clip/low_fraction") + h.median("clip/high_fraction") > 0.5,
        "ess is {now:.2f}, or most tokens are clipped: the policy is far from the one that sampled",
        "train.epochs=1|a lower train.max_staleness, if sampling goes on while it trains|a lower optimizer.lr",
        "the-policy-is-far-from-the-one-that-sampled", ("unstable",),
    ),
    "trainer_waits": Rule(
        "share/wait", lambda h: h.mean("share/wait") >= 0.5,
        "the trainer waits for responses {now:.0%} of a step's time",
        "a higher inference_model.num_devices|a higher env.num_envs|a higher train.max_staleness",
        "time-goes-to-waiting-and-sampling",
    ),
    # Up to 64 responses, more of them take hardly any longer: each decoding step reads all weights.
    "sampling_dominates": Rule(
        "share/sample",
        lambda h: h.median("share/sample") >= 0.85
        and (h.responses <= 64 or h.facts.get("inference_model.engine") == "transformers"),
        "sampling takes {now:.0%} of a step's time, of few responses or by a slow engine",
        "inference_model.engine=vllm|a higher env.num_envs, with train.optim_batch_size",
        "time-goes-to-waiting-and-sampling",
    ),
    # On an H100 a token of a micro-batch of 512 took 13 times as long as one of 16,384.
    "small_micro_batches": Rule(
        "train/micro_batch_tokens",
        lambda h: h.median("share/micro_batches") >= 4 and h.median("train/micro_batch_tokens") < 1024
        and bool(
            h.facts.get("train.gradient_accumulation_steps") or (h.facts.get("train.micro_batch_tokens") or 1024) < 1024
        ),
        "an optimizer step is divided into many micro-batches, of {now:.0f} response tokens each",
        "train.gradient_accumulation_steps=null|train.micro_batch_tokens=8192", "micro-batches-are-small",
    ),
    "memory_full": Rule(
        "share/memory", lambda h: min(h.values("share/memory", EARLY)) >= 0.95,
        "{now:.0%} of the memory is taken at the peak of a step",
        "a lower train.micro_batch_tokens|train_model.gradient_checkpointing=true"
        "|a lower inference_model.gpu_memory_utilization, if an engine shares the GPU",
        "memory-is-nearly-full", steps=EARLY,
    ),
}  # fmt: skip
"""Causes come before what follows from them."""
