"""Word problems with a calculator: the policy calls it in its text, reads the result, and states the answer."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from typing_extensions import override

from grpo_rl.envs import gsm8k
from grpo_rl.envs.declared import means, weight
from grpo_rl.envs.sources import AnySource, Source
from grpo_rl.envs.spec import TaskSpec
from grpo_rl.envs.task import Messages, Reward, Unjudgeable
from grpo_rl.envs.tools.arithmetic import calculate, has_operation, problems
from grpo_rl.envs.tools.calls import Tool
from grpo_rl.envs.tools.task import Form, ToolRole, ToolTask, form_of

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

CALCULATOR = Tool("calculator", "expression", "4*12*3", calculate, "Calculates an arithmetic expression.")

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


class Calculator(ToolTask):
    """Problems with a calculator at hand; a conversation earns ``correctness``, ``tool_use`` and ``answer_format``.

    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did
    Natalia sell altogether in April and May?" A policy that calculates, waits, and answers with the result earns 3:

    >>> row = {"question": "Natalia sold clips to 48 of her friends in April, [...]", "answer": "[...] #### 72"}
    >>> task = Calculator([row])
    >>> messages = task.prompt(row) + [{"role": "assistant", "content": "Calculator: 48 + 48/2"}]
    >>> task.reply(row, messages)
    [{'role': 'tool', 'content': '72'}]
    >>> messages += [{"role": "tool", "content": "72"}, {"role": "assistant", "content": "<answer>72</answer>"}]
    >>> task.reply(row, messages) is None, task.score_dialog(row, messages).parts
    (True, {'correctness': 2.0, 'tool_use': 0.5, 'answer_format': 0.5})

    Rows have ``question`` and ``answer``; the gold number is what follows ``####`` in the answer. ``tool_use`` is paid
    where an expression with an operation was calculated, and a later message of the policy has its result, as a number.

    Raises:
        ValueError: a setting makes no sense, an example lacks a key, or a row's answer has no number.
    """

    reward_parts = ("correctness", "tool_use", "answer_format")
    correct_part = "correctness"

    def __init__(
        self,
        rows: Sequence[dict],
        *,
        correctness: Annotated[float, weight("the final number equals the gold number")] = 2.0,
        tool_use: Annotated[float, weight("a result was calculated and used")] = 0.5,
        answer_format: Annotated[float, weight("the last message ends on <answer>NUMBER</answer>")] = 0.5,
        form: Annotated[Form, form_of("calls", "Calculator: 3*(4+5)")] = "line",
        tool_role: ToolRole = "tool",
        system_prompt: Annotated[
            str | None, means("system message, in which {call} becomes a call in that form; null: none")
        ] = SYSTEM_PROMPT,
        examples: Annotated[
            Sequence[Mapping[str, Any]],
            means("turns before the problem; a small model that sees none, or one, calls nothing"),
        ] = EXAMPLES,
    ) -> None:
        weights = {"correctness": correctness, "tool_use": tool_use, "answer_format": answer_format}
        solved = [{**example, "result": calculate(str(example.get("call")))} for example in examples or ()]
        super().__init__(rows, CALCULATOR, weights, form, tool_role, system_prompt, solved)
        gsm8k.check_gold(rows)

    @override
    def score_dialog(self, row: dict, messages: Messages) -> Reward:
        turns, _, final = self._turns(messages)
        right = gsm8k.is_right(final, row["answer"])
        if right is None:
            # Otherwise a response without a number would equal it.
            raise Unjudgeable(f"the row's answer has no number: {row['answer'][-80:]!r}; end it on #### N")
        earned = {
            "correctness": right,
            "tool_use": any(
                result in _numbers(" ".join([later["content"], *(call.argument for call in self._calls(later))]))
                for turn, message in enumerate(turns[:-1])
                for result in self._results(message, row["question"])
                for later in turns[turn + 1 :]
            ),
            "answer_format": re.search(gsm8k.ANSWER_PATTERN, final) is not None,
        }
        return Reward(self._paid(earned))

    def final_answers(self, responses: Sequence[str]) -> list[str | None]:
        """The final number of each conversation's last message; one that ends on a call states none."""
        return [gsm8k.final_number(self._final(response)) for response in responses]

    def gold(self, row: dict) -> str | None:
        """The gold number."""
        return gsm8k.gold_number(row)

    def _results(self, message: Mapping[str, Any], question: str) -> list[str]:
        """The results of a message's calls that stand neither in the question nor in the call itself.

        Otherwise `1*1` would be of use wherever a 1 is written. Errors hold no number.
        """
        found = []
        for call in self._calls(message):
            if call.tool and has_operation(call.argument):
                result = calculate(call.argument).removeprefix("-")
                if not result.startswith("Error") and result not in _numbers(question) | _numbers(call.argument):
                    found.append(result)
        return found


def _numbers(text: str) -> set[str]:
    """The numbers in a text, without signs, as the calculator would show them: 1,234.50 as 1234.5."""
    found = set()
    for number in _NUMBER.findall(text):
        whole, _, part = number.replace(",", "").partition(".")
        found.add(f"{whole.lstrip('0') or '0'}.{part}".rstrip("0").rstrip(".") if part else whole.lstrip("0") or "0")
    return found


def load_rows(path: AnySource = None, split: str = "train") -> Sequence[dict]:
    """Problems of :func:`grpo_rl.envs.gsm8k.load_rows`, or by the path ``arithmetic`` of
    :func:`~grpo_rl.envs.tools.arithmetic.problems`, 2,000 to train and 200 held out.

    >>> load_rows("arithmetic", "test")[0]["question"]
    'Start with 124, multiply by 53, subtract 5985, then multiply by 39. What is the result?'
    """
    source = Source.of(path)
    if source.path != ARITHMETIC:
        return gsm8k.load_rows(source, split, chat=False)
    if split not in gsm8k.HUB_SPLITS:
        raise ValueError(f"{ARITHMETIC} has no split {split!r}; it has {' and '.join(gsm8k.HUB_SPLITS)}")
    rows = problems(TRAIN + TEST)
    return rows[:TRAIN] if split == "train" else rows[TRAIN:]


CalculatorEnv = TaskSpec(Calculator, load_rows, generated=(ARITHMETIC,), hub=gsm8k.HUB_NAME)
"""Word problems with a calculator as a TorchRL environment, of several turns."""
