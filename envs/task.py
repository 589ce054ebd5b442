"""Task: the prompt and the reward of a dataset row, strings in and numbers out. Pure Python, no tensors."""

from __future__ import annotations

import copy
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from typing_extensions import override

T = TypeVar("T")
Messages = list[dict[str, Any]]
"""A conversation: dicts with ``role`` and ``content``, as chat templates take them.

A message of the policy that calls functions has ``tool_calls`` next to these, as OpenAI writes them, and a result has
the call's ``tool_call_id`` and ``name``.
"""

RESERVED_PARTS = {
    "mean", "std", "zero_std_fraction", "reward", "standard_error", "mean_length", "truncated_fraction", "total",
    "failed", "measure", "sampled_accuracy", "sampled_reward", "tied",
}  # fmt: skip
"""Names under ``reward/`` and ``eval/`` that metrics have taken already, next to those that begin as :data:`SCORES`."""
SCORES = ("pass@", "maj@")


@dataclass(frozen=True)
class Reward:
    """The reward of one response: named parts, already weighted, and their sum.

    Args:
        parts: of the reward.
        measures: what is logged next to the reward, no part of it; a response lacks those that mean nothing there.

    >>> Reward({"correctness": 2.0, "answer_format": 0.5}).total
    2.5
    """

    parts: dict[str, float]
    measures: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return sum(self.parts.values())


class Unjudgeable(Exception):
    """The row itself can't be judged, whatever the response: its gold answer makes no sense to the scorer, say."""


class NothingApplies(Unjudgeable):
    """Each of the task's reward functions returned None: added rewards alone judge the response, if there are any."""


class Spent(Exception):
    """A budget that a scorer needs is used up, and the run stops."""


class Task(ABC):
    """The prompt of a dataset row, and the reward of a response to it. Pure Python, no tensors.

    A wrong response scores 0. A scorer that can't do its work raises: a bug must never look like a wrong response. What
    is raised is counted by kind, and leaves that response out of its group (`grpo_rl.envs.guards.guard`).
    """

    rows: Sequence[dict]
    """The dataset."""
    reward_parts: tuple[str, ...]
    """Names of the parts that every :meth:`score` returns."""
    parts_may_lack: bool = False
    """True: a reward lacks the parts that do not apply to its response, as where a reward function returned None."""
    isolated: bool | None = None
    """True: responses are scored in a process of their own, which can be killed: for scorers that may hang or crash.

    None leaves it to the task which of its user's code, if any, goes to one."""
    reply_role: str = "tool"
    """The role of the messages of :meth:`reply`, which the chat template has to know."""
    one_by_one: bool = False
    """True: each response is scored in a call by itself, though the task has one turn, so that an added reward sees no
    group."""
    tools: Sequence[Any] = ()
    """The functions that the policy can call, or their JSON schemas, as the chat template shows them."""

    correct_part: str | None = None
    """The part of the reward that is above 0 for right responses alone; None: there is none."""

    _weights: Mapping[str, float] = {}
    _budget_s: float = math.inf

    def pays(self, part: str) -> bool:
        """True if a response can earn by this part: at a weight of 0 or less, right ones look like wrong ones."""
        return self._weights.get(part, 1.0) > 0

    @property
    def scores_group(self) -> bool:
        """True if all responses to a prompt are scored in one call of :meth:`score_many`.

        False where a subclass of such a task defines ``score`` alone: it is called for each response.
        """
        own = next(vars(base) for base in type(self).__mro__ if {"score", "score_many"} & vars(base).keys())
        return "score_many" in own

    def without_rows(self) -> Task:
        """A copy that can score and has no data, to be sent to another process."""
        task = copy.copy(self)
        task.rows = ()
        return task

    def ready(self, deadline_s: float) -> None:
        """Starts what the scorer needs, such as processes of its own, before its call of ``deadline_s`` begins."""
        self._budget_s = deadline_s

    def counts(self) -> dict[str, float]:
        """Counts of what the scorer did in the run so far, by the names of their metrics."""
        return {}

    def restore(self, counts: Mapping[str, float]) -> None:
        """Goes on from :meth:`counts`, where a run resumes; nothing is counted here."""
        return

    def place(self, device: Any) -> None:
        """Loads the models that score on a device; there are none here."""
        return

    @abstractmethod
    def prompt(self, row: dict) -> Messages:
        """The conversation that the policy goes on with; its last message is shown as the question."""

    @abstractmethod
    def score(self, row: dict, response: str) -> Reward:
        """The reward of ``response``, with exactly the parts of ``reward_parts``.

        Raises:
            Unjudgeable: no response to this row could be judged.
        """

    def score_many(self, rows: Sequence[dict], responses: Sequence[str]) -> Sequence[Reward | Exception]:
        """The reward of each response, or what its scorer raised; the responses to one prompt come in one call."""
        results: list[Reward | Exception] = []
        for row, response in zip(rows, responses, strict=True):
            try:
                results.append(self.score(row, response))
            except Exception as error:
                results.append(error)
        return results

    def score_dialog(self, row: dict, messages: Messages) -> Reward:
        """The reward of a conversation of several turns, its prompt included; by default that of its end."""
        return self.score(row, last_said(messages))

    def reply(self, row: dict, messages: Messages) -> Messages | None:
        """The environment's reply to the policy's last message; None ends the conversation, as single turns do.

        Several conversations are replied to at the same time, each in a thread.
        """
        return None

    def gold(self, row: dict) -> str | None:
        """The gold answer, for logs and `ref_model.hint`; None where the task has no single one."""
        return None

    def is_right(self, reward: Reward) -> bool | None:
        """True if a response with this reward is right; None where neither task nor weights say so."""
        part = self.correct_part
        return reward.parts[part] > 0 if part in reward.parts and self.pays(part) else None

    @property
    def tells_right(self) -> bool:
        """True if :meth:`is_right` can say of a response whether it is right."""
        part = self.correct_part
        return type(self).is_right is not Task.is_right or (part in self.reward_parts and self.pays(part))

    def final_answers(self, responses: Sequence[str]) -> list[str | None] | None:
        """The final answer that each response to one row states, equal ones written alike, None where it states none.

        None in the place of the list: responses to this task state no final answer, so that no majority can be formed.
        """
        return None

    def demonstration(self, row: dict) -> str | dict[str, Any] | None:
        """The response to this row that SFT imitates; None where the row has none.

        A text, or a message with calls or reasoning next to it, which the chat template writes.
        """
        return None

    def tools_of(self, row: dict) -> Sequence[Any]:
        """The tools that the prompt of a row shows; rows of a data set may have some of their own."""
        return self.tools

    def _paid(self, earned: Mapping[str, bool]) -> dict[str, float]:
        """The parts of the reward: the weight of each part that is earned, and 0 for the others."""
        return {name: float(self._weights[name]) if earned[name] else 0.0 for name in self.reward_parts}


