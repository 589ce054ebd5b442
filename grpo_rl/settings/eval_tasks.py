"""The extra held-out tasks that a run evaluates, ``evaluate.tasks``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_rl.settings.declaration import REQUIRED, Section, read_section, setting
from grpo_rl.settings.tasks import check_names

OF_TRAINING = ("dataset", "eval_path", "num_envs", "repeats", "curriculum")
"""Settings of ``env`` that an entry can't have: its own keys name task and data, and nothing is trained on."""


class EvalTask(Section):
    """An entry of ``evaluate.tasks``."""

    task: str = setting(REQUIRED, "the task")
    rows: int = setting(REQUIRED, "the number of its held-out rows", at_least=2)
    samples: int = setting(0, "extra sampled responses to each row", at_least=0)
    path: str | None = setting(None, "its held-out data")
    env: Mapping[str, Any] = setting({}, "its own settings that differ from the defaults")


def read_tasks(tasks: Sequence[Mapping[str, Any]]) -> list[EvalTask]:
    """The entries; their own settings are not checked.

    Raises:
        ValueError: an entry names no such task, has an unknown key or a wrong value; or two have one name.
    """
    found = [read_section(EvalTask, task, f"evaluate.tasks[{i}]") for i, task in enumerate(tasks)]
    check_names([task.task for task in found], "evaluate.tasks")
    for i, task in enumerate(found):
        if task.task == "agent":
            raise ValueError(f"evaluate.tasks[{i}] is agent, which is evaluated where it is trained; name its scorer")
        if taken := [name for name in OF_TRAINING if name in task.env]:
            raise ValueError(f"evaluate.tasks[{i}].env.{taken[0]} has no effect here; use task, path, rows and samples")
    return found
