"""Requests of OpenAI's clients, checked field by field: read, ignored with a note, or refused with a reason."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_rl.engines.base import Sampling

MOST_CHOICES, MOST_TOP_K, LONGEST_STOP = 128, 2**31 - 1, 1000
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "tool_choice": ("auto", "none"),
}
"""Fields that are accepted with null or with these values alone, which change nothing."""
LEFT_ASIDE = (
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
)  # fmt: skip
"""Fields that change nothing here."""
OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Fields that change the distribution that is sampled from."""
READ = (
    "messages", "model", "tools", "n", "seed", "stop", "max_tokens", "max_completion_tokens", "stream",
    "stream_options", "logprobs", *OF_SAMPLING,
)  # fmt: skip


class RequestError(ValueError):
    """A request that is refused.

    Args:
        message: for people.
        param: the field that is at fault.
        code: in a word, for programs.
        status: of HTTP.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status


@dataclass(frozen=True)
class ChatRequest:
    """One call of the chat endpoint; ``notes`` are fields that were ignored or replaced, in words."""

    messages: list[Any]
    tools: list[Any]
    n: int
    sampling: Sampling
    stream: bool
    include_usage: bool
    logprobs: bool
    notes: list[str] = field(default_factory=list)


def read_json(body: bytes) -> Any:
    """The JSON of a body.

    Raises:
        RequestError: it is not UTF-8 or not JSON, or has lone surrogates, which no tokenizer takes.
    """
    try:
        # As UTF-8 alone: of bytes `json` also takes lone surrogates, and UTF-16.
        found = json.loads(text := body.decode("utf-8-sig"))
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error


def read_request(body: Any, base: Sampling, model: str, is_trained: bool) -> ChatRequest:
    """The call that a request's body describes.

    Args:
        base: what holds for all that the request leaves open; its ``max_new_tokens`` is the most there can be.
        model: the served model's name.
        is_trained: the run's own temperature, top-p, top-k and min-p hold, as log-probabilities are trained on at one
            distribution.

    Raises:
        RequestError: a field is wrong, unknown or unsupported.

    >>> asked = {"messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 4, "temperature": 0.2, "user": "me"}
    >>> request = read_request(asked, Sampling(), "m", is_trained=True)
    >>> request.sampling.max_new_tokens, request.notes
    (4, ['user is ignored', "temperature=0.2 is replaced by the run's 1.0: all responses are sampled at one"])
    """
    if not isinstance(body, Mapping):
        raise RequestError("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                taken = " or ".join(repr(choice) for choice in NEUTRAL[name])
                raise RequestError(f"{name}={value!r:.80} is not supported here; only {taken} is", name, "unsupported")
        elif name not in READ and name not in LEFT_ASIDE:
            raise RequestError(f"Unrecognized request argument supplied: {name:.80}", name, "unknown_parameter")
    messages, tools = _list(given, "messages"), _list(given, "tools") if "tools" in given else []
    if not messages:
        raise RequestError("messages is missing or empty", "messages")
    _check_tools(tools)
    if given.get("tool_choice") == "none":
        tools = []
    notes = [f"{name} is ignored" for name in LEFT_ASIDE if name in given]
    if given.get("model", model) != model:
        notes.append(f"model={given['model']!r:.80} is answered by {model}")
    return ChatRequest(
        messages,
        tools,
        _whole(given, "n", 1, 1, MOST_CHOICES),
        _sampling(given, base, is_trained, notes),
        _flag(given, "stream"),
        _flag(given.get("stream_options", {}), "include_usage"),
        _flag(given, "logprobs"),
        notes,
    )


def _sampling(given: Mapping[str, Any], base: Sampling, is_trained: bool, notes: list[str]) -> Sampling:
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    is_list = isinstance(stop, list) and len(stop) <= 16
    if not is_list or not all(isinstance(one, str) and 0 < len(one) <= LONGEST_STOP for one in stop):
        raise RequestError(f"stop must be a text of 1 to {LONGEST_STOP} characters, or a list of at most 16", "stop")
    wanted = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    asked = _whole(given, wanted, base.max_new_tokens, 1, math.inf)
    if asked > base.max_new_tokens:
        notes.append(f"{wanted}={asked} is shortened to {base.max_new_tokens}")
    changes: dict[str, Any] = {"max_new_tokens": min(asked, base.max_new_tokens), "stop": (*base.stop, *stop)}
    changes["min_new_tokens"] = 0 if changes["stop"] else min(base.min_new_tokens, changes["max_new_tokens"])
    if "seed" in given:
        changes["seed"] = _whole(given, "seed", 0, -math.inf, math.inf)
    for name in OF_SAMPLING:
        if name not in given:
            continue
        value, own = given[name], getattr(base, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RequestError(f"{name} is {value!r:.80}; it must be a number", name)
        if name == "top_k":
            value = max(_whole(given, name, 0, -1, MOST_TOP_K), 0)  # vLLM's clients write -1 for all
        if not is_trained:
            changes[name] = value
        elif value != own:
            notes.append(f"{name}={value} is replaced by the run's {own}: all responses are sampled at one")
    try:
        return replace(base, **changes)
    except ValueError as error:
        raise RequestError(str(error).removeprefix("sampling.")) from error


def _check_tools(tools: Sequence[Any]) -> None:
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            text = f"a tool is {tool!r:.80}; it must be of type function, and its function have a name"
            raise RequestError(text, "tools")


def finite(value: object) -> float | None:
    """The number as a float; None where it is none, not finite, or larger than floats are.

    >>> finite(1), finite(True), finite(10**400)
    (1.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _list(given: Mapping[str, Any], name: str) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list):
        raise RequestError(f"{name} is {value!r:.80}; it must be a list", name)
    return value


def _whole(given: Mapping[str, Any], name: str, default: int, least: float, most: float) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        limits = "" if most == math.inf else f" to {most}"
        limits = "" if least == -math.inf else f" from {least}{limits}{' on' if not limits else ''}"
        raise RequestError(f"{name} is {value!r:.80}; it must be a whole number{limits}", name)
    return value


def _flag(given: Any, name: str) -> bool:
    if not isinstance(given, Mapping):
        raise RequestError(f"{name} is part of {given!r:.80}; it must stand in an object", name)
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r:.80}; it must be true or false", name)
    return value
