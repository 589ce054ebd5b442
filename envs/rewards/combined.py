"""WithRewards: any task, with rewards added to its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from grpo_rl.by_name import one_line
from grpo_rl.envs.rewards.registry import Part, read_parts
from grpo_rl.envs.task import GroupTask, Messages, NothingApplies, Reward, Task, last_said, plays_turns, raised

if TYPE_CHECKING:  # processes that call reward functions need not wait for it
    from transformers import PreTrainedTokenizerBase

    from grpo_rl.envs.rewards.judge import Judge

CountTokens = Callable[[Sequence[str]], Sequence[int]]
"""The number of tokens in each text."""

CORRECTNESS = ("accuracy", "correctness")
"""Reward parts that are above 0 for right responses, where a reward names none."""


class WithRewards(GroupTask):
    """A task whose responses earn more: to the parts of ``task`` come those of ``rewards``, under their names.

    Prompts, rows and gold answers are the task's own. Make it with :func:`with_rewards`.

    Args:
        rewards: as ``env.rewards``; see `grpo_rl.envs.rewards.registry.read_parts`.
        count_tokens: for rewards whose unit is tokens.

    Raises:
        ValueError: a reward or setting makes no sense, has the name of a part of the task, needs a part or a counter
            that is not there, or compares the responses of a group where they are scored one by one: in a task of
            several turns, and where an agent sends its reward.
    """

    def __init__(self, task: Task, rewards: Mapping[str, Any], count_tokens: CountTokens | None = None) -> None:
        # What others are judged by comes before them.
        self._parts = sorted(read_parts(rewards), key=lambda part: "correct" in part.known.inputs)
        self._count_tokens = count_tokens
        self.task, self.rows, self.isolated, self.reply_role = task, task.rows, task.isolated, task.reply_role
        self.tools, self.one_by_one, self.parts_may_lack = task.tools, task.one_by_one, task.parts_may_lack
        self.reward_parts = (*task.reward_parts, *(part.name for part in self._parts))
        self._correct = {part.name: self._correctness(part) for part in self._parts}
        self._weights = {part.name: part.weight for part in self._parts}
        self._made: list[Any] = [part.known.function for part in self._parts if part.known.made]
        for part in self._parts:
            self._check(part)

    @property
    def scores_group(self) -> bool:
        """True if the task's responses are scored in one call, or an added reward compares those of a group."""
        return self.task.scores_group or any(part.known.takes_lists for part in self._parts)

    @property
    def judges(self) -> list[Judge]:
        """The language models among the added rewards."""
        return [made for made in self._made if hasattr(made, "share_budget")]

    def without_rows(self) -> WithRewards:
        """A copy of both tasks, this one and the inner one, without data."""
        other = cast(WithRewards, super().without_rows())
        other.task, other.tools = self.task.without_rows(), ()  # calls are run where the conversation is
        return other

    def ready(self, deadline_s: float) -> None:
        """Starts what the task's scorer needs."""
        super().ready(deadline_s)
        self.task.ready(deadline_s)

    def counts(self) -> dict[str, float]:
        """The task's counts, and those of the added rewards."""
        counts = self.task.counts()
        for made in self._made:
            counts |= made.counts()
        return counts

    def restore(self, counts: Mapping[str, float]) -> None:
        """Goes on from :meth:`counts`."""
        self.task.restore(counts)
        for made in self._made:
            made.restore(counts)

    def place(self, device: Any) -> None:
        """Loads the added models that score on a device."""
        self.task.place(device)
        for made in self._made:
            if hasattr(made, "place"):
                made.place(device)

    @override
    def prompt(self, row: dict) -> Messages:
        return self.task.prompt(row)

    @override
    def tools_of(self, row: dict) -> Sequence[Any]:
        return self.task.tools_of(row)

    @override
    def gold(self, row: dict) -> str | None:
        return self.task.gold(row)

    @override
    def is_right(self, reward: Reward) -> bool | None:
        return self.task.is_right(reward)

    @override
    def final_answers(self, responses: Sequence[str]) -> list[str | None] | None:
        return self.task.final_answers(responses)

    @property
    def tells_right(self) -> bool:
        """True if the task itself judges which responses are right."""
        return self.task.tells_right

    def score_many(self, rows: Sequence[dict], responses: Sequence[str]) -> list[Reward | Exception]:
        """The reward of each response; neighbours with the same row are the responses to one prompt.

        >>> from grpo_rl.envs.gsm8k import GSM8K
        >>> task = with_rewards(GSM8K([]), {"cosine": {"weight": 2.0, "max_len": 10}})
        >>> task.score({"question": "3 + 4?", "answer": "#### 7"}, "It's 7").parts
        {'correctness': 2.0, 'reasoning_format': 0.0, 'answer_format': 0.0, 'cosine': 1.345...}
        """
        self._begin()
        score_many = self.task.score_many if self.task.scores_group else partial(Task.score_many, self.task)
        return self._extended(rows, responses, score_many(rows, responses))

    def _begin(self) -> None:
        """Passes the deadline of a call, which includes the task's own scoring, to the judges."""
        for judge in self.judges:
            judge.ready(self._budget_s)

    def _extended(
        self, rows: Sequence[dict], texts: Sequence[str], rewards: Sequence[Reward | Exception]
    ) -> list[Reward | Exception]:
        results = [Reward({}) if isinstance(given, NothingApplies) else given for given in rewards]
        units = {part.unit for part in self._parts if "length" in part.known.inputs}
        counts = self._count_tokens(texts) if self._count_tokens and "tokens" in units else ()
        lengths = {"characters": [len(text) for text in texts], "tokens": counts}
        for _, neighbours in groupby(range(len(rows)), key=lambda at: rows[at]):
            group = list(neighbours)
            for part in self._parts:
                # A response whose scorer failed is out of its group, for the rewards that compare too.
                judged = [(at, result) for at in group if isinstance(result := results[at], Reward)]
                inputs = {
                    "text": [texts[at] for at, _ in judged],
                    "length": [lengths[part.unit][at] for at, _ in judged] if "length" in part.known.inputs else [],
                    "correct": [result.parts.get(self._correct[part.name], 0.0) > 0 for _, result in judged],
                    **{
                        name: [value(rows[at]) for at, _ in judged] if name in part.known.inputs else []
                        for name, value in self._of_row.items()
                    },
                }
                for (at, result), value in zip(judged, part.values(inputs, len(judged)), strict=True):
                    failed = isinstance(value, Exception)
                    results[at] = value if failed else replace(result, parts={**result.parts, part.name: value})
        # Weighted at the end: a reward that others are judged by may well have the weight 0.
        return [self._weighted(result) if isinstance(result, Reward) else result for result in results]

    @property
    def _of_row(self) -> dict[str, Callable[[dict], Any]]:
        return {"gold": self.task.gold, "reference": self.task.gold, "question": self._question}

    def _question(self, row: dict) -> str:
        return self.task.prompt(row)[-1]["content"]

    def _weighted(self, reward: Reward) -> Reward:
        parts = {name: value * self._weights.get(name, 1.0) for name, value in reward.parts.items()}
        return replace(reward, parts=parts)

    def _correctness(self, part: Part) -> str:
        """The name of the part that shows whether a response is right; empty where no reward needs it."""
        if "correct" not in part.known.inputs:
            return ""
        where, accuracy = f"env.rewards.{part.name} asks whether a response is right", "add env.rewards.accuracy"
        # An added accuracy first: it is judged before it is weighted.
        name = part.correct or next((name for name in CORRECTNESS if name in self.reward_parts), None)
        if name in self.task.reward_parts and not self.task.pays(name):
            raise ValueError(f"{where}, and the weight of {name} is not above 0; pay for it, or {accuracy}")
        if name is None or name not in self.reward_parts or name == part.name:
            raise ValueError(
                f"{where}, and {name or ' or '.join(CORRECTNESS)} is no other part of the reward, which has "
                f"{', '.join(self.reward_parts)}; name that part with env.rewards.{part.name}.correct, or {accuracy}"
            )
        return name

    def _check(self, part: Part) -> None:
        where, name = f"env.rewards.{part.name}", type(self.task).__name__
        one_by_one = plays_turns(self.task) or self.task.one_by_one
        if part.known.made:
            if self.isolated:
                raise ValueError(f"{where} keeps counts here, and {name} is scored in others; set isolated=false")
            if part.known.function in self.judges:
                try:
                    part.known.function.check(one_by_one=one_by_one)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from error
        if part.name in self.task.reward_parts:
            raise ValueError(f"{name} has a reward part {part.name} of its own; leave {where} out")
        if "length" in part.known.inputs and part.unit == "tokens" and self._count_tokens is None:
            raise ValueError(f"{where} counts tokens; give a counter of tokens, or set {where}.unit=characters")
        if "gold" in part.known.inputs and len(self.rows) and all(self.task.gold(row) is None for row in self.rows):
            raise ValueError(f"{where} needs gold answers, and {name} has none; leave {where} out")
        if part.known.whole_group and one_by_one:
            remedy = ", or set env.scorer" if self.task.one_by_one else ""
            raise ValueError(f"{where} compares a group's responses, {name} scores one by one; leave it out{remedy}")

    def try_own(self) -> None:
        """Refuses a function of the user's own that returns no finite number for an empty response to the first row."""
        for part in (part for part in self._parts if part.known.own):
            of_row = {name: [value(self.rows[0])] for name, value in self._of_row.items() if name in part.known.inputs}
            (value,) = part.values({"text": [""], "length": [0], "correct": [False], **of_row}, 1)
            if isinstance(value, Exception):
                raise ValueError(f"env.rewards.{part.name} can't score an empty response: {one_line(value)}") from value
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                wrong = f"returned {value!r:.80} for an empty response; it must be a finite number"
                raise ValueError(f"env.rewards.{part.name} {wrong}")


