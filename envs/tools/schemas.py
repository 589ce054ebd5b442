"""Tools as chat templates show them: JSON schemas of functions, and their calls in text for templates without tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_rl.envs.task import Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOLS_IN_TEXT = (
    "You may call the functions within <tools></tools>:\n<tools>\n{tools}\n</tools>\nA call:\n"
    '<tool_call>\n{{"name": <name>, "arguments": <object>}}\n</tool_call>'
)
"""The system message for chat templates that show no tools, in the format of Hermes and Qwen."""


def tool_schemas(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The JSON schema of each tool, as OpenAI writes it; a function's is made of its types and its docstring.

    Raises:
        ValueError: a function lacks a type or a description, a schema has no name, or its parameters are not
            those of an object, or two tools have the same name.

    >>> tool_schemas([{"name": "add", "parameters": {"required": ["a", "b"]}}])
    [{'type': 'function', 'function': {'name': 'add', 'parameters': {'required': ['a', 'b']}}}]
    """
    schemas: list[dict[str, Any]] = []
    for tool in tools:
        schema = dict(tool) if isinstance(tool, Mapping) else _of_function(tool)
        if "function" not in schema:
            schema = {"type": "function", "function": schema}
        function = schema["function"]
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"the tool {tool!r:.80} has no name; a schema is {{name, description, parameters}}")
        parameters = function.get("parameters") or {}
        required = parameters.get("required") or [] if isinstance(parameters, Mapping) else None
        if (
            not isinstance(required, list | tuple)
            or not all(isinstance(key, str) for key in required)
            or not isinstance(parameters.get("properties") or {}, Mapping)
        ):
            raise ValueError(f"the parameters of the tool {function['name']!r:.80} are no JSON schema of an object")
        schemas.append(schema)
    names = [schema["function"]["name"] for schema in schemas]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two tools have the name {', '.join(twice)}; the policy could not tell them apart")
    return schemas


def _of_function(tool: Any) -> dict[str, Any]:
    if not callable(tool):
        raise ValueError(f"the tool {tool!r:.80} is neither a function nor a JSON schema")
    from transformers.utils.chat_template_utils import get_json_schema  # takes a second, which a help text need not

    try:
        return get_json_schema(tool)
    except Exception as error:  # a foreign function's signature; transformers has several kinds of errors for it
        name = getattr(tool, "__name__", type(tool).__name__)
        remedy = "give each parameter a type, and a docstring that describes it under `Args:`"
        raise ValueError(f"the tool {name} makes no schema: {error}; {remedy}") from error


def shows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the chat template shows tools."""
    return "tools" in str(tokenizer.chat_template)


def with_tools_in_text(messages: Messages, schemas: Sequence[Mapping[str, Any]]) -> Messages:
    """The conversation for a template without tools: they stand in the system message, and calls in the text."""
    messages = [_with_calls_in_text(message) for message in messages]
    if not schemas:
        return messages
    shown = TOOLS_IN_TEXT.format(tools="\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))
    first, *others = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{shown}"}, *others]
    return [{"role": "system", "content": shown}, *messages]


def _with_calls_in_text(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = []
    for function in (call["function"] for call in message["tool_calls"]):
        given = function["arguments"]
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        calls.append(f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {text}}}\n</tool_call>')
    return {**others, "content": "\n".join([*([message["content"]] if message["content"] else []), *calls])}


def with_arguments(messages: Messages) -> Messages:
    """The conversation with the arguments of calls as objects, which chat templates ask for not for OpenAI's text."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": read_arguments(call["function"]["arguments"]) or {}}}


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def checked_calls(calls: Sequence[Any]) -> list[dict[str, Any]]:
    """The calls that a parser found; a ValueError where one has not OpenAI's form."""
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not named or not isinstance(function.get("arguments"), (str, Mapping)):  # pyrefly: ignore[missing-attribute]
            raise ValueError(f"{call!r:.80} is no call; it must have a function with a name and arguments")
    return [dict(call) for call in calls]


def read_arguments(text: Any) -> dict[str, Any] | None:
    """The arguments of a call, which a model wrote; None where they are no JSON object.

    >>> read_arguments('{"x": 1}'), read_arguments("[1]"), read_arguments("{")
    ({'x': 1}, None, None)
    """
    try:
        arguments = json.loads(text, parse_constant=_no_json) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None
