"""Rows for agents: sessions of a program of one's own, scored by another task or by the program itself."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any

from typing_extensions import override

from grpo_rl.envs.declared import means
from grpo_rl.envs.episodes import Episodes
from grpo_rl.envs.sources import AnySource
from grpo_rl.envs.spec import TaskSpec, task_spec
from grpo_rl.envs.tables import load_rows
from grpo_rl.envs.task import Messages, Reward, Task, Unjudgeable

TOLD = "agent_reward"
"""The column with the reward of a session that its agent sent."""
SHOWN = 500
"""Characters of a row that are shown as its question."""


class Told(Task):
    """Rows of any columns; a session earns the reward that its agent sends.

    An agent that plays a game of which the row is the seed sends 1 when it wins:

    >>> task = Told([{"seed": 7}])
    >>> task.prompt(task.rows[0])[0]["content"], task.score({"seed": 7, "agent_reward": 1.0}, "").parts
    ('{"seed": 7}', {'agent': 1.0})
    """

    reward_parts = ("agent",)
    one_by_one = True  # a session's reward stands in its own copy of the row

    def __init__(self, rows: Sequence[dict]) -> None:
        self.rows = rows

    def prompt(self, row: dict) -> Messages:
        """The row as JSON, for logs: the agent makes its own prompts."""
        return [{"role": "user", "content": json.dumps(row, default=str, ensure_ascii=False)[:SHOWN]}]

    def score(self, row: dict, response: str) -> Reward:
        """The reward that the agent sent; a response by itself has none."""
        if TOLD not in row:
            raise Unjudgeable("its agent sends the reward of a session")
        return Reward({"agent": row[TOLD]})


def make_agent_task(
    rows: Sequence[dict],
    *,
    command: Annotated[
        str | None, means("a program and its arguments, started for each session; no shell runs it")
    ] = None,
    agent: Annotated[
        str | None,
        means(
            "instead of command: package.module:function, called with a client's settings and the row, in processes of "
            "its own"
        ),
    ] = None,
    scorer: Annotated[
        str | None,
        means(
            "task that gives the rows and scores an agent's final message, one of env.dataset's; null: rows are those "
            "of env.path, and the agent sends its reward"
        ),
    ] = None,
    scorer_settings: Annotated[
        Mapping[str, Any], means("settings of the scorer that differ from its own")
    ] = MappingProxyType({}),
    pass_environment: Annotated[
        Sequence[str], means("variables of the environment that an agent inherits though they look like secrets")
    ] = (),
    deadline_s: Annotated[float, means("seconds of one session; an agent that takes longer is killed", gt=0)] = 300,
    max_calls: Annotated[int, means("calls of the policy in one session", ge=1)] = 100,
    max_session_tokens: Annotated[int, means("tokens sampled in all calls of one session", ge=1)] = 100_000,
    max_sessions: Annotated[
        int, means("sessions at the same time, each with a process of its own; further ones wait", ge=1)
    ] = 256,
) -> Task:
    """The scorer's task of these rows, or :class:`Told`. The other settings are of the sessions.

    Raises:
        ValueError: the scorer rewards the steps of an episode.
    """
    spec = replace(_spec(scorer), load_rows=lambda *_, **__: rows)
    task = spec.make_task(**scorer_settings)
    if isinstance(task, Episodes):
        raise ValueError(f"env.scorer={scorer} rewards the steps of an episode, not a final message; leave it out")
    return task


def _spec(scorer: str | None) -> TaskSpec:
    return task_spec(scorer) if scorer else TaskSpec(Told, load_rows)


@dataclass(frozen=True)
class AgentSpec(TaskSpec):
    """Another task, whose rows agents play and whose scorer judges their final messages; or :class:`Told`."""

    @override
    def rows(self, path: AnySource, split: str, settings: Mapping[str, Any]) -> Sequence[dict]:
        return _spec(settings["scorer"]).rows(path, split, settings["scorer_settings"])

    @override
    def holds_out(self, path: str | None, settings: Mapping[str, Any]) -> bool:
        return _spec(settings["scorer"]).holds_out(path, settings["scorer_settings"])


AgentEnv = AgentSpec(make_agent_task, load_rows, takes_reward=True)
