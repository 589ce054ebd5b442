"""Sources of responses: an engine with a model's folder, or an endpoint."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from grpo_rl.assembly.environment import make_eval_env
from grpo_rl.assembly.sync import make_agents, make_engine
from grpo_rl.engines.base import Engine, Sampling
from grpo_rl.envs.guards.guard import ScoreGuard
from grpo_rl.envs.rewards.json_client import JsonClient
from grpo_rl.envs.task import Messages, plays_turns
from grpo_rl.policies.generation import load_tokenizer
from grpo_rl.settings.devices import allocate
from grpo_rl.settings.schema import Settings
from grpo_rl.training.evaluate import Evaluation, evaluate, judged


@dataclass(frozen=True)
class Reply:
    """A response: its text, its tokens as the server counts them, and whether it reached the length limit."""

    text: str
    tokens: int
    truncated: bool


class Endpoint:
    """A served model. The key goes into the request's header alone: it is in no message, file or representation.

    Args:
        url: up to and with ``/v1``.
        key: sent as bearer token; None or empty: none is sent.
        served: the served model's name; None: the only one that the server lists.
        concurrency: requests at the same time.
        retries: further tries of a request that failed for now, with growing waits; ``Retry-After`` is honoured.
        deadline_s: seconds of one try.

    Raises:
        ValueError: the server refuses, or lists several models and ``served`` is None.
        EndpointError: it does not respond.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        served: str | None = None,
        concurrency: int = 8,
        retries: int = 5,
        deadline_s: float = 300.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = JsonClient(url, key, retries, deadline_s, sleep)
        self.url, self._concurrency = self._client.url, concurrency
        self.served = served or self._client.only_model("choose one with served=NAME")

    def respond(self, prompts: Sequence[Messages], n: int, sampling: Sampling, seed: int = 0) -> list[list[Reply]]:
        """``n`` responses to each conversation, in order; each is a request of its own, with a seed of its own.

        Raises:
            ValueError: the server refuses a request.
            EndpointError: a request failed in all tries; requests that were not begun are dropped.
        """
        body = {
            "model": self.served,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
        }
        bodies = [
            body | {"messages": messages, "seed": seed + at * n + i}
            for at, messages in enumerate(prompts)
            for i in range(n)
        ]
        with ThreadPoolExecutor(self._concurrency) as pool:
            replies = list(pool.map(self._reply, bodies))  # cancels those that were not begun when one fails
        return [replies[at : at + n] for at in range(0, len(replies), n)]

    def _reply(self, body: dict[str, Any]) -> Reply:
        answer = self._client.ask("/chat/completions", body)
        try:
            choice = answer["choices"][0]
            tokens = (answer.get("usage") or {}).get("completion_tokens") or 0
            text = choice["message"].get("content") or ""  # a model that only reasons up to the limit has none
            counted = isinstance(tokens, int | float) and 0 <= tokens < 1 << 31 and tokens == int(tokens)
            if not isinstance(text, str) or not counted:
                raise TypeError("a text as content, or a whole number of completion_tokens")
            return Reply(text, int(tokens), choice.get("finish_reason") == "length")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.url} is no chat endpoint: its response lacks {error}") from error


class LocalSource:
    """An engine that is started here, for all tasks, whose settings share the engine's."""

    def __init__(self, folder: Path, tasks: dict[str, Settings], rows: int | None, samples: int) -> None:
        self._folder, self._rows, self._samples = folder, rows, samples
        self._engine: Engine | None = None
        tokenizer = load_tokenizer(folder, next(iter(tasks.values())).model)
        # All data is read, and all prompts are measured, before the engine starts.
        self._envs = {name: make_eval_env(settings, tokenizer, rows) for name, settings in tasks.items()}
        self.tasks = {name: env.task for name, env in self._envs.items()}
        self._settings = tasks
        self._agents = {name: make_agents(settings, tokenizer) for name, settings in tasks.items()}

    def start(self) -> None:
        """Starts the engine."""
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
