"""Tool calls in a model's text, and the messages that reply to them. Nothing here is evaluated as code.

A call can be written in two forms, and both are read whichever the prompt shows:

- ``line``: ``Calculator: 3*(4+5)``, a line of its own, with nothing to quote, nest or close. Small models write it
  easily: with two examples before the question, SmolLM2-135M (temperature 0.8, 24 word problems) wrote 23 calls in this
  form, 12 in the JSON below, and 7 as ``<calculator>…</calculator>``.
- ``json``: ``<tool_call>{"name": "calculator", "arguments": {"expression": "3*(4+5)"}}</tool_call>``, which the chat
  templates of Qwen and Hermes teach, https://qwen.readthedocs.io/en/latest/framework/function_call.html.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_rl.envs.grading.tags import last_answer
from grpo_rl.envs.task import Messages

MAX_CALLS = 4
"""Calls of one message that are run; the others get an error."""
MAX_ARGUMENT_CHARS = 500
MAX_JSON_CHARS = 2000
"""The longest text between the tags: JSON may need several signs to write one."""

_SHOWN_CHARS = 40


@dataclass(frozen=True)
class Tool:
    """Something that a model can call with one text, and that returns one.

    Args:
        name: lower-case letters and underscores.
        argument: its argument's name, in the ``json`` form.
        example: an argument that makes sense, for prompts and error messages.
        run: gives the result. What is wrong with an argument stands in it too, from `Error: ` on.
        description: what it does, for chat templates that show it.
    """

    name: str
    argument: str
    example: str
    run: Callable[[str], str]
    description: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the tool, for chat templates."""
        argument = {"type": "string", "description": f"such as {self.example}"}
        parameters = {"type": "object", "properties": {self.argument: argument}, "required": [self.argument]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def written(self, form: str, argument: str | None = None) -> str:
        """A call with ``argument``, by default the example.

        >>> calculator = Tool("calculator", "expression", "3*(4+5)", str)
        >>> print(calculator.written("line"), calculator.written("json", "1+1"), sep="\\n")
        Calculator: 3*(4+5)
        <tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>
        """
        argument = self.example if argument is None else argument
        if form == "line":
            return f"{self.name.capitalize()}: {argument}"
        call = {"name": self.name, "arguments": {self.argument: argument}}
        return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"


@dataclass(frozen=True)
class Call:
    """One call in a text: a tool and its argument, or what is wrong with it, in words for the model."""

    tool: Tool | None = None
    argument: str = ""
    error: str = ""


def find_calls(text: str, tools: Sequence[Tool]) -> list[Call]:
    """The calls in ``text``, in their order, malformed ones as errors; no text makes it raise.

    After :data:`MAX_CALLS` calls one error stands for all others. Takes time linear in the text.

    >>> calculator = Tool("calculator", "expression", "3*(4+5)", str)
    >>> [call.argument for call in find_calls("Half of them first.\\nCalculator: 48/2", [calculator])]
    ['48/2']
    >>> find_calls("<calculator>48/2</calculator>", [calculator])[0].error
    'Error: that is no call. Write one as a line of its own, such as Calculator: 3*(4+5)'
    """
    by_name = {tool.name: tool for tool in tools}
    calls: list[Call] = []
    opened: int | None = None
    for found in _pattern(tuple(by_name)).finditer(text):
        if len(calls) >= MAX_CALLS:
            calls.append(Call(error=f"Error: only the first {MAX_CALLS} calls of a message are answered"))
            return calls
        if found["open"]:
            if opened is not None:
                calls.append(_wrong("<tool_call> is not closed", "json", tools))
            opened = found.end()
        elif found["close"]:
            if opened is None:
                calls.append(_wrong("</tool_call> has no <tool_call> before it", "json", tools))
            else:
                calls.append(_read_json(text[opened : found.start()], by_name))
            opened = None
        elif opened is None:
            calls.append(
                _read(by_name[found["name"].lower()], found["argument"], "line")
                if found["name"]
                else _wrong("that is no call", "line", tools)
            )
    if opened is not None:
        calls.append(_wrong("<tool_call> is not closed", "json", tools))
    return calls


def is_final(text: str, tools: Sequence[Tool]) -> bool:
    """True if the policy's message ends the conversation: it states an answer, or it calls nothing.

    Calls next to an answer are not run: a policy that answers already has not waited for their results.

    >>> is_final("Search: Turandot\\n<answer>Puccini</answer>", [Tool("search", "query", "opera", str)])
    True
    """
    return last_answer(text) is not None or not find_calls(text, tools)


def reply_to_calls(text: str, tools: Sequence[Tool], role: str) -> Messages | None:
    """The tools' replies to the policy's message; None where it ends the conversation.

    Args:
        role: ``tool`` gives one message a call; ``user`` puts all results into one message, for chat templates without
            that role, which also require alternating turns.

    >>> reply_to_calls("Shout: hello", [Tool("shout", "text", "hi", str.upper)], "tool")
    [{'role': 'tool', 'content': 'HELLO'}]
    """
    calls = [] if last_answer(text) is not None else find_calls(text, tools)
    if not calls:
        return None
    results = [call.tool.run(call.argument) if call.tool else call.error for call in calls]
    return [{"role": role, "content": text} for text in (results if role == "tool" else ["\n".join(results)])]


@functools.cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    either = "|".join(re.escape(name) for name in names)
    # Behind the argument stands what other habits make of a call. ASCII: otherwise a long s would count as an s.
    return re.compile(
        r"(?aim)(?P<open><tool_call>)|(?P<close></tool_call>)"
        rf"|^[ \t]*(?:(?P<name>{either}):(?P<argument>.*)|\[(?:{either})\]|(?:{either})\("
        rf"|[-*>#][-*># \t]*(?:{either})[*_`]*:|\{{[ \t]*\"name\")|<(?:{either})>"
    )


def _wrong(reason: str, form: str, tools: Sequence[Tool]) -> Call:
    how = "Write one as" if form == "json" else "Write one as a line of its own, such as"
    return Call(error=f"Error: {reason}. {how} {tools[0].written(form)}")


def _read(tool: Tool, argument: str, form: str) -> Call:
    argument = argument.strip()
    if not argument:
        return _wrong("the call is empty", form, [tool])
    if len(argument) > MAX_ARGUMENT_CHARS:
        too_long = f"the {tool.argument} has {len(argument)} characters, at most {MAX_ARGUMENT_CHARS}"
        return _wrong(too_long, form, [tool])
    return Call(tool, argument)


def _read_json(text: str, by_name: Mapping[str, Tool]) -> Call:
    tools = list(by_name.values())
    if len(text) > MAX_JSON_CHARS:
        return _wrong(f"the call has {len(text)} characters, at most {MAX_JSON_CHARS}", "json", tools)
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return _wrong("the call is not JSON", "json", tools)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _wrong('the call is no object with a "name"', "json", tools)
    if call["name"] not in by_name:
        shown = call["name"][:_SHOWN_CHARS]
        return _wrong(f"there is no tool {shown!r}, only {', '.join(by_name)}", "json", tools)
    tool, arguments = by_name[call["name"]], call.get("arguments")
    if not isinstance(arguments, dict) or not isinstance(arguments.get(tool.argument), str):
        return _wrong(f'"arguments" is no object with the text "{tool.argument}"', "json", [tool])
    return _read(tool, arguments[tool.argument], "json")
