"""Advisories: what goes wrong in a run, since when, and which setting to change.

`docs/troubleshooting.md` has a section for each, with the reasons; the conditions are `advisory_table.RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_rl.monitor.advisory_history import EARLY, History, Row
from grpo_rl.monitor.advisory_table import EVALUATION, RULES, Rule
from grpo_rl.storage.dotted import flat

OF_ADVANTAGES = ("zero_rewards", "no_variance", "no_gradient", "entropy_collapse")
"""Advisories that distillation, ``loss.surrogate=none``, does without: groups teach without variance in rewards."""
PAGE = "docs/troubleshooting.md"
SETTING = re.compile(r"\b([a-z_]+\.[a-z_]+)(?:=([\w.]+))?")
"""A setting in a remedy, and the value that it gets."""


@dataclass(frozen=True)
class Advisory:
    """Something that goes wrong in a run.

    Args:
        name: its kind; a run has one of each at most.
        seen: its numbers, when it was found.
        since: the first of the steps that showed it.
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

    >>> advisories = Advisories({"env": {"num_envs": 16}, "sampling": {"max_new_tokens": 24}})
    >>> for step in range(1, 11):
    ...     row = {"step": step, "reward/mean": 0.5, "response/truncated_fraction": 0.97}
    ...     for advisory in advisories.update(row):
    ...         print(advisory.name, advisory.seen, advisory.setting, sep="; ")  # doctest: +NORMALIZE_WHITESPACE
    cut_off; 97% of the responses are cut off; a higher sampling.max_new_tokens (now 24), or shorter responses
    (env.system_prompt, env.examples)

    Args:
        config: the run's config; settings that are missing are named without their values.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._history = History(flat(config))
        self._raised: dict[str, Advisory] = {}
        self._held: dict[str, int] = {}
        """The last step at which each condition held."""
        self._step = 0

    @property
    def raised(self) -> list[Advisory]:
        """The advisories so far, in the order in which they were raised."""
        return [replace(found, until=self._until(name)) for name, found in self._raised.items()]

    def update(self, row: Row) -> list[Advisory]:
        """Takes a line of metrics, and returns the advisories that are due now for the first time."""
        history, new = self._history, []
        history.add(row)
        self._step = int(row["step"])
        for name, rule in RULES.items():
            if history.facts.get("loss.surrogate") == "none" and name in OF_ADVANTAGES:
                continue
            if not rule.holds(history):
                continue
            if name not in self._raised:
                if any(map(self._lasts, rule.causes)):
                    continue
                seen, setting = _seen(rule, history), remedy(rule.remedy, history.facts)
                new.append(Advisory(name, seen, _since(rule, history), None, setting, f"{PAGE}#{rule.section}"))
                self._raised[name] = new[-1]
            self._held[name] = self._step
        return new

    def _until(self, name: str) -> int | None:
        return None if self._step - self._held[name] < EARLY else self._held[name]

    def _lasts(self, name: str) -> bool:
        return name in self._raised and self._until(name) is None


def advisories_of(rows: Iterable[Row], config: Mapping[str, Any]) -> list[Advisory]:
    """The advisories of a run, from its lines of metrics, in the order in which they were raised."""
    advisories = Advisories(config)
    for row in rows:
        advisories.update(row)
    return advisories.raised


def _since(rule: Rule, history: History) -> int:
    return int(history.last_eval["step"]) if rule.metric == EVALUATION else [*history.steps][-rule.steps :][0]


def _seen(rule: Rule, history: History) -> str:
    return rule.seen.format(
        now=history.mean(rule.metric, rule.steps),
        last=history.values(rule.metric, 1)[0],
        first=history.first(rule.metric),
        before=history.before(rule.metric),
        best=history.best,
        best_eval=history.best_eval,
        last_eval=history.last_eval,
    )


def remedy(text: str, facts: Mapping[str, Any]) -> str:
    """The alternatives of a rule's remedy that a run has not taken yet, with the values that its settings have now.

    >>> remedy("a lower optimizer.lr|policy.kl_coef=0.01", {"optimizer.lr": 1e-05, "policy.kl_coef": 0.01})
    'a lower optimizer.lr (now 1e-05)'
    """
    found = []
    for alternative in text.split("|"):
        if any(name in facts and _text(facts[name]) == value for name, value in SETTING.findall(alternative)):
            continue
        found.append(SETTING.sub(lambda match: match[0] + _now(facts, *match.groups()), alternative))
    return ", or ".join(found)


def _now(facts: Mapping[str, Any], name: str, value: str | None) -> str:
    """The value that a setting has now, if it is a number, or if another value is advised."""
    shows = name in facts and (value or isinstance(facts[name], int | float))
    return f" (now {_text(facts[name])})" if shows else ""


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:.3g}" if isinstance(value, float) else str(value)
