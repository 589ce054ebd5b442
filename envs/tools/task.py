"""ToolTask: a task whose policy calls a tool in its text, reads the result, goes on, and states the answer."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from grpo_rl.envs.declared import means
from grpo_rl.envs.grading.tags import last_answer
from grpo_rl.envs.tables import checked_row
from grpo_rl.envs.task import Messages, Reward, Task, opening
from grpo_rl.envs.tools.calls import MAX_ARGUMENT_CHARS, MAX_CALLS, Call, Tool, find_calls, is_final, reply_to_calls
from grpo_rl.envs.tools.functions import Limits, fault_of, run_calls
from grpo_rl.envs.tools.schemas import read_arguments

LIMITS = Limits(calls=MAX_CALLS)
EXAMPLE = {"question": str, "call": str, "result": str, "answer": str}
Form = Literal["line", "json", "function"]
ToolRole = Annotated[
    Literal["tool", "user"], means("role of results: tool | user, for chat templates that know no tool role")
]


def form_of(calls: str, example: str) -> Any:
    """The meaning of the setting ``form``."""
    return means(
        f"form of {calls} in the prompt: line ({example}) | json (<tool_call>…</tool_call>) | function (the model's "
        "own)"
    )


class ToolTask(Task):
    """A task of several turns: the policy's calls are run and replied to, until it states an answer.

    Both forms of `grpo_rl.envs.tools.calls` are read, whichever the prompt shows. Rows have a ``question``, examples
    ``question``, ``call``, ``result`` and ``answer``.
    """

    def __init__(
        self,
        rows: Sequence[dict],
        tool: Tool,
        weights: Mapping[str, float],
        form: str,
        tool_role: str,
        system_prompt: str | None,
        examples: Sequence[Mapping[str, str]],
    ) -> None:
        self._is_function = form == "function"
        if self._is_function and tool_role != "tool":
            raise ValueError(f"env.tool_role={tool_role} with env.form=function: results of functions come as tool")
        self.rows, self._tool, self._weights, self.reply_role = rows, tool, weights, tool_role
        self.tools = (tool.schema,) if self._is_function else ()
        shown = f"a call of {tool.name}" if self._is_function else tool.written(form)
        self._before = opening(system_prompt.replace("{call}", shown) if system_prompt else None)
        for index, given in enumerate(examples or ()):
            example = checked_row(given, EXAMPLE, f"env.examples[{index}]")
            call, result = _example(tool, index, example) if self._is_function else ({}, {})
            written = "" if self._is_function else tool.written(form, example["call"])
            self._before += [
                {"role": "user", "content": example["question"]},
                {"role": "assistant", "content": written, **call},
                {"role": tool_role, "content": example["result"], **result},
                {"role": "assistant", "content": f"<answer>{example['answer']}</answer>"},
            ]

    def prompt(self, row: dict) -> Messages:
        """System prompt, examples, and the question."""
        return [*self._before, {"role": "user", "content": row["question"]}]

    def reply(self, row: dict, messages: Messages) -> Messages | None:
        """The results of the calls in the last message; None where it calls nothing, or states an answer."""
        if not self._is_function:
            return reply_to_calls(messages[-1]["content"], [self._tool], self.reply_role)
        if last_answer(messages[-1]["content"]) is not None or not messages[-1].get("tool_calls"):
            return None
        return run_calls(messages[-1]["tool_calls"], self.tools, lambda *call: self.call(row, *call), LIMITS)

    def call(self, row: dict, name: str, arguments: dict[str, Any]) -> str:
        """The result of a call of the tool as a function."""
        argument = arguments[self._tool.argument]
        if len(argument) > MAX_ARGUMENT_CHARS:
            return f"Error: the {self._tool.argument} has {len(argument)} characters, at most {MAX_ARGUMENT_CHARS}"
        return self._tool.run(argument)

    def score(self, row: dict, response: str) -> Reward:
        """The reward of a conversation of one message."""
        return self.score_dialog(row, [*self.prompt(row), {"role": "assistant", "content": response}])

    @abstractmethod
    def score_dialog(self, row: dict, messages: Messages) -> Reward:
        """The reward of a conversation of several turns."""

    def _turns(self, messages: Messages) -> tuple[Messages, list[str], str]:
        """The policy's messages, the task's replies, and the policy's final message.

        The examples in the prompt are no words of the policy. A conversation that was cut off at a call has no final
        message, though there are numbers in the call.
        """
        after = messages[len(self._before) + 1 :]
        turns = [message for message in after if message["role"] == "assistant"]
        replies = [message["content"] for message in after if message["role"] != "assistant"]
        waits = bool(turns) and "tool_calls" in turns[-1] and last_answer(turns[-1]["content"]) is None
        return turns, replies, self._final(turns[-1]["content"]) if turns and not waits else ""

    def _final(self, message: str) -> str:
        """The conversation's last message; nothing where it is a call in the text."""
        return message if self._is_function or is_final(message, [self._tool]) else ""

    def _calls(self, message: Mapping[str, Any]) -> list[Call]:
        if not self._is_function:
            return find_calls(message["content"], [self._tool])
        known = {self._tool.name: self._tool.schema["function"]}
        called = [call["function"] for call in message.get("tool_calls", ())[: LIMITS.calls]]
        given = [(function["name"], read_arguments(function["arguments"]) or {}) for function in called]
        # Calls of other tools, faulty ones and longer ones were not run.
        texts = [arguments[self._tool.argument] for name, arguments in given if not fault_of(name, arguments, known)]
        return [Call(self._tool, text) for text in texts if len(text) <= MAX_ARGUMENT_CHARS]


def _example(tool: Tool, index: int, example: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    name = f"show{index:05d}"
    function = {"name": tool.name, "arguments": json.dumps({tool.argument: example["call"]}, ensure_ascii=False)}
    return (
        {"tool_calls": [{"id": name, "type": "function", "function": function}]},
        {"tool_call_id": name, "name": tool.name},
    )
