"""ToolTask: a task whose policy calls a tool in its text, reads the result, goes on, and states the answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from grpo_rl.envs.tables import check_columns
from grpo_rl.envs.task import Messages, Reward, Task, check_weights, opening
from grpo_rl.envs.tools.calls import Tool, is_final, reply_to_calls

FORMS = ("line", "json")
ROLES = ("tool", "user")
EXAMPLE = {"question": str, "call": str, "result": str, "answer": str}


class ToolTask(Task):
    """A task of several turns: the policy's calls are run and replied to, until it states an answer.

    Args:
        rows: with a ``question``.
        tool: what the policy can call.
        weights: of the reward's parts.
        form: how the prompt writes a call, see `grpo_rl.envs.tools.calls`; both forms are read.
        tool_role: of results: ``tool``, or ``user`` for chat templates that know no such role.
        system_prompt: the first message, with ``{call}`` where a call stands; None or an empty text leaves it out.
        examples: ``question``, ``call``, ``result`` and ``answer`` of answered questions, shown as earlier turns.

    Raises:
        ValueError: a setting makes no sense, or an example lacks a key.
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
        if form not in FORMS:
            raise ValueError(f"env.form={form}; a call is written as {' or '.join(FORMS)}")
        if tool_role not in ROLES:
            raise ValueError(f"env.tool_role={tool_role}; results come in the role {' or '.join(ROLES)}")
        check_weights(weights)
        self.rows, self.tools, self._weights, self.reply_role = rows, (tool,), weights, tool_role
        self._before = opening(system_prompt.replace("{call}", tool.written(form)) if system_prompt else None)
        for index, example in enumerate(examples or ()):
            check_columns(example, EXAMPLE, f"env.examples[{index}]")
            self._before += [
                {"role": "user", "content": example["question"]},
                {"role": "assistant", "content": tool.written(form, example["call"])},
                {"role": tool_role, "content": example["result"]},
                {"role": "assistant", "content": f"<answer>{example['answer']}</answer>"},
            ]

    def prompt(self, row: dict) -> Messages:
        """System prompt, examples, and the question."""
        return [*self._before, {"role": "user", "content": row["question"]}]

    def reply(self, row: dict, messages: Messages) -> Messages | None:
        """The results of the calls in the last message; None where it calls nothing, or states an answer."""
        return reply_to_calls(messages[-1]["content"], self.tools, self.reply_role)

    def score(self, row: dict, response: str) -> Reward:
        """The reward of a conversation of one message."""
        return self.score_dialog(row, [*self.prompt(row), {"role": "assistant", "content": response}])

    @abstractmethod
    def score_dialog(self, row: dict, messages: Messages) -> Reward:
        """The reward of a conversation of several turns."""

    def _turns(self, messages: Messages) -> tuple[list[str], list[str], str]:
        """The policy's messages, the task's replies, and the policy's final message.

        The examples in the prompt are no words of the policy. A conversation that was cut off at a call has no final
        message, though there are numbers in the call.
        """
        after = messages[len(self._before) + 1 :]
        said = [message["content"] for message in after if message["role"] == "assistant"]
        replies = [message["content"] for message in after if message["role"] != "assistant"]
        return said, replies, self._final(said[-1]) if said else ""

    def _final(self, message: str) -> str:
        """The conversation's last message; nothing where it is a call."""
        return message if is_final(message, self.tools) else ""
