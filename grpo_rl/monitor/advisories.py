"""Advisories: what goes wrong in a run, since when, and which setting to change.

`docs/troubleshooting.md` has a section for each, with the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_rl.monitor.advice import drift, hacking, learning, machine
from grpo_rl.monitor.advice.history import EARLY, Facts, Finding, History, Row, Rule, is_training_step

FACTS = (
    "env.num_envs",
    "env.repeats",
    "env.score_timeout_s",
    "inference_model.engine",
    "inference_model.gpu_memory_utilization",
    "inference_model.max_model_len",
    "inference_model.num_devices",
    "loss.mask_truncated",
    "loss.surrogate",
    "optimizer.lr",
    "policy.entropy_coef",
    "policy.kl_coef",
    "policy.target_kl",
    "sampling.ignore_eos",
    "sampling.max_new_tokens",
    "sampling.temperature",
    "train.epochs",
    "train.gradient_accumulation_steps",
    "train.max_resamples",
    "train.max_staleness",
    "train.micro_batch_tokens",
    "train.optim_batch_size",
    "train.reward_clip",
    "train_model.dtype",
    "train_model.gradient_checkpointing",
)
"""The settings that advisories go by, or name with their values."""
RULES: dict[str, tuple[Rule, str]] = {
    "unstable": (learning.unstable, "training-is-unstable"),
    "bad_steps": (learning.bad_steps, "nan-and-infinity"),
    "scorers_fail": (machine.scorers_fail, "scorers-fail"),
    "cut_off": (learning.cut_off, "responses-are-cut-off"),
    "zero_rewards": (learning.zero_rewards, "all-rewards-are-equal-and-nothing-is-learned"),
    "entropy_collapse": (learning.entropy_collapse, "entropy-collapses"),
    "no_variance": (learning.no_variance, "all-rewards-are-equal-and-nothing-is-learned"),
    "no_gradient": (learning.no_gradient, "the-gradient-is-0-though-rewards-differ"),
    "held_out_loss_rises": (learning.held_out_loss_rises, "the-held-out-loss-of-demonstrations-rises"),
    "held_out_falls": (hacking.held_out_falls, "the-reward-rises-and-the-responses-get-worse"),
    "paid_for_length": (hacking.paid_for_length, "the-reward-rises-and-the-responses-get-worse"),
    "repetition": (hacking.repetition, "the-reward-rises-and-the-responses-get-worse"),
    "length_limit": (learning.length_limit, "responses-grow-or-shrink"),
    "length_collapse": (learning.length_collapse, "responses-grow-or-shrink"),
    "kl_runaway": (drift.kl_runaway, "the-kl-to-the-reference-runs-away"),
    "mismatch_rises": (drift.mismatch_rises, "mismatchmean-is-high-or-the-run-stops-for-it"),
    "off_policy": (drift.off_policy, "the-policy-is-far-from-the-one-that-sampled"),
    "trainer_waits": (machine.trainer_waits, "time-goes-to-waiting-and-sampling"),
    "sampling_dominates": (machine.sampling_dominates, "time-goes-to-waiting-and-sampling"),
    "small_micro_batches": (machine.small_micro_batches, "micro-batches-are-small"),
    "memory_full": (machine.memory_full, "memory-is-nearly-full"),
}
"""Each advisory's condition and section, causes before what follows from them."""
CAUSES = {
    "cut_off": ("unstable",),
    "zero_rewards": ("unstable", "scorers_fail", "cut_off"),
    "no_variance": ("unstable", "scorers_fail", "cut_off", "zero_rewards", "entropy_collapse"),
    "entropy_collapse": ("unstable",),
    "repetition": ("unstable",),
    "length_limit": ("unstable", "cut_off", "paid_for_length"),
    "length_collapse": ("unstable", "zero_rewards"),
    "kl_runaway": ("unstable",),
    "off_policy": ("unstable",),
}
"""The causes of an advisory that is not told while one of them is the case: one cause, one advisory."""
OF_ADVANTAGES = ("zero_rewards", "no_variance", "no_gradient", "entropy_collapse")
"""Advisories that distillation, ``loss.surrogate=none``, does without: groups teach without variance in rewards."""
PAGE = "docs/troubleshooting.md"


