"""Advisories: what goes wrong in a run, since when, and which setting to change.

:data:`RULES` is the table: which value, beyond which bound over how many steps, what to change, and the section of
`docs/troubleshooting.md`, which has the reasons. A value with a heavy tail is judged by its median, others by the mean.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any

from grpo_rl.monitor.metrics import step_seconds
from grpo_rl.storage.yaml_text import flat

ALIKE, CUT, LENGTH = "reward/zero_std_fraction", "response/truncated_fraction", "response/mean_length"
REPEATED, GAP, REWARD = "response/repetition", "mismatch/mean", "reward/mean"
SKIPPED, TOKENS = "optimizer/skipped_steps", "train/micro_batch_tokens"
FAILED, DIVIDED = "the number of responses without a reward (failed/)", "micro-batches of an optimizer step"
CLIPPED = "the share of clipped tokens"
WAITING, SAMPLING, MEMORY = (
    "the share of a step's time in which the trainer waits",
    "the share of a step's time in which engines sample",
    "the share of the memory that is taken",
)
WINDOW = 10
"""Steps over which a metric is averaged before it is judged: the mean of ten scatters a third as much as one step."""
EARLY = 5
"""Steps after which what is extreme is judged: so many that a smoke run of three or four steps is never judged."""
PAGE = "docs/troubleshooting.md"
SETTING = re.compile(r"\b([a-z_]+\.[a-z_]+)(?:=([\w.]+))?")
"""A setting in a remedy, and the value that it gets."""

Row = Mapping[str, float]


class History:
    """The metrics of a run so far, as much of them as advisories need: its size does not grow with the run.

    A statistic of too few values is NaN, neither above nor below any bound. ``facts`` are settings by dotted names.
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
        if REWARD in row or "loss/sft" in row:  # a training step
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

    def rises(self, name: str) -> bool:
        """True if the metric is higher in the last steps than in those before, beyond chance."""
        values = self.values(name, 2 * WINDOW)
        return _above(values[:WINDOW], values[WINDOW:])

    def falls(self, name: str) -> bool:
        """True if the metric falls within the last steps, beyond chance: it is already getting better."""
        values = self._last[name][-WINDOW:]
        return _above(values[len(values) // 2 :], values[: len(values) // 2])

    def growth(self, counter: str) -> list[float]:
        """The growth of a counter of the whole run, in those of the last ``WINDOW`` steps in which it grew."""
        return [now - was for was, now in pairwise(self._last[counter][-WINDOW - 1 :]) if now > was]


def _derived(row: Row) -> dict[str, float]:
    """Further values of a step: shares of its time and of the memory, and responses so far whose scorers failed."""
    # A kind that has not occurred yet has no count.
    failed = [value for name, value in row.items() if name.startswith("failed/") and name != "failed/groups"]
    found = {FAILED: sum(failed), CLIPPED: row.get("clip/low_fraction", 0.0) + row.get("clip/high_fraction", 0.0)}
    if seconds := step_seconds(row):
        for name, phase in ((WAITING, "wait"), (SAMPLING, "sample")):
            found[name] = row.get(f"time/{phase}_s", math.nan) / seconds
    if row.get("memory/limit_gib"):
        found[MEMORY] = row.get("memory/peak_gib", math.nan) / row["memory/limit_gib"]
    if row.get("train/optimizer_steps") and "train/micro_batches" in row:
        found[DIVIDED] = row["train/micro_batches"] / row["train/optimizer_steps"]
    return found


def _above(before: Sequence[float], after: Sequence[float]) -> bool:
    """True if the mean of the second values is above that of the first by two standard errors."""
    if min(len(before), len(after)) < 2:
        return False
    error = math.hypot(*(stdev(values) / math.sqrt(len(values)) for values in (before, after)))
    return fmean(after) - fmean(before) > 2 * error


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Args:
        title: what goes wrong, as a sentence.
        metric: the value that it is about; ``also`` another one.
        holds: True if the value is beyond its bound over some steps.
        remedy: alternatives, divided by ``|``; one whose ``SETTING=VALUE`` a run has already is left out.
        section: of ``docs/troubleshooting.md``.
        causes: advisories of which this follows, and while one of them lasts it is not raised.
        steps: the number of last steps that are judged; 1 for an evaluation.
    """

    title: str
    metric: str
    holds: Callable[[History], bool]
    remedy: str
    section: str
    causes: tuple[str, ...] = ()
    steps: int = WINDOW
    also: str = ""


def _is_unstable(h: History) -> bool:
    """True if the reward fell far below its best with another sign that the policy went off course.

    The fall is half of a response's standard deviation, and four standard errors of the two means of groups.
    """
    if not h.best:
        return False
    high, low, spread = h.best[REWARD], h.mean(REWARD), (h.best["reward/std"], h.median("reward/std"))
    if not high - low > max(4 * math.hypot(*spread) / math.sqrt(WINDOW * h.groups), 0.5 * max(spread)):
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
    now, was = h.median("kl/ref"), median(h.values("kl/ref", 2 * WINDOW)[:WINDOW])
    target = h.facts.get("policy.target_kl") or math.inf
    useless = now > 0.2 and now > 2 * was and not h.rises(REWARD)
    return not math.isnan(was) and (useless or (now > 3 * target and now >= was) or now > 5)


RESPONSES = "the-reward-rises-and-the-responses-get-worse"
NOTHING_LEARNED = "all-rewards-are-equal-and-nothing-is-learned"
# Bounds as seen in healthy runs of the quickstart: it begins with 0.59 of its responses cut off, but is below 0.5 at
# the third step; its entropy ends at 0.1 of the first steps' while the reward still rises; responses shrink to 0.62.
RULES: dict[str, Rule] = {
    "unstable": Rule(
        "Training is unstable", REWARD, _is_unstable,
        "a tenth of optimizer.lr|a higher policy.kl_coef|an earlier checkpoint", "training-is-unstable"),
    "bad_steps": Rule(
        "Optimizer steps are skipped", SKIPPED, lambda h: len(h.growth(SKIPPED)) >= 3,
        "a tenth of optimizer.lr|a higher optimizer.warmup_steps|train_model.dtype=float32", "nan-and-infinity"),
    "scorers_fail": Rule(
        "Scorers fail", FAILED, lambda h: len(found := h.growth(FAILED)) >= 3 and sum(found) >= 0.1 * h.responses,
        "a higher env.score_timeout_s|mending env.reward or env.rewards: the first failure of each kind was printed",
        "scorers-fail"),
    "cut_off": Rule(
        "Responses are cut off", CUT, lambda h: (h.mean(CUT, EARLY) >= 0.85 or h.mean(CUT) >= 0.6) and not h.falls(CUT),
        "a higher sampling.max_new_tokens|shorter responses (env.system_prompt, env.examples)",
        "responses-are-cut-off", ("unstable",), EARLY),
    "zero_rewards": Rule(
        "All rewards are 0", "reward/std", lambda h: not any(h.values(REWARD) + h.values("reward/std")),
        "an example of the form in the prompt (env.examples)|a reward for the form (env.rewards)|easier rows (env.path)"
        ", after reading responses in completions.parquet", NOTHING_LEARNED, ("unstable", "scorers_fail", "cut_off")),
    "entropy_collapse": Rule(
        "Entropy collapses", "entropy",
        lambda h: h.mean("entropy") <= 0.1 and h.mean("entropy") <= 0.2 * h.first("entropy")
        and h.mean(ALIKE) >= 0.5 and not h.rises(REWARD) and h.median("reward/std") > 0.1 * abs(h.mean(REWARD)),
        "a higher policy.entropy_coef, such as 0.001|a higher policy.kl_coef|a lower optimizer.lr",
        "entropy-collapses", ("unstable",)),
    "no_variance": Rule(
        "Nearly all groups have zero variance", ALIKE,
        lambda h: (h.mean(ALIKE, EARLY) >= 0.97 or (h.mean(ALIKE) >= 0.9 and not h.rises(REWARD)))
        and not h.falls(ALIKE) and any(h.values(REWARD, EARLY)),
        "a higher train.max_resamples, such as 5|a higher env.repeats|a higher policy.entropy_coef, such as 0.001"
        "|a reward that distinguishes responses (env.reward, env.rewards)|rows of another difficulty (env.path)"
        "|a tenth of optimizer.lr, if it came at once",
        NOTHING_LEARNED, ("unstable", "scorers_fail", "cut_off", "zero_rewards", "entropy_collapse"), EARLY),
    "no_gradient": Rule(
        "The gradient is 0", "grad_norm", lambda h: max(h.values("grad_norm", EARLY)) == 0 and h.mean(ALIKE, EARLY) < 1,
        "train.reward_clip=null|loss.mask_truncated=false|finding what else leaves tokens out",
        "the-gradient-is-0-though-rewards-differ", steps=EARLY),
    "held_out_loss_rises": Rule(
        "The held-out loss rises",
        "eval/loss", lambda h: h.last_eval.get("eval/loss", 0.0) > 1.05 * h.best_eval.get("eval/loss", math.inf),
        "a lower train.epochs|a lower optimizer.lr|more rows (env.path)",
        "the-held-out-loss-of-demonstrations-rises", steps=1),
    "held_out_falls": Rule(
        "The held-out reward falls while the training reward rises", "eval/reward", _held_out_falls,
        "an earlier checkpoint and another env.reward or env.path, after reading completions.parquet",
        RESPONSES, steps=1),
    "paid_for_length": Rule(
        "Longer responses earn more",
        LENGTH, lambda h: h.mean(LENGTH) >= 1.5 * h.first(LENGTH) and h.mean("response/length_correlation") >= 0.5,
        "env.rewards.soft_overlong_punishment, after reading them in completions.parquet", RESPONSES),
    "repetition": Rule(
        "Responses repeat themselves",
        REPEATED, lambda h: h.mean(REPEATED) >= 0.3 and h.mean(REPEATED) >= h.first(REPEATED) + 0.15,
        "env.rewards.repetition_penalty, after reading them in completions.parquet", RESPONSES, ("unstable",)),
    "length_limit": Rule(
        "Responses grow into the length limit",
        CUT, lambda h: h.mean(LENGTH) >= 1.25 * h.first(LENGTH) and h.mean(CUT) >= max(0.2, 1.5 * h.first(CUT)),
        "a higher sampling.max_new_tokens, if the length is of use|env.rewards.soft_overlong_punishment|loss=dr_grpo",
        "responses-grow-or-shrink", ("unstable", "cut_off", "paid_for_length")),
    "length_collapse": Rule(
        "Responses get short without earning more",
        LENGTH, lambda h: h.mean(LENGTH) <= 0.4 * h.first(LENGTH) and h.mean(REWARD) <= h.first(REWARD),
        "a lower optimizer.lr|a higher policy.kl_coef|a reward that a short response can't earn (env.rewards)",
        "responses-grow-or-shrink", ("unstable", "zero_rewards")),
    "kl_runaway": Rule(
        "The KL to the reference runs away", "kl/ref", _kl_runs_away,
        "a higher policy.kl_coef|a lower optimizer.lr", "the-kl-to-the-reference-runs-away", ("unstable",)),
    "mismatch_rises": Rule(
        "Sampler and trainer drift apart", GAP, lambda h: h.median(GAP) >= 0.1 and h.median(GAP) >= 2 * h.first(GAP),
        "loss.correction=truncate|a lower optimizer.lr|train_model.dtype=float32",
        "mismatchmean-is-high-or-the-run-stops-for-it"),
    "off_policy": Rule(
        "The policy is far from the one that sampled",
        "ess", lambda h: h.median("ess") < 0.5 or h.median(CLIPPED) > 0.5,
        "train.epochs=1|a lower train.max_staleness, if sampling goes on while it trains|a lower optimizer.lr",
        "the-policy-is-far-from-the-one-that-sampled", ("unstable",), also=CLIPPED),
    "trainer_waits": Rule(
        "The trainer waits", WAITING, lambda h: h.mean(WAITING) >= 0.5,
        "a higher inference_model.num_devices|a higher env.num_envs|a higher train.max_staleness",
        "time-goes-to-waiting-and-sampling"),
    # Up to 64 responses, more of them take hardly any longer: each decoding step reads all weights.
    "sampling_dominates": Rule(
        "Sampling takes most of a step", SAMPLING, lambda h: h.median(SAMPLING) >= 0.85
        and (h.responses <= 64 or h.facts.get("inference_model.engine") == "transformers"),
        "inference_model.engine=vllm|a higher env.num_envs, with train.optim_batch_size",
        "time-goes-to-waiting-and-sampling"),
    # On an H100 a token of a micro-batch of 512 took 13 times as long as one of 16,384.
    "small_micro_batches": Rule(
        "Micro-batches are small", TOKENS, lambda h: h.median(DIVIDED) >= 4 and h.median(TOKENS) < 1024
        and (h.facts.get("train.gradient_accumulation_steps") is not None
             or (h.facts.get("train.micro_batch_tokens") or 1024) < 1024),
        "train.gradient_accumulation_steps=null|train.micro_batch_tokens=8192", "micro-batches-are-small"),
    "memory_full": Rule(
        "Memory is nearly full", MEMORY, lambda h: min(h.values(MEMORY, EARLY)) >= 0.95,
        "a lower train.micro_batch_tokens|train_model.gradient_checkpointing=true"
        "|a lower inference_model.gpu_memory_utilization, if an engine shares the GPU",
        "memory-is-nearly-full", steps=EARLY),
}  # fmt: skip
"""Causes come before what follows from them."""
LEFT_OUT = {
    ("loss.surrogate", "none"): ("zero_rewards", "no_variance", "no_gradient", "entropy_collapse"),
    ("sampling.ignore_eos", True): ("cut_off", "length_limit"),
}
"""Rules that don't apply under a setting: in distillation groups teach without variance in rewards, and under
``ignore_eos`` every response is meant to have the limit's length."""


@dataclass
class Advisory:
    """Something that goes wrong in a run, which has one of each name at most.

    Args:
        seen: its numbers, when it was found.
        since: the first of the steps that showed it.
        until: the last step that showed it; None while it lasts.
        setting: the setting to change, its value, and what to try.
    """

    name: str
    seen: str
    since: int
    until: int | None
    setting: str
    page: str

    @property
    def title(self) -> str:
        """The rule's title, and the steps in which its condition held."""
        when = f"since step {self.since}" if self.until is None else f"steps {self.since} to {self.until}"
        return f"{RULES[self.name].title}, {when}"

    def __str__(self) -> str:
        return f"{self.title}: {self.seen}. Try {self.setting}. See {self.page}"


class Advisories:
    """Reads a run's metrics, line by line, and raises each advisory once: when its condition has held for some steps.

    It ends when the condition has not held for ``EARLY`` steps. One that comes back goes on, and is not raised again.

    Args:
        config: the run's config; settings that are missing are named without their values.
        rows: the lines of metrics so far.
    """

    def __init__(self, config: Mapping[str, Any], rows: Iterable[Row] = ()) -> None:
        self._history = History(flat(config))
        left_out = [LEFT_OUT[given] for given in LEFT_OUT if self._history.facts.get(given[0]) == given[1]]
        self._rules = {name: rule for name, rule in RULES.items() if not any(name in names for names in left_out)}
        self.raised: dict[str, Advisory] = {}
        """The advisories so far by name, in the order in which they were raised."""
        self._held: dict[str, int] = {}
        """The last step at which each condition held."""
        for row in rows:
            self.update(row)

    def update(self, row: Row) -> list[Advisory]:
        """Takes a line of metrics, and returns the advisories that are due now for the first time."""
        self._history.add(row)
        new = []
        for name, rule in self._rules.items():
            found = self.raised.get(name)
            if rule.holds(self._history):
                self._held[name] = int(row["step"])
                if found:
                    found.until = None
                elif not any(cause in self.raised and self.raised[cause].until is None for cause in rule.causes):
                    self.raised[name] = self._advisory(name, rule, int(row["step"]))
                    new.append(self.raised[name])
            elif found and row["step"] - self._held[name] >= EARLY:
                found.until = self._held[name]
        return new

    def _advisory(self, name: str, rule: Rule, step: int) -> Advisory:
        h, metric = self._history, rule.metric
        now, then = h.mean(metric, 1 if metric in (SKIPPED, FAILED) else rule.steps), h.first(metric)
        best = h.best if name == "unstable" else {}
        if metric.startswith("eval/"):
            now, best, step = h.last_eval[metric], h.best_eval, int(h.last_eval["step"])
        was = f"{best[metric]:.3g} at step {best['step']:g}" if best else "" if math.isnan(then) else f"{then:.3g}"
        seen = f"{metric} is {now:.3g}" + (f", and was {was}" if was else "")
        seen += f"; {rule.also} is {h.median(rule.also):.3g}" if rule.also else ""
        since, page = max(step - rule.steps + 1, 1), f"{PAGE}#{rule.section}"
        return Advisory(name, seen, since, None, remedy(rule.remedy, h.facts), page)


def remedy(text: str, facts: Mapping[str, Any]) -> str:
    """The alternatives of a rule's remedy that a run has not taken yet, with the values that its settings have now.

    >>> remedy("a lower optimizer.lr|policy.kl_coef=0.01", {"optimizer.lr": 1e-05, "policy.kl_coef": 0.01})
    'a lower optimizer.lr (now 1e-05)'
    """
    now = {
        name: f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str).strip('"')
        for name, value in facts.items()
    }

    def with_value(match: re.Match) -> str:
        # A text is shown only where another is advised.
        shows = match[1] in now and (match[2] or isinstance(facts[match[1]], int | float))
        return f"{match[0]} (now {now[match[1]]})" if shows else match[0]

    parts = [part for part in text.split("|") if not any(now.get(n) == value for n, value in SETTING.findall(part))]
    return SETTING.sub(with_value, ", or ".join(parts))
