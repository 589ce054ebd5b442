"""FunctionTask: a task whose policy calls functions in its model's own format, several at once, and reads the results.

Arguments come from a model and are never evaluated as code. Whatever a function does, the policy gets a text: a result
cut to a size, an error, or that there was none in time.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_rl.envs.guards.guard import finished
from grpo_rl.envs.task import Messages, Task
from grpo_rl.envs.tools.schemas import read_arguments, tool_schemas

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_SHOWN_CHARS = 40
log = logging.getLogger(__name__)
_logged: set[tuple[str, str]] = set()
"""The tools and kinds of errors that were logged: the policy alone would otherwise know of a fault in the tool."""
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
"""Python's types of JSON schema's; others are not checked."""


class Dropped(RuntimeError):
    """A tool's failure that takes its conversation out of the group, where others are sent to the policy."""


@dataclass(frozen=True)
class Limits:
    """Limits of what one message may call.

    Args:
        calls: the number of calls that are run; those beyond it get an error.
        seconds: the deadline of each call; all calls of a message run at the same time.
        result_chars: the number of a result's characters that the policy reads.
    """

    calls: int = 8
    seconds: float = 10.0
    result_chars: int = 4000


class FunctionTask(Task):
    """A task of several turns whose policy calls :attr:`tools`; a message without a call ends the conversation.

    A task of one's own inherits it and gives ``tools``, functions with types and docstrings; it overrides :meth:`call`
    where a call needs to know the row, or where tools are JSON schemas.
    """

    limits: Limits = Limits()
    """Limits of the calls of a message."""

    def without_rows(self) -> Task:
        """A copy that can score: calls are run where the conversation is, so functions need not be sent."""
        task = super().without_rows()
        task.tools = ()
        return task

    def call(self, row: dict, name: str, arguments: dict[str, Any]) -> Any:
        """The result of one call, as text or as what JSON can write; what it raises is sent to the policy."""
        for tool in self.tools:
            if callable(tool) and getattr(tool, "__name__", None) == name:
                return tool(**arguments)
        raise NotImplementedError(f"{type(self).__name__}.call runs no {name}")

    def reply(self, row: dict, messages: Messages) -> Messages | None:
        """The results of the calls in the policy's last message; None where it calls nothing."""
        calls = messages[-1].get("tool_calls")
        if not calls:
            return None
        return run_calls(calls, tool_schemas(self.tools), lambda *call: self.call(row, *call), self.limits)


def run_calls(
    calls: Sequence[Mapping[str, Any]],
    schemas: Sequence[Mapping[str, Any]],
    run: Callable[[str, dict[str, Any]], Any],
    limits: Limits = Limits(),
    seconds: Callable[[str], float] | None = None,
) -> Messages:
    """A tool message for each call, in the order of the calls, which run at the same time, each in a thread.

    Args:
        calls: as OpenAI's ``tool_calls``.
        run: gives the result of a call by its name and arguments; a thread that is late is left behind.
        seconds: by a tool's name, for its calls; None gives each call those of ``limits``.

    Raises:
        Dropped: a tool did.

    >>> shout = {"function": {"name": "shout", "parameters": {"properties": {"text": {"type": "string"}}}}}
    >>> call = {"id": "call00000", "function": {"name": "shout", "arguments": '{"text": "hello"}'}}
    >>> run_calls([call], [shout], lambda name, arguments: arguments["text"].upper())
    [{'role': 'tool', 'tool_call_id': 'call00000', 'name': 'shout', 'content': 'HELLO'}]
    """
    known = {schema["function"]["name"]: schema["function"] for schema in schemas}
    results: dict[int, str] = {}
    begun: dict[int, Callable[[], Any]] = {}
    allowed_s: dict[int, float] = {}
    for i, call in enumerate(calls):
        arguments = read_arguments(call["function"]["arguments"])
        if i >= limits.calls:
            results[i] = f"Error: only the first {limits.calls} calls of a message are answered"
        elif fault := fault_of(call["function"]["name"], arguments, known):
            results[i] = f"Error: {fault}"
        else:
            allowed_s[i] = seconds(call["function"]["name"]) if seconds else limits.seconds
            begun[i] = partial(_result, run, call, arguments)
    for i, result in finished(begun, allowed_s):
        if isinstance(result, Dropped):
            raise result
        late = f"no result within {allowed_s[i]:g} s" if isinstance(result, TimeoutError) else type(result).__name__
        results[i] = f"Error: {late}" if isinstance(result, BaseException) else result
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"] if call["function"]["name"] in known else "unknown",
            "content": _readable(results[i], limits.result_chars),
        }
        for i, call in enumerate(calls)
    ]


def _result(
    run: Callable[[str, dict[str, Any]], Any], call: Mapping[str, Any], arguments: dict[str, Any]
) -> str | Dropped:
    try:
        result = run(call["function"]["name"], arguments)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    except Dropped as error:
        return error
    # A tool is anybody's code, and gets arguments that a model made up: the model reads what went wrong.
    except BaseException as error:
        kind = (call["function"]["name"], type(error).__name__)
        if kind not in _logged:
            _logged.add(kind)
            log.warning("the tool %s raised %s: %s (the policy reads it; further ones are not logged)", *kind, error)
        return f"Error: {type(error).__name__}: {error}"


def fault_of(name: Any, arguments: dict[str, Any] | None, known: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The fault of a call, in words for the model; None where it can be run."""
    if name not in known:
        return f"there is no tool {str(name)[:_SHOWN_CHARS]!r}, only {', '.join(known)}"
    if arguments is None:
        return "the arguments are no JSON object"
    parameters = known[name].get("parameters") or {}
    properties = parameters.get("properties") or {}
    if missing := [key for key in parameters.get("required") or () if key not in arguments]:
        return f"{name} lacks {', '.join(missing)}"
    for key, value in arguments.items():
        if key not in properties:
            # A schema without properties, such as {"type": "object"}, takes any.
            if parameters.get("additionalProperties", "properties" not in parameters) is not False:
                continue
            return f"{name} takes no {key[:_SHOWN_CHARS]!r}, only {', '.join(properties) or 'nothing'}"
        wanted = properties[key].get("type") if isinstance(properties[key], Mapping) else None
        if isinstance(wanted, str) and wanted in _TYPES and not _is(value, wanted):
            if value is None and properties[key].get("nullable"):
                continue
            return f"{key} of {name} is {json.dumps(value)[:_SHOWN_CHARS]}; it must be of type {wanted}"
    return None


def _is(value: Any, wanted: str) -> bool:
    if wanted == "integer" and isinstance(value, float):
        return value.is_integer()  # JSON schema counts 3.0 among the integers
    return isinstance(value, _TYPES[wanted]) and (wanted == "boolean" or not isinstance(value, bool))


def _readable(text: str, most: int) -> str:
    """The text without control characters, cut where it is too long, with how much of it is shown."""
    cut = text if len(text) <= most else f"{text[:most]}\n[the first {most} of {len(text)} characters]"
    return _CONTROL.sub("", cut)
