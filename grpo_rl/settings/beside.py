"""The tasks that a run of another task evaluates, ``evaluate.tasks``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_rl.by_name import is_name, short_name
from grpo_rl.settings.own_task import task_section
from grpo_rl.settings.tasks import ALIASES, TASKS

KEYS = ("task", "rows", "samples", "path", "env")
"""The keys of an entry."""
NOT_BESIDE = {
    "prompt_response": "its reward is a setting of the run's own task",
    "search_qa": "its documents are a setting of the run's own task",
}
"""The tasks that a run of another task can't evaluate, and why."""


def check_tasks(tasks: Sequence[Mapping[str, Any]]) -> None:
    """Refuses what can't be evaluated beside a run's own task.

    Raises:
        ValueError: an entry names no such task, has a key or a setting that means nothing there, or lacks its rows; or
            two have one name.
    """
    names: list[str] = []
    for i, task in enumerate(tasks):
        where = f"evaluate.tasks[{i}]"
        if unknown := sorted(task.keys() - set(KEYS)):
            raise ValueError(f"{where} has {', '.join(unknown)}; it takes {', '.join(KEYS)}")
        names.append(name_beside(task.get("task"), where))
        for name, least in (("rows", 2), ("samples", 0)):
            value = task.get(name, least)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{where}.{name} is {value!r}; it must be a whole number, {least} or more")
        if "rows" not in task:
            raise ValueError(f"{where} lacks rows, the number of its held-out rows")
        _check_own(task, where)
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"evaluate.tasks names {twice[0]} twice")


def _check_own(task: Mapping[str, Any], where: str) -> None:
    given, name = task.get("env", {}), task["task"]
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}.env is {given!r}; it must be a mapping of the task's own settings")
    own = list(task_section(ALIASES.get(name, name)).__dataclass_fields__) if given else []
    if other := [key for key in given if key not in own]:
        raise ValueError(f"{where}.env.{other[0]} is no setting of {name} alone; it has {', '.join(own) or 'none'}")


def name_beside(task: object, where: str) -> str:
    """The name in metrics of a task that a run of another task evaluates.

    Args:
        task: what the setting says.
        where: the setting, for messages.

    Raises:
        ValueError: there is no such task, or it can't be evaluated beside another.

    >>> name_beside("math500", "evaluate.tasks[0]"), name_beside("my_tasks:Rhyme", "evaluate.tasks[1]")
    ('math500', 'Rhyme')
    """
    names = [name for name in (*TASKS, *ALIASES) if name not in NOT_BESIDE]
    if task in names or is_name(task):
        return short_name(str(task))
    because = f"{NOT_BESIDE[task]}; " if isinstance(task, str) and task in NOT_BESIDE else ""
    raise ValueError(
        f"{where}.task is {task!r}; {because}it can be {', '.join(names)} or package.module:Class, your own; after "
        "training `grpo-rl eval` takes all"
    )
