"""Advisories: what goes wrong in a run, since when, and which setting to change.

`docs/troubleshooting.md` has a section for each, with the reasons; the conditions are `advisory_table.RULES`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_rl.monitor.advisory_table import EARLY, RULES, History, Row
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
        until = "" if self.until is None else f" until step {self.until}"
        return f"Since step {self.since}{until}: {self.seen}. Try {self.setting}. See {self.page}"


class Advisories:
    """Reads a run's metrics, line by line, and raises each advisory once: when its condition has held for some steps.

    It ends when the condition has not held for ``EARLY`` steps. One that comes back goes on, and is not raised again.

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
        until = {name: None if self._lasts(name) else self._held[name] for name in self._raised}
        return [replace(found, until=until[name]) for name, found in self._raised.items()]

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
                seen, setting = rule.seen_in(history), remedy(rule.remedy, history.facts)
                self._raised[name] = Advisory(name, seen, rule.since(history), None, setting, f"{PAGE}#{rule.section}")
                new.append(self._raised[name])
            self._held[name] = self._step
        return new

    def _lasts(self, name: str) -> bool:
        return name in self._raised and self._step - self._held[name] < EARLY


def advisories_of(rows: Iterable[Row], config: Mapping[str, Any]) -> list[Advisory]:
    """The advisories of a run, from its lines of metrics, in the order in which they were raised."""
    advisories = Advisories(config)
    for row in rows:
        advisories.update(row)
    return advisories.raised


def remedy(text: str, facts: Mapping[str, Any]) -> str:
    """The alternatives of a rule's remedy that a run has not taken yet, with the values that its settings have now.

    >>> remedy("a lower optimizer.lr|policy.kl_coef=0.01", {"optimizer.lr": 1e-05, "policy.kl_coef": 0.01})
    'a lower optimizer.lr (now 1e-05)'
    """
    texts = {name: json.dumps(value, default=str).strip('"') for name, value in facts.items()}
    now = texts | {name: f"{value:g}" for name, value in facts.items() if isinstance(value, float)}

    def with_value(match: re.Match) -> str:
        # A text is shown only where another is advised.
        shows = match[1] in now and (match[2] or isinstance(facts[match[1]], int | float))
        return f"{match[0]} (now {now[match[1]]})" if shows else match[0]

    def is_taken(part: str) -> bool:
        return any(now.get(name) == value for name, value in SETTING.findall(part))

    return ", or ".join(SETTING.sub(with_value, part) for part in text.split("|") if not is_taken(part))
