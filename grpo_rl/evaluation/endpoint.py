"""Endpoint: responses from an OpenAI-compatible server, such as vLLM's, by its chat completions."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from grpo_rl.engines.base import Sampling
from grpo_rl.envs.task import Messages

FOR_NOW = (408, 409, 425, 429, 500, 502, 503, 504)
"""Status codes of requests that may succeed later."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
EXCERPT = 300


class EndpointError(RuntimeError):
    """The endpoint gave no response within all tries; names it."""


@dataclass(frozen=True)
class Reply:
    """A response: its text, its tokens as the server counts them, and whether it reached the length limit."""

    text: str
    tokens: int
    truncated: bool


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: followed, it would carry the key to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


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
        self.url, self._key = url.rstrip("/"), key
        self._concurrency, self._retries, self._deadline_s, self._sleep = concurrency, retries, deadline_s, sleep
        self._open = urllib.request.build_opener(_NoRedirects).open
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
            waiting = [pool.submit(self._reply, one) for one in bodies]
            try:
                replies = [future.result() for future in waiting]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [replies[at : at + n] for at in range(0, len(replies), n)]

    def _reply(self, body: dict[str, Any]) -> Reply:
        answer = self._ask("/chat/completions", body)
        try:
            choice = answer["choices"][0]
            tokens = (answer.get("usage") or {}).get("completion_tokens") or 0
            # A model that only reasons up to the limit has no content.
            return Reply(choice["message"].get("content") or "", int(tokens), choice.get("finish_reason") == "length")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.url} is no chat endpoint: its response lacks {error}") from error

    def _only_model(self) -> str:
        try:
            names = [model["id"] for model in self._ask("/models")["data"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.url}/models lists no models; set served=NAME") from error
        if len(names) != 1:
            raise ValueError(f"{self.url} serves {', '.join(names) or 'no model'}; choose one with served=NAME")
        return names[0]

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The server's JSON. A request that fails for now is repeated."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data, why = None if body is None else json.dumps(body).encode(), ""
        for attempt in range(self._retries + 1):
            asked_for_s = None
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                with self._open(request, timeout=self._deadline_s) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                why = f"HTTP {error.code}: {self._excerpt(error)}"
                if error.code not in FOR_NOW:
                    raise ValueError(f"{self.url}{path} refuses: {why}") from None
                asked_for_s = _seconds(error.headers.get("Retry-After"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{self.url}{path} responds with no JSON: {error}") from None
            except (OSError, http.client.HTTPException) as error:  # refused, reset, cut off, or over its deadline
                why = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
            if attempt < self._retries:
                # Jitter: requests that failed together do not come back together.
                wait_s = FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.5)
                self._sleep(min(wait_s if asked_for_s is None else asked_for_s, LONGEST_WAIT_S))
        raise EndpointError(f"{self.url}{path} failed in {self._retries + 1} tries; the last: {why}")

    def _excerpt(self, error: urllib.error.HTTPError) -> str:
        """The beginning of the server's message, without the key: some servers repeat what they were sent."""
        try:
            text = error.read().decode(errors="replace")
        except (OSError, http.client.HTTPException):
            text = ""
        text = text.replace(self._key, "[key]") if self._key else text
        return " ".join(text[:EXCERPT].split())


def _seconds(retry_after: str | None) -> float | None:
    """The seconds that a server asks to wait for; None if it names none, or a date.

    >>> _seconds("3"), _seconds("Wed, 21 Oct 2026 07:28:00 GMT"), _seconds(None)
    (3.0, None, None)
    """
    try:
        return max(float(retry_after), 0.0) if retry_after else None
    except ValueError:
        return None
