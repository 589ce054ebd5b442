"""Word problems with a calculator: the policy calls it in its text, reads the result, goes on, and answers."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_rl.envs import gsm8k
from grpo_rl.envs.base import LLMEnv, Messages, Reward, Task, Unjudgeable
from grpo_rl.envs.grading.arithmetic import calculate, has_operation
from grpo_rl.envs.grading.numbers import extract_answer
from grpo_rl.envs.quickstart import solution
from grpo_rl.envs.tools import Tool, answer_calls, check_settings, find_calls, is_final, opening

__all__ = ["Calculator", "CalculatorEnv", "calculate", "load_rows", "problems"]

ARITHMETIC = "arithmetic"
"""The generated problems, as a name that ``env.path`` takes."""
TRAIN, TEST = 2000, 200

SYSTEM_PROMPT = (
    "Solve the problem with a calculator. Write only {call} with your own expression, and wait for the result; do so "
    "again where there is more to calculate. Then write only <answer>144</answer> with your own number."
)
"""``{call}`` is replaced by a call in the form that the examples are in."""
# Two, as a small model takes one for chance. Kim and pens are in no shipped problem.
EXAMPLES = (
    {"question": "A box holds 12 pens at $3 each. What do 4 boxes cost?", "call": "4*12*3", "answer": "144"},
    {"question": "Kim has 31 pens and gives away 14. How many pens are left?", "call": "31-14", "answer": "17"},
)

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


class Calculator(Task):
    """Problems with a calculator at hand; a conversation earns ``correctness``, ``tool_use`` and ``answer_format``.

    Args:
        rows: ``question`` and ``answer``; the gold number is what follows ``####`` in the answer.
        correctness: paid where the last message answers, and its number equals the gold number (see
            :func:`~grpo_rl.envs.grading.numbers.extract_answer`).
        tool_use: paid where an expression with an operation was calculated, and a later message of the policy has its
            result, as a number.
        answer_format: paid where the last message ends on ``<answer>``, a number, ``</answer>``.
        form: in which the prompt shows a call, see `grpo_rl.envs.tools`; both forms are read.
        tool_role: of results: ``tool``, or ``user`` for chat templates that know no such role.
        system_prompt: the first message, with ``{call}`` where a call stands; None or an empty text leaves it out.
        examples: ``question``, ``call`` and ``answer`` of solved problems, shown as earlier turns.

    Raises:
        ValueError: a setting makes no sense, an example lacks a key, or a row's answer has no number.
    """

    reward_parts = ("correctness", "tool_use", "answer_format")
    tools = (Tool("calculator", "expression", "4*12*3", calculate),)

    def __init__(
        self,
        rows: Sequence[dict],
        *,
        correctness: float = 2.0,
        tool_use: float = 0.5,
        answer_format: float = 0.5,
        form: str = "line",
        tool_role: str = "tool",
        system_prompt: str | None = SYSTEM_PROMPT,
        examples: Sequence[Mapping[str, str]] = EXAMPLES,
    ) -> None:
        self._weights = {"correctness": correctness, "tool_use": tool_use, "answer_format": answer_format}
        check_settings(form, tool_role, self._weights)
        self.reply_role = tool_role
        solved = [{**example, "result": calculate(str(example.get("call")))} for example in examples or ()]
        self._before = opening(self.tools[0], form, tool_role, system_prompt, solved)
        self.rows = rows
        for index, row in enumerate(rows):
            if extract_answer(row["answer"]) is None:
                raise ValueError(f"the answer of row {index} has no number: {row['answer'][-80:]!r}; end it on #### N")

    def prompt(self, row: dict) -> Messages:
        """System prompt, examples, and the question."""
        return [*self._before, {"role": "user", "content": row["question"]}]

    def reply(self, row: dict, messages: Messages) -> Messages | None:
        """The results of the calls in the last message; None where it calls nothing, or answers."""
        return answer_calls(messages[-1]["content"], self.tools, self.reply_role)

    def score(self, row: dict, response: str) -> Reward:
        """The reward of a conversation of one message."""
        return self.score_dialog(row, [*self.prompt(row), {"role": "assistant", "content": response}])

    def score_dialog(self, row: dict, messages: Messages) -> Reward:
        """Whether the number is right, the calculator was of use, and the answer is in form.

        >>> task, row = Calculator([]), {"question": "[...]", "answer": "#### 72"}
        >>> said = [("assistant", "Calculator: 48 + 48/2"), ("tool", "72"), ("assistant", "So <answer>72</answer>")]
        >>> messages = [{"role": role, "content": text} for role, text in said]
        >>> task.score_dialog(row, task.prompt(row) + messages).parts
        {'correctness': 2.0, 'tool_use': 0.5, 'answer_format': 0.5}

        Raises:
            Unjudgeable: the row's answer has no number.
        """
        gold = extract_answer(row["answer"])
        if gold is None:
            # Otherwise an answer without a number would equal it.
            raise Unjudgeable(f"the row's answer has no number: {row['answer'][-80:]!r}; end it on #### N")
        # The examples in the prompt are no words of the policy.
        said = [message["content"] for message in messages[len(self._before) + 1 :] if message["role"] == "assistant"]
        # A conversation cut off at its last call has no answer, though there are numbers in the call.
        final = said[-1] if said and is_final(said[-1], self.tools) else ""
        earned = {
            "correctness": extract_answer(final) == gold,
            "tool_use": any(
                result in _numbers(later)
                for turn, text in enumerate(said[:-1])
                for result in self._results(text, row["question"])
                for later in said[turn + 1 :]
            ),
            "answer_format": re.search(gsm8k.ANSWER_PATTERN, final) is not None,
        }
        return Reward({name: float(self._weights[name]) if earned[name] else 0.0 for name in self.reward_parts})

    def gold(self, row: dict) -> str | None:
        """The gold number."""
        number = extract_answer(row["answer"])
        return None if number is None else f"{number:f}"

    def _results(self, text: str, question: str) -> list[str]:
        """What a message's calls found out: results that stand neither in the question nor in the call itself.

        Otherwise `1*1` would be of use wherever a 1 is written. Errors hold no number.
        """
        found = []
        for call in find_calls(text, self.tools):
            if call.tool and has_operation(call.argument):
                result = calculate(call.argument).removeprefix("-")
                if not result.startswith("Error") and result not in _numbers(question) | _numbers(call.argument):
                    found.append(result)
        return found


def _numbers(text: str) -> set[str]:
    """The numbers in a text, without signs, as the calculator would show them.

    >>> sorted(_numbers("so $1,234.50, then 007 and 2."))
    ['1234.5', '2', '7']
    """
    found = set()
    for number in _NUMBER.findall(text):
        whole, _, part = number.replace(",", "").partition(".")
        found.add(f"{whole.lstrip('0') or '0'}.{part}".rstrip("0").rstrip(".") if part else whole.lstrip("0") or "0")
    return found


class CalculatorEnv(LLMEnv):
    """Word problems with a calculator as a TorchRL environment, of several turns.

    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did
    Natalia sell altogether in April and May?" A policy that calculates, waits, and answers with the result earns 3:

    >>> row = {"question": "Natalia sold clips to 48 of her friends in April, [...]", "answer": "[...] #### 72"}
    >>> task = Calculator([row])
    >>> messages = task.prompt(row) + [{"role": "assistant", "content": "Calculator: 48 + 48/2"}]
    >>> task.reply(row, messages)
    [{'role': 'tool', 'content': '72'}]
    >>> messages += [{"role": "tool", "content": "72"}, {"role": "assistant", "content": "<answer>72</answer>"}]
    >>> task.reply(row, messages) is None, task.score_dialog(row, messages).total
    (True, 3.0)

    Args:
        num_envs: prompts in flight.
        repeats: answers to each, the group size G.
        tokenizer: of the model that answers.
        path: see :func:`load_rows`.
        split: see :func:`load_rows`.
        system_prompt: see :class:`Calculator`.
        examples: see :class:`Calculator`.
        form: see :class:`Calculator`.
        tool_role: see :class:`Calculator`.
        reward: weights of :class:`Calculator`, as in the config's ``env.reward``.
        settings: of :class:`LLMEnv`: ``max_turns``, ``max_prompt_tokens``, ``long_prompt``, ``seed`` and others.
    """

    def __init__(
        self,
        num_envs: int,
        repeats: int,
        tokenizer: PreTrainedTokenizerBase,
        *,
        path: str | Path | None = None,
        split: str = "train",
        system_prompt: str | None = SYSTEM_PROMPT,
        examples: Sequence[Mapping[str, str]] = EXAMPLES,
        form: str = "line",
        tool_role: str = "tool",
        reward: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> None:
        task = Calculator(
            load_rows(path, split),
            system_prompt=system_prompt,
            examples=examples,
            form=form,
            tool_role=tool_role,
            **(reward or {}),
        )
        super().__init__(task, tokenizer, num_envs, repeats, **settings)


# ---- the data ----

_WORDS = {"+": "add {}", "-": "subtract {}", "*": "multiply by {}", "/": "divide by {}"}


def load_rows(path: str | Path | None = None, split: str = "train") -> list[dict]:
    """Problems with ``question`` and ``answer``.

    Args:
        path: ``arithmetic`` for :func:`problems`, 2,000 to train and 200 held out; otherwise see
            :func:`grpo_rl.envs.gsm8k.load_rows`: a JSONL file, a shipped set, or None for ``openai/gsm8k``.
        split: ``train`` or ``test``; a file is one split.

    Raises:
        ValueError: there is no such file or split, the hub can't be reached, or a row lacks a column.

    >>> load_rows("arithmetic", "test")[0]["question"]
    'Start with 124, multiply by 53, subtract 5985, then multiply by 39. What is the result?'
    """
    if path != ARITHMETIC:
        return gsm8k.load_rows(path, split)
    if split not in gsm8k.HUB_SPLITS:
        raise ValueError(f"{ARITHMETIC} has no split {split!r}; it has {' and '.join(gsm8k.HUB_SPLITS)}")
    rows = problems(TRAIN + TEST)
    return rows[:TRAIN] if split == "train" else rows[TRAIN:]


def problems(count: int, seed: int = 0) -> list[dict]:
    """``count`` chains of two to four steps on numbers too large for the head, no question twice; all values whole.

    >>> print(problems(1)[0]["answer"])
    964 - 141 = 823
    823 - 623 = 200
    200 - 100 = 100
    #### 100
    """
    rng = random.Random(seed)
    found: dict[str, dict] = {}
    while len(found) < count:
        numbers, operators = _chain(rng)
        *steps, last = [_WORDS[sign].format(number) for sign, number in zip(operators, numbers[1:], strict=True)]
        question = f"Start with {numbers[0]}, {', '.join(steps)}, then {last}. What is the result?"
        found.setdefault(question, {"question": question, "answer": solution(tuple(numbers), operators)})
    return list(found.values())


def _chain(rng: random.Random) -> tuple[list[int], str]:
    """Numbers, and the operators that take them one after the other."""
    value = rng.randint(100, 999)
    numbers, operators = [value], ""
    for _ in range(rng.randint(2, 4)):
        divisors = [number for number in range(2, 100) if value % number == 0]
        signs = "+" + "-" * (value >= 200) + "*" * (value < 10**6) + "/" * bool(divisors and value >= 1000)
        sign = rng.choice(signs)
        if sign == "+":
            number = rng.randint(100, 9999)
            value += number
        elif sign == "-":
            number = rng.randint(100, value - 100)
            value -= number
        elif sign == "*":
            number = rng.randint(12, 99)
            value *= number
        else:
            number = rng.choice(divisors)
            value //= number
        numbers.append(number)
        operators += sign
    return numbers, operators
