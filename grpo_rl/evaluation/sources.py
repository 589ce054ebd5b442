"""Sources of responses: an engine with a model's folder, or an endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from grpo_rl.assembly.environment import make_eval_env
from grpo_rl.assembly.sync import make_agents, make_engine
from grpo_rl.engines.base import Engine, Sampling
from grpo_rl.envs.guards.guard import ScoreGuard
from grpo_rl.envs.task import plays_turns
from grpo_rl.evaluation.endpoint import Endpoint
from grpo_rl.policies.hub import load_tokenizer
from grpo_rl.settings.devices import allocate
from grpo_rl.settings.schema import Settings
from grpo_rl.training.evaluate import Evaluation, evaluate, judged


class LocalSource:
    """An engine that is started here, for all tasks, whose settings share the engine's."""

    def __init__(self, folder: Path, tasks: dict[str, Settings], rows: int | None, samples: int) -> None:
        self._folder, self._rows, self._samples = folder, rows, samples
        self._engine: Engine | None = None
        tokenizer = load_tokenizer(folder, next(iter(tasks.values())).model.chat_template)
        # All data is read, and all prompts are measured, before the engine starts.
        self._envs = {name: make_eval_env(settings, tokenizer, rows) for name, settings in tasks.items()}
        self.tasks = {name: env.task for name, env in self._envs.items()}
        self._settings = tasks
        self._agents = {name: make_agents(settings, tokenizer) for name, settings in tasks.items()}

    def start(self) -> None:
        """Starts the engine.

        Raises:
            ValueError: the settings do not fit this machine or the model.
        """
        most = max(len(task.rows[: self._rows]) for task in self.tasks.values()) * max(self._samples, 1)
        settings = next(iter(self._settings.values())).with_values({"evaluate.rows": most})
        heads = AutoConfig.from_pretrained(self._folder).get_text_config().num_attention_heads
        self._engine = make_engine(settings, self._folder, allocate(settings, num_attention_heads=heads))

    def evaluate(
        self, name: str, rows: list[dict[str, Any]], sampling: Sampling, samples: int, seed: int
    ) -> Evaluation:
        """The judged responses to a task's rows."""
        assert self._engine is not None, "start() comes first"
        agents = self._agents[name]
        sessions = agents.held_out if agents else None
        return evaluate(self._envs[name], self._engine, rows, sampling, samples, seed, sessions)

    def close(self) -> None:
        """Frees the engine, the environments and the processes of agents."""
        for agents in self._agents.values():
            if agents:
                agents.close()
        if self._engine:
            self._engine.close()
        for env in self._envs.values():
            env.close()


class ServedSource:
    """An endpoint, for tasks of one turn.

    Raises:
        ValueError: a task has several turns, adds rewards that count tokens, or its data can't be found.
    """

    def __init__(self, endpoint: Endpoint, tasks: dict[str, Settings], rows: int | None) -> None:
        self._endpoint = endpoint
        self.tasks = {name: make_eval_env(settings, None, rows) for name, settings in tasks.items()}
        for name, task in self.tasks.items():
            if name == "agent":
                raise ValueError("an agent of tasks=[agent] calls an engine that is started here; give a model")
            if plays_turns(task):
                raise ValueError(f"{name} is a task of several turns, which an endpoint is not asked for; give a model")
        self._guards = {
            name: ScoreGuard(self.tasks[name], settings.env.score_timeout_s, settings.env.max_failed_fraction)
            for name, settings in tasks.items()
        }

    def evaluate(
        self, name: str, rows: list[dict[str, Any]], sampling: Sampling, samples: int, seed: int
    ) -> Evaluation:
        """The judged responses to a task's rows."""
        task, guard = self.tasks[name], self._guards[name]
        prompts = [task.prompt(row) for row in rows]
        replies = self._endpoint.respond(prompts, samples, sampling, seed)
        results = []
        for i, (row, group) in enumerate(zip(rows, replies, strict=True)):
            results += guard.score(row, [reply.text for reply in group], f"held-out row {i}")
        flat = [reply for group in replies for reply in group]
        return judged(
            task,
            results,
            ["\n".join(message["content"] for message in prompt) for prompt in prompts for _ in range(samples)],
            [[{"role": "assistant", "content": reply.text}] for reply in flat],
            [reply.text for reply in flat],
            [reply.tokens for reply in flat],
            [reply.truncated for reply in flat],
            samples,
        )
