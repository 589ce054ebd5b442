"""Tool calls out of a model's text, and the messages that answer them. Nothing here is evaluated as code.

A call can be written in two forms, and both are read whichever the prompt shows:

- ``tag``: ``<calculator>3*(4+5)</calculator>``. The tag names the tool and encloses its one argument. For small models:
  nothing to quote, escape or nest, and the same shape as ``<answer>27</answer>``. Search-R1 trains on this form,
  https://arxiv.org/abs/2503.09516.
- ``json``: ``<tool_call>{"name": "calculator", "arguments": {"expression": "3*(4+5)"}}</tool_call>``, which the chat
  templates of Qwen and Hermes teach, https://qwen.readthedocs.io/en/latest/framework/function_call.html.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpo_rl.envs.task import Messages

FORMS = ("tag", "json")
ROLES = ("tool", "user")

MAX_CALLS = 4
"""Calls that one message of the policy gets answers to."""
MAX_ARGUMENT_CHARS = 500
MAX_CALL_CHARS = 2000
"""Of what is between a call's tags: JSON may need several signs to write one."""

_JSON_TAG = "tool_call"
_SHOWN_CHARS = 40


@dataclass(frozen=True)
class Tool:
    """Something that a model can call with one text, and that answers with one.

    Args:
        name: of lower-case letters and underscores.
        argument: its argument's name, in the ``json`` form.
        example: an argument that makes sense, for prompts and error messages.
        run: gives the answer. What is wrong with an argument it says in its answer, from `Error: ` on.
    """

    name: str
    argument: str
    example: str
    run: Callable[[str], str]

    def written(self, form: str = "tag") -> str:
        """The example as a call.

        >>> Tool("calculator", "expression", "3*(4+5)", str).written("json")
        '<tool_call>{"name": "calculator", "arguments": {"expression": "3*(4+5)"}}</tool_call>'
        """
        if form == "tag":
            return f"<{self.name}>{self.example}</{self.name}>"
        call = {"name": self.name, "arguments": {self.argument: self.example}}
        return f"<{_JSON_TAG}>{json.dumps(call)}</{_JSON_TAG}>"


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
    >>> [call.argument for call in find_calls("First <calculator>48/2</calculator>, then I add.", [calculator])]
    ['48/2']
    >>> find_calls("<calculator>48/2", [calculator])[0].error
    'Error: <calculator> is not closed. Write a call as <calculator>3*(4+5)</calculator>'
    """
    by_name = {tool.name: tool for tool in tools}
    calls: list[Call] = []
    opened: re.Match[str] | None = None

    def fail(reason: str, name: str) -> None:
        calls.append(Call(error=_error(reason, by_name, name)))

    for tag in _tags(tuple(by_name)).finditer(text):
        if len(calls) >= MAX_CALLS:
            calls.append(Call(error=f"Error: only the first {MAX_CALLS} calls of a message are answered"))
            return calls
        name = tag["name"].lower()
        if not tag["end"]:
            if opened:
                fail(f"<{opened['name'].lower()}> is not closed", opened["name"].lower())
            opened = None if tag["rest"].endswith("/") else tag
            if opened is None:
                fail(f"<{name}/> has nothing inside", name)
        elif opened is None:
            fail(f"</{name}> has no <{name}> before it", name)
        else:
            start, first = opened["name"].lower(), opened
            opened = None
            if start != name:
                fail(f"<{start}> is closed by </{name}>", start)
            elif first["rest"].strip():
                fail(f"<{name}> has something more inside its brackets", name)
            else:
                calls.append(_read(name, text[first.end() : tag.start()].strip(), by_name))
    if opened:
        fail(f"<{opened['name'].lower()}> is not closed", opened["name"].lower())
    return calls


def last_answer(text: str) -> str | None:
    """What is inside the last ``<answer>…</answer>``; None where there is none.

    >>> last_answer("<answer>1</answer> or rather <answer> 2 </answer>")
    '2'
    """
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def is_final(text: str, tools: Sequence[Tool]) -> bool:
    """Whether the policy's message ends the conversation: it answers, or it calls nothing.

    Calls beside an answer are not run: whoever answers already has not waited for their results.

    >>> is_final("<search>Turandot</search> <answer>Puccini</answer>", [Tool("search", "query", "opera", str)])
    True
    """
    return last_answer(text) is not None or not find_calls(text, tools)


def answer_calls(text: str, tools: Sequence[Tool], role: str) -> Messages | None:
    """What the tools say to the policy's message; None where it ends the conversation.

    Args:
        role: ``tool`` gives one message a call; ``user`` puts all results into one message, each inside ``<result>``
            and ``</result>``, for chat templates without that role, which also want turns to alternate.

    >>> answer_calls("<shout>hello</shout>", [Tool("shout", "text", "hi", str.upper)], "tool")
    [{'role': 'tool', 'content': 'HELLO'}]
    """
    calls = [] if last_answer(text) is not None else find_calls(text, tools)
    if not calls:
        return None
    results = [call.tool.run(call.argument) if call.tool else call.error for call in calls]
    if role == "tool":
        return [{"role": "tool", "content": result} for result in results]
    return [{"role": "user", "content": "\n".join(f"<result>\n{result}\n</result>" for result in results)}]


def check_settings(form: str, tool_role: str, weights: Mapping[str, float]) -> None:
    """Raises ValueError unless a tool task's settings make sense."""
    if form not in FORMS:
        raise ValueError(f"env.form={form}; a call is written as {' or '.join(FORMS)}")
    if tool_role not in ROLES:
        raise ValueError(f"env.tool_role={tool_role}; results come in the role {' or '.join(ROLES)}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ValueError(f"env.reward.{name}={weight}; a weight is a finite number")


@functools.cache
def _tags(names: tuple[str, ...]) -> re.Pattern[str]:
    # ASCII only: otherwise the long s of "<ſearch>" would count as an s.
    either = "|".join(re.escape(name) for name in (*names, _JSON_TAG))
    return re.compile(rf"(?ai)<(?P<end>/?)(?P<name>{either})(?P<rest>(?:\s[^<>]*)?/?)>")


def _error(reason: str, by_name: Mapping[str, Tool], name: str = _JSON_TAG) -> str:
    form = "json" if name == _JSON_TAG else "tag"
    return f"Error: {reason}. Write a call as {by_name.get(name, next(iter(by_name.values()))).written(form)}"


def _read(name: str, inside: str, by_name: Mapping[str, Tool]) -> Call:
    """The call that is written inside one pair of tags."""
    if len(inside) > MAX_CALL_CHARS:
        return Call(error=_error(f"the call has {len(inside)} characters, at most {MAX_CALL_CHARS}", by_name, name))
    call = _read_json(inside, by_name) if name == _JSON_TAG else Call(by_name[name], inside)
    if call.tool and not call.argument:
        return Call(error=_error("the call is empty", by_name, name))
    if len(call.argument) > MAX_ARGUMENT_CHARS:
        reason = f"the {by_name[name].argument if name in by_name else 'argument'} has {len(call.argument)} characters"
        return Call(error=_error(f"{reason}, at most {MAX_ARGUMENT_CHARS}", by_name, name))
    return call


def _read_json(inside: str, by_name: Mapping[str, Tool]) -> Call:
    try:
        call = json.loads(inside)
    except (ValueError, RecursionError):
        return Call(error=_error("the call is not JSON", by_name))
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call(error=_error('the call is no object with a "name"', by_name))
    if call["name"] not in by_name:
        shown = call["name"][:_SHOWN_CHARS]
        return Call(error=_error(f"there is no tool {shown!r}; there is {', '.join(by_name)}", by_name))
    tool, arguments = by_name[call["name"]], call.get("arguments")
    if not isinstance(arguments, dict) or not isinstance(arguments.get(tool.argument), str):
        return Call(error=_error(f'"arguments" is no object with the text "{tool.argument}"', by_name))
    return Call(tool, arguments[tool.argument].strip())
