"""Advisories: what goes wrong in a run, since when, and which setting to change.

`docs/troubleshooting.md` has a section for each, with the reasons; the conditions are `advisory_table.RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_rl.monitor.advisory_history import EARLY, WINDOW, History, Row, fall_of_reward, is_training_step, span
from grpo_rl.monitor.advisory_table import EVALUATION, RULES, Rule
from grpo_rl.storage.dotted import flat

OF_ADVANTAGES = ("zero_rewards", "no_variance", "no_gradient", "entropy_collapse")
"""Advisories that distillation, ``loss.surrogate=none``, does without: groups teach without variance in rewards."""
PAGE = "docs/troubleshooting.md"
SETTING = re.compile(r"\b([a-z_]+\.[a-z_]+)(?:([*+?=-])([\w.]+))?")
"""A setting in a remedy, and what to do with its value."""


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

    >>> advisories = Advisories({"env": {"num_envs": 16}, "sampling": {"max_new_tokens": 24}})
    >>> for step in range(1, 11):
    ...     row = {"step": step, "reward/mean": 0.5, "response/truncated_fraction": 0.97}
    ...     for advisory in advisories.update(row):
    ...         print(advisory.name, advisory.seen, advisory.setting, sep="; ")  # doctest: +NORMALIZE_WHITESPACE
    cut_off; 97% of the responses are cut off; sampling.max_new_tokens=48 (now 24), or shorter responses
    (env.system_prompt, env.examples)

    Args:
        config: the run's config; settings that are missing are named without their values.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._history = History(flat(config))
        self._raised: dict[str, Advisory] = {}
        self._last: dict[str, int] = {}
        self._quiet: dict[str, int] = {}

    @property
    def raised(self) -> list[Advisory]:
        """The advisories so far, in the order in which they were raised."""
        return list(self._raised.values())

    def update(self, row: Row) -> list[Advisory]:
        """Takes a line of metrics, and returns the advisories that are due now for the first time."""
        history = self._history
        history.add(row)
        new = []
        for name, rule in RULES.items():
            if history.facts.get("loss.surrogate") == "none" and name in OF_ADVANTAGES:
                continue
            if not rule.holds(history):
                self._fade(name, row)
                continue
            first, self._last[name] = _since(rule, history)
            self._quiet[name] = 0
            if name in self._raised:
                self._raised[name] = replace(self._raised[name], until=None)
            elif not any(map(self._lasts, rule.causes)):
                page = f"{PAGE}#{rule.section}"
                new.append(Advisory(name, _seen(rule, history), first, None, remedy(rule.remedy, history), page))
                self._raised[name] = new[-1]
        return new

    def _lasts(self, name: str) -> bool:
        return name in self._raised and self._raised[name].until is None

    def _fade(self, name: str, row: Row) -> None:
        if not self._lasts(name) or not is_training_step(row):
            return
        self._quiet[name] += 1
        if self._quiet[name] >= EARLY:
            self._raised[name] = replace(self._raised[name], until=self._last[name])


def advisories_of(rows: Iterable[Row], config: Mapping[str, Any]) -> list[Advisory]:
    """The advisories of a run, from its lines of metrics, in the order in which they were raised."""
    advisories = Advisories(config)
    for row in rows:
        advisories.update(row)
    return advisories.raised


def _since(rule: Rule, history: History) -> tuple[int, int]:
    """The first and the last step that show what a rule is about."""
    if rule.metric == EVALUATION:
        return (int(history.evaluations[1]["step"]),) * 2
    if history.alike and rule is RULES["unstable"]:
        return history.alike[0], int(history.row["step"])
    if not (shows := rule.shows):
        grown = history.growth(rule.metric)
        return grown[0][0], grown[-1][0]
    points = history.last(rule.metric)
    return span(points, lambda value: shows(value, history)) if points else (int(history.row["step"]),) * 2


def _seen(rule: Rule, history: History) -> str:
    steps = min(WINDOW, max(len(history.last(rule.metric)), 1))
    best, newest = history.evaluations if len(history.evaluations) > 1 else ({}, {})
    return rule.seen.format(
        now=history.mean(rule.metric, steps),
        first=history.first(rule.metric),
        before=history.before(rule.metric),
        fall=fall_of_reward(history) or "all responses to all prompts earn the same from one step to the next",
        best=best,
        newest=newest,
    )


def remedy(text: str, history: History) -> str:
    """The alternatives of a rule's remedy for a run, with the values that settings have now.

    >>> remedy("optimizer.lr*0.1|policy.kl_coef?0.01", History({"optimizer.lr": 0.01, "policy.kl_coef": 0.5}))
    'optimizer.lr=0.001 (now 0.01)'
    >>> remedy("optimizer.lr*0.1|policy.kl_coef?0.01", History({}))
    'a lower optimizer.lr, or policy.kl_coef=0.01'
    """
    found = []
    for alternative in text.split("|"):
        metric, _, rest = alternative.rpartition(": ")
        if "/" in metric and metric not in history.row:
            continue
        alternative = rest if "/" in metric else alternative
        settings = [match.groups() for match in SETTING.finditer(alternative)]
        if any(_is_done(history.facts, *setting) for setting in settings):
            continue
        found.append(SETTING.sub(lambda match: _change(history.facts, *match.groups()), alternative))
    return ", or ".join(found)


def _is_done(facts: Mapping[str, Any], name: str, what: str | None, value: str | None) -> bool:
    """True if a setting has the value of a remedy already, or can't have a lower one."""
    now = facts.get(name)
    if what in ("-", "*") and value and isinstance(now, int) and not name.endswith(".lr"):
        return now * float(value) < 1 if what == "*" else now < int(value)
    return (what == "?" and bool(now)) or (what == "=" and name in facts and _text(now) == value)


def _change(facts: Mapping[str, Any], name: str, what: str | None, value: str | None) -> str:
    """The value to try for a setting, and the one it has now."""
    if what is None or value is None:
        return name
    now = facts.get(name)
    if what in ("?", "="):
        return f"{name}={value}" + (f" (now {_text(now)})" if name in facts else "")
    if not isinstance(now, int | float) or isinstance(now, bool) or (what == "*" and not now):
        return f"a {'lower' if what == '-' or value.startswith('0.') else 'higher'} {name}"
    new = now * float(value) if what == "*" else max(now + int(f"{what}{value}"), 0)
    return f"{name}={_text(round(new) if isinstance(now, int) and new >= 1 else new)} (now {_text(now)})"


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:.3g}" if isinstance(value, float) else str(value)
