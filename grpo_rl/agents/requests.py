"""Requests of OpenAI's clients, checked field by field: read, ignored with a note, or refused with a reason.

Their messages are compared with earlier ones, and rendered for chat templates.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from grpo_rl.by_name import one_line
from grpo_rl.engines.base import Sampling
from grpo_rl.envs.chat import decode_responses

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
Message = dict[str, Any]
"""A message of OpenAI's chat format."""
SILENT = ("refusal", "annotations", "audio", "function_call")
"""Keys that clients echo back and no chat template reads."""


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


class ToolParser(Protocol):
    """Finds a model's calls of tools in its text, in the model's own format."""

    def parse(self, text: str) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """The text without the calls, and the calls as OpenAI's ``tool_calls``; without calls, the text as it is.

        Args:
            text: with special tokens, some formats being made of them, and without the one that ended it.
        """


MakeParser = Callable[[PreTrainedTokenizerBase, Sequence[Any]], ToolParser]
"""Makes the parser of the calls of these tools."""


def text_of(content: Any) -> str:
    """The text of a message's content, which is a text, a list of text parts, or null.

    Raises:
        ValueError: it is something else, such as a picture.

    >>> text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), text_of(None)
    ('ab', '')
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ValueError(f"content is {content!r:.80}; it must be a text, text parts or null")


def for_template(message: Any) -> Message:
    """The message in one form: content as one text, arguments of tool calls as compact JSON.

    Raises:
        ValueError: it is not a message.

    >>> for_template({"role": "developer", "content": [{"type": "text", "text": "Be brief."}], "refusal": None})
    {'role': 'system', 'content': 'Be brief.'}
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message is {message!r:.80}; it must be an object with a role and a content")
    given = {key: value for key, value in message.items() if value not in (None, "", []) and key not in SILENT}
    plain = {"role": "system" if message["role"] == "developer" else message["role"]}
    plain |= {"content": text_of(given.pop("content", None))} | {k: v for k, v in given.items() if k != "role"}
    if "tool_calls" in given:
        if not isinstance(given["tool_calls"], list):
            raise ValueError(f"tool_calls is {given['tool_calls']!r:.80}; it must be a list")
        plain["tool_calls"] = [_call(call) for call in given["tool_calls"]]
    return plain


def _call(call: Any) -> Message:
    try:
        function = call["function"]
        arguments = function["arguments"]
        name, own_id = function["name"], call.get("id")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a tool call is {call!r:.80}; it must have a function with a name and arguments") from error
    with contextlib.suppress(ValueError, RecursionError):  # a model's own mistake stays as it is
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
        arguments = json.dumps(read, ensure_ascii=False)
    return {"id": own_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def digests(messages: Sequence[Message], tools: Sequence[Any]) -> list[bytes]:
    """Digests of the tools and the first n messages, which are as :func:`for_template` makes them, for each n from 0.

    Ids of calls count as the numbers of the calls, as some clients number them anew and the policy never wrote them; of
    the policy's own messages, only text and calls count, since clients add keys of theirs.
    """
    digest = hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode())
    found, numbers = [digest.digest()], {}
    for message in messages:
        counted = dict(message)
        if message["role"] == "assistant":
            counted = {key: message[key] for key in ("role", "content", "name") if key in message}
        if "tool_calls" in message:
            counted["tool_calls"] = [call["function"] for call in message["tool_calls"]]
            numbers |= {str(call["id"]): len(numbers) + at for at, call in enumerate(message["tool_calls"])}
        if "tool_call_id" in message:
            counted["tool_call_id"] = numbers.get(str(message["tool_call_id"]), message["tool_call_id"])
        digest.update(json.dumps(counted, sort_keys=True).encode() + b"\n")
        found.append(digest.digest())
    return found


def response_message(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop: Sequence[str], parser: ToolParser | None, number: int
) -> tuple[Message, str | None]:
    """The message of the policy that these ids are, its text up to a stop string and its calls of tools; and a problem.

    Args:
        parser: finds the calls; None: the text is all there is. Where it fails the text is all there is, too, and the
            problem says why.
        number: of the response in its session; ids of calls are made of it.
    """
    text = decode_responses(tokenizer, [list(ids)])[0]
    text = text[: min((at for string in stop if (at := text.find(string)) >= 0), default=None)]
    message: Message = {"role": "assistant", "content": text}
    if parser is None:
        return message, None
    try:
        content, calls = parser.parse(text)
        if not calls:
            return message, None
        # Nine letters and digits, as Mistral's templates ask for.
        own = [{**call, "id": f"c{number % 10**5:05}{at % 10**3:03}"} for at, call in enumerate(calls)]
        called = {"role": "assistant", "content": content or None, "tool_calls": own}
        for_template(called)
        json.dumps(called)
    except Exception as error:  # untrusted text in the user's code: what it can't read is text
        return message, f"the parser of env.tool_parser failed: {one_line(error)}"
    return called, None