class GroupTask(Task):
    """A task that scores all responses to a prompt in one call, of :meth:`score_many`."""

    @override
    def score(self, row: dict, response: str) -> Reward:
        return raised(self.score_many([row], [response])[0])

    @override
    @abstractmethod
    def score_many(self, rows: Sequence[dict], responses: Sequence[str]) -> Sequence[Reward | Exception]: ...


def opening(system_prompt: str | None, examples: Iterable[tuple[str, str]] = ()) -> Messages:
    """The messages before a row's own: the system prompt, unless it is empty, and questions with responses.

    >>> [message["role"] for message in opening("Be brief.", [("1 + 1?", "2")])]
    ['system', 'user', 'assistant']
    """
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    for asked, response in examples:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": response}]
    return messages


def asking(before: Messages, asked: str | Messages) -> Messages:
    """The prompt: the messages of :func:`opening`, and what is asked, a text or chat messages.

    A system message of the chat's own takes the place of the other.

    >>> before = opening("Be brief.", [("1 + 1?", "2")])
    >>> chat = [{"role": "system", "content": "Reason."}, {"role": "user", "content": "3?"}]
    >>> [message["content"] for message in asking(before, chat)]
    ['Reason.', '1 + 1?', '2', '3?']
    """
    if isinstance(asked, str):
        return [*before, {"role": "user", "content": asked}]
    if asked[0]["role"] != "system":
        return [*before, *asked]
    return [asked[0], *(message for message in before if message["role"] != "system"), *asked[1:]]


def last_said(messages: Messages) -> str:
    """The policy's last message: a conversation that met a limit may end on a reply.

    >>> last_said([{"role": "assistant", "content": "Calculator: 3*4"}, {"role": "tool", "content": "12"}])
    'Calculator: 3*4'
    """
    return next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), "")


def raised(result: T | Exception) -> T:
    """The result; an exception in its place is raised."""
    if isinstance(result, Exception):
        raise result
    return result


def check_weights(weights: Mapping[str, object], section: str = "env.reward") -> None:
    """Raises ValueError unless every weight of a reward's parts is a finite number.

    >>> check_weights({"correctness": 2.0, "answer_format": "half"})
    Traceback (most recent call last):
    ...
    ValueError: env.reward.answer_format='half'; a weight is a finite number
    """
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not abs(weight) <= sys.float_info.max:
            raise ValueError(f"{section}.{name}={weight!r}; a weight is a finite number")


def plays_turns(task: Task) -> bool:
    """True if the task replies."""
    return type(task).reply is not Task.reply