class WithRewardsInTurns(WithRewards):
    """A task of several turns with rewards added; these judge the policy's last message."""

    @override
    def reply(self, row: dict, messages: Messages) -> Messages | None:
        return self.task.reply(row, messages)

    def score_dialog(self, row: dict, messages: Messages) -> Reward:
        """The task's reward of the conversation, and the added ones of its last message."""
        self._begin()
        try:
            own = self.task.score_dialog(row, messages)
        except NothingApplies:
            own = Reward({})
        return raised(self._extended([row], [last_said(messages)], [own])[0])


def with_rewards(task: Task, rewards: Mapping[str, Any] | None, count_tokens: CountTokens | None = None) -> Task:
    """The task with ``rewards`` added as :class:`WithRewards`; the task itself where there are none."""
    if not rewards:
        return task
    return (WithRewardsInTurns if plays_turns(task) else WithRewards)(task, rewards, count_tokens)


def share_budgets(tasks: Iterable[Task]) -> None:
    """Lets the judges of these tasks that have the same settings keep one budget."""
    judges: list[Judge] = []
    for task in tasks:
        for judge in task.judges if isinstance(task, WithRewards) else ():
            if (first := next((other for other in judges if other.settings == judge.settings), None)) is not None:
                judge.share_budget(first)
            judges.append(judge)


def token_counter(tokenizer: PreTrainedTokenizerBase) -> CountTokens:
    """Counts a text's tokens as a model of this tokenizer reads it, which may differ a little from what was sampled."""
    return partial(_counts, tokenizer)


def _counts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    return [len(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
