"""The tasks that a run of another task evaluates, ``evaluate.tasks``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_rl.by_name import is_name, short_name
from grpo_rl.settings.composing_errors import unknown
from grpo_rl.settings.declaration import REQUIRED, declared, leaves, select
from grpo_rl.settings.own_task import task_section
from grpo_rl.settings.tasks import ALIASES, SINGLE

KEYS = ("task", "rows", "samples", "path", "env")
"""The keys of an entry."""
ABSENT = object()


def check_tasks(tasks: Sequence[Mapping[str, Any]]) -> None:
    """Checks the entries, before a model or data is looked for.

    Raises:
        ValueError: an entry names no such task, has a key or a setting that means nothing there, a wrong value, or
            lacks its rows or a setting that its task can't do without; or two have one name.
    """
    names: list[str] = []
    for i, task in enumerate(tasks):
        where = f"evaluate.tasks[{i}]"
        if wrong := sorted(task.keys() - set(KEYS)):
            raise ValueError(f"{where} has {', '.join(wrong)}; it takes {', '.join(KEYS)}")
        names.append(eval_task_name(task.get("task"), where))
        for name, least in (("rows", 2), ("samples", 0)):
            value = task.get(name, least)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{where}.{name} is {value!r}; it must be a whole number, {least} or more")
        if "rows" not in task:
            raise ValueError(f"{where} lacks rows, the number of its held-out rows")
        if task["task"] == "agent":
            raise ValueError(
                f"{where} is agent, which evaluate.tasks can't have: evaluate.rows evaluates an agent where it is "
                "trained; name the scorer's task here"
            )
        if task["task"] == "prompt_response" and not task.get("path"):
            raise ValueError(f"{where} lacks path, its prompts; prompt_response has none of its own")
        if task["task"] == "search_qa" and task.get("path") and not task.get("env", {}).get("corpus"):
            raise ValueError(f"{where}.env lacks corpus: the documents in which the questions of path are answered")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"evaluate.tasks names {twice[0]} twice")
    for i, task in enumerate(tasks):
        _check_own(task, f"evaluate.tasks[{i}]")


def _check_own(task: Mapping[str, Any], where: str) -> None:
    given, name = task.get("env", {}), task["task"]
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}.env is {given!r}; it must be a mapping of the task's own settings")
    own = declared(task_section(ALIASES.get(name, name)))
    free = tuple(f"{key}." for key, setting in own.items() if setting.free)
    for key in leaves(given):
        if any(other.startswith(f"{key}.") for other in own):
            raise ValueError(f"{where}.env.{key} is {select(given, key)!r}, and it is a section; set its keys")
        if key not in own and not key.startswith(free):
            raise ValueError(f"{where}.env: {unknown(f'setting of {name}', key, own)}")
    for key, setting in own.items():
        value = select(given, key, ABSENT)
        if value is ABSENT:
            if (name, key) == ("prompt_response", "reward") or (is_name(name) and setting.default is REQUIRED):
                raise ValueError(f"{where}.env lacks {key}; {name} can't do without")
        elif line := setting.wrong_type(f"{where}.env.{key}", value) or setting.wrong_value(
            f"{where}.env.{key}", value
        ):
            raise ValueError(line)


def eval_task_name(task: object, where: str) -> str:
    """The name in metrics of a task that a run of another task evaluates.

    Args:
        task: what the setting says.
        where: the setting, for messages.

    Raises:
        ValueError: there is no such task.

    >>> eval_task_name("math500", "evaluate.tasks[0]"), eval_task_name("my_tasks:Rhyme", "evaluate.tasks[1]")
    ('math500', 'Rhyme')
    """
    names = SINGLE
    if task in names or is_name(task):
        return short_name(str(task))
    raise ValueError(f"{where}.task: {unknown('task', str(task), [*names, 'package.module:Class'])}")
