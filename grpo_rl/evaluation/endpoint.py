"""Endpoint: responses from an OpenAI-compatible server, such as vLLM's, by its chat completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from grpo_rl.engines.base import Sampling
from grpo_rl.envs.rewards.json_client import JsonClient
from grpo_rl.envs.task import Messages


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
        self.served = served or self._only_model()

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
            if not isinstance(text, str) or not isinstance(tokens, int | float) or not float(tokens).is_integer():
                raise TypeError("a text as content, or a whole number of completion_tokens")
            return Reply(text, int(tokens), choice.get("finish_reason") == "length")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.url} is no chat endpoint: its response lacks {error}") from error

    def _only_model(self) -> str:
        try:
            names = [model["id"] for model in self._client.ask("/models")["data"]]
            listed = ", ".join(names)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.url}/models lists no models; set served=NAME") from error
        if len(names) != 1:
            raise ValueError(f"{self.url} serves {listed or 'no model'}; choose one with served=NAME")
        return names[0]