@dataclass(frozen=True)
class Advisory:
    """Something that goes wrong in a run.

    Args:
        name: its kind; a run has one of each at most.
        seen: its numbers, when it was found.
        since: the first step that shows it.
        until: the last step that showed it; None while it lasts.
        setting: the setting to change, its value, and what to try.
        page: the section of the docs about it.
    """

    name: str
    seen: str
    since: int
    until: int | None
    setting: str
    page: str

    def __str__(self) -> str:
        """One line for the terminal."""
        until = "" if self.until is None else f" until step {self.until}"
        return f"Since step {self.since}{until}: {self.seen}. Try {self.setting}. See {self.page}"


class Advisories:
    """Reads a run's metrics, line by line, and raises each advisory once: when its condition has held for some steps.

    It ends when the condition has not held for ``EARLY`` steps. One that comes back goes on, and is not raised again.

    >>> advisories = Advisories({"env.num_envs": 16, "sampling.max_new_tokens": 24})
    >>> for step in range(1, 11):
    ...     row = {"step": step, "reward/mean": 0.5, "response/truncated_fraction": 0.97}
    ...     for advisory in advisories.update(row):
    ...         print(advisory.name, advisory.seen, advisory.setting, sep="; ")  # doctest: +NORMALIZE_WHITESPACE
    cut_off; 97% of the responses of the last 5 steps are cut off at 24 tokens; sampling.max_new_tokens=48 (now 24), or
    ask for shorter responses (env.system_prompt, env.examples)

    Args:
        facts: settings by their dotted names, as of :func:`facts_of`; those that are missing are not named.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._history = History()
        self._raised: dict[str, Advisory] = {}
        self._found: dict[str, Finding] = {}
        self._quiet: dict[str, int] = {}

    @property
    def raised(self) -> list[Advisory]:
        """The advisories so far, in the order in which they were raised."""
        return list(self._raised.values())

    def update(self, row: Row) -> list[Advisory]:
        """Takes a line of metrics, and returns the advisories that are due now for the first time."""
        self._history.add(row)
        new = []
        for name, (rule, section) in RULES.items():
            if self._facts.get("loss.surrogate") == "none" and name in OF_ADVANTAGES:
                continue
            finding = rule(self._history, self._facts)
            if finding is None:
                self._fade(name, row)
            elif name in self._raised:
                self._found[name], self._quiet[name] = finding, 0
                self._raised[name] = replace(self._raised[name], until=None)
            elif not any(self._lasts(cause) for cause in CAUSES.get(name, ())):
                self._found[name], self._quiet[name] = finding, 0
                page = f"{PAGE}#{section}"
                new.append(Advisory(name, finding.seen, finding.first, None, finding.setting, page))
                self._raised[name] = new[-1]
        return new

    def _lasts(self, name: str) -> bool:
        return name in self._raised and self._raised[name].until is None

    def _fade(self, name: str, row: Row) -> None:
        if not self._lasts(name) or not is_training_step(row):
            return
        self._quiet[name] += 1
        if self._quiet[name] >= EARLY:
            self._raised[name] = replace(self._raised[name], until=self._found[name].last)


def advisories_of(rows: Iterable[Row], facts: Facts) -> list[Advisory]:
    """The advisories of a run, from its lines of metrics, in the order in which they were raised."""
    advisories = Advisories(facts)
    for row in rows:
        advisories.update(row)
    return advisories.raised


def facts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of ``FACTS`` by their dotted names, from a config as a run folder keeps it.

    What the config lacks is left out.

    >>> facts_of({"env": {"num_envs": 4, "path": "x"}, "optimizer": {"lr": 0.1}})
    {'env.num_envs': 4, 'optimizer.lr': 0.1}
    """
    sections = {name: config.get(name.split(".")[0]) for name in FACTS}
    keys = {name: name.split(".")[1] for name in FACTS}
    return {
        name: section[keys[name]]
        for name, section in sections.items()
        if isinstance(section, Mapping) and keys[name] in section
    }
