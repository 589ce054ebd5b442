"""Rows for agents: sessions of a program of one's own, scored by another task or by what the program tells."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_rl.envs.sources import Source
from grpo_rl.envs.spec import TaskSpec, task_spec
from grpo_rl.envs.tables import load_rows
from grpo_rl.envs.task import Messages, Reward, Task

TOLD = "agent_reward"
"""The column under which a session's reward stands, as its agent told it."""
SHOWN = 500
"""Characters of a row that people are shown as its question."""


class Told(Task):
    """Rows of any columns; a session earns what its agent says.

    An agent that plays a game of which the row is the seed tells 1 when it wins:

    >>> task = Told([{"seed": 7}])
    >>> task.prompt(task.rows[0])[0]["content"], task.score({"seed": 7, "agent_reward": 1.0}, "").parts
    ('{"seed": 7}', {'agent': 1.0})
    """

    reward_parts = ("agent",)

    def __init__(self, rows: Sequence[dict]) -> None:
        self.rows = rows

    def prompt(self, row: dict) -> Messages:
        """The row as JSON, for people: the agent makes its own prompts."""
        return [{"role": "user", "content": json.dumps(row, default=str, ensure_ascii=False)[:SHOWN]}]

    def score(self, row: dict, response: str) -> Reward:
        """The reward that the agent told."""
        return Reward({"agent": row[TOLD]})


def _load_rows(path: str | Path | Source | None = None, split: str = "train") -> Sequence[dict]:
    return load_rows(path, split, reader="env.dataset=agent")


TOLD_SPEC = TaskSpec(Told, _load_rows)


@dataclass(frozen=True)
class AgentSpec(TaskSpec):
    """Another task, whose rows agents play and whose scorer judges their final messages; or :class:`Told`.

    Of the settings, ``scorer`` names the task and ``scorer_settings`` are its own. The others are the agent's.
    """

    def make_task(self, path: str | Path | Source | None = None, split: str = "train", **settings: Any) -> Task:
        """See :meth:`TaskSpec.make_task`."""
        spec, own = _scorer(settings)
        return spec.make_task(path, split, **own)

    def rows(self, path: str | Path | Source | None, split: str, settings: Mapping[str, Any]) -> Sequence[dict]:
        """See :meth:`TaskSpec.rows`."""
        spec, own = _scorer(settings)
        return spec.rows(path, split, own)


def _scorer(settings: Mapping[str, Any]) -> tuple[TaskSpec, dict[str, Any]]:
    own = dict(settings["scorer_settings"])
    return (task_spec(settings["scorer"]), own) if settings["scorer"] else (TOLD_SPEC, own)


AgentEnv = AgentSpec(Told, _load_rows)
