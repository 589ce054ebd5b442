"""A task of ours, or of the user's, as a taskset and an environment of verifiers."""

from __future__ import annotations

import asyncio
from typing import Any

from grpo_rl.envs.spec import task_spec
from grpo_rl.envs.task import Messages, Task


def taskset_of(name: str) -> tuple[type, type]:
    """A taskset of verifiers with the task's rows, and the environment that plays and scores them.

    A module that exports both is a taskset by the module's name, for verifiers' command line and what trains on it::

        Sums, SumsEnv = taskset_of("calculator")
        __all__ = ["Sums", "SumsEnv"]

    Its settings are ``path``, ``split``, and ``settings``, those of the task. A tool's message, which there would
    answer a call of its own, goes to the agent as a user's. Each part of the reward is a reward of that name.

    Args:
        name: of the task, as ``env.dataset`` takes it.

    Raises:
        ValueError: verifiers is not installed, or there is no such task.
    """
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ValueError("a taskset needs verifiers: pip install grpo-rl[verifiers]") from error
    spec = task_spec(name)

    class Row(vf.TaskData):
        row: dict[str, Any]

    class Config(vf.TasksetConfig):
        path: str | None = None
        split: str = "train"
        settings: dict[str, Any] = {}

    class RowTask(vf.Task[Row]):
        """A row to be played; its environment scores it."""

    def made(config: Any) -> Task:
        return spec.make_task(config.path, config.split, **config.settings)

    class Rows(vf.Taskset[RowTask, Config]):
        def load(self) -> Any:
            task = made(self.config)
            for row in task.rows:
                yield RowTask(Row(prompt=_without_tools(task.prompt(row)), row=row), self.config.task)

    class PlayedConfig(vf.EnvConfig):
        """The one agent, in a chat without tools of its own."""

        agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})

    class Played(vf.Env[PlayedConfig]):
        """Conversations about a row, with the task's replies and rewards."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._task = made(config.taskset)

        async def run(self, task: Any, agents: Any) -> None:
            row = task.data.row
            messages = list(self._task.prompt(row))
            async with agents.agent.interaction(task) as interaction:
                segment = await interaction.turn()
                while not segment.terminated:
                    messages.append({"role": "assistant", "content": segment.last_reply})
                    reply = await asyncio.to_thread(self._task.reply, row, list(messages))
                    if reply is None:
                        break
                    messages += reply
                    segment = await interaction.turn(_without_tools(reply))
            reward = await asyncio.to_thread(self._task.score_dialog, row, messages)
            for part, value in reward.parts.items():
                interaction.trace.record_reward(part, value)
            interaction.trace.record_metrics(reward.measures)

    return Rows, Played


def _without_tools(messages: Messages) -> Messages:
    return [message if message["role"] != "tool" else {**message, "role": "user"} for message in messages]
