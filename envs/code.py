"""Code: tasks to write a program, generated or given, judged by tests in a sandbox, where it can't reach them."""

import itertools
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Annotated

from grpo_rl.envs import tables
from grpo_rl.envs.declared import SystemPrompt, means, weight
from grpo_rl.envs.grading.program_tests import ProgramTests, equal_outputs, program_of, read_tests
from grpo_rl.envs.guards.isolation import SPENT
from grpo_rl.envs.sandbox.sandbox import BrokenTests, Kind, Limits, Sandbox
from grpo_rl.envs.sources import AnySource, Source
from grpo_rl.envs.spec import TaskSpec
from grpo_rl.envs.task import GroupTask, Messages, Reward, Unjudgeable, asking, opening

SPLITS = ("train", "test")
TESTS = 6
_NUMBERS = "nums = [int(word) for word in input().split()]\n"
_WORDS = "words = input().split()\n"
_Pattern = tuple[str, str, Callable[[Sequence, int], object]]
"""The end of a question, a program without its first line, and what it prints; ``{k}`` and k are the task's number."""

OF_NUMBERS: tuple[_Pattern, ...] = (
    ("print their sum plus {k}", "print(sum(nums) + {k})", lambda nums, k: sum(nums) + k),
    ("print the largest of them times {k}", "print(max(nums) * {k})", lambda nums, k: max(nums) * k),
    ("print how many are above {k}", "print(sum(n > {k} for n in nums))", lambda nums, k: sum(n > k for n in nums)),
    (
        "print the sum of those that {k} divides",
        "print(sum(n for n in nums if n % {k} == 0))",
        lambda nums, k: sum(n for n in nums if n % k == 0),
    ),
    (
        "print the remainder of their product divided by {k}",
        "product = 1\nfor n in nums:\n    product *= n\nprint(product % {k})",
        lambda nums, k: math.prod(nums) % k,
    ),
    (
        "print them from the smallest to the largest, each plus {k}",
        "print(*sorted(n + {k} for n in nums))",
        lambda nums, k: " ".join(str(n + k) for n in sorted(nums)),
    ),
    (
        "print how many different remainders they have when divided by {k}",
        "print(len({{n % {k} for n in nums}}))",
        lambda nums, k: len({n % k for n in nums}),
    ),
)
OF_WORDS: tuple[_Pattern, ...] = (
    (
        "print how many have more than {k} letters",
        "print(sum(len(w) > {k} for w in words))",
        lambda words, k: sum(len(w) > k for w in words),
    ),
    (
        "print the first {k} letters of each, joined without spaces",
        "print(''.join(w[:{k}] for w in words))",
        lambda words, k: "".join(w[:k] for w in words),
    ),
    (
        "print each backwards, followed by {k}",
        "print(*[w[::-1] + '{k}' for w in words])",
        lambda words, k: " ".join(w[::-1] + str(k) for w in words),
    ),
    (
        "print how many letters occur at least {k} times in all of them together",
        "from collections import Counter\nprint(sum(n >= {k} for n in Counter(''.join(words)).values()))",
        lambda words, k: sum(n >= k for n in Counter("".join(words)).values()),
    ),
)

SYSTEM_PROMPT = (
    "Solve the task in Python. Write the whole program into one block that begins with ```python and ends with ```."
)
QUESTIONS = ("question", "prompt", "text")
"""Columns in which data sets have the task, the first that is there."""
SOLUTIONS = ("solution", "code", "canonical_solution", "solutions")
"""Columns in which they have a program that solves it."""
COLUMNS = (
    *QUESTIONS, *SOLUTIONS, "tests", "input_output", "test_list", "test_setup_code", "test_imports", "test",
    "entry_point",
)  # fmt: skip


class Code(GroupTask):
    r"""Tasks to write a program; a response earns ``tests``, ``all_passed`` and ``answer_format``.

    "Read two integers, and print their sum." A response whose program does so earns 1.6:

    >>> row = {"question": "Read two integers, and print their sum.", "tests": [{"input": "3 4", "output": "7"}]}
    >>> task = Code([row], sandbox="i_accept_no_sandbox")
    >>> reward = task.score(row, "```python\nprint(sum(map(int, input().split())))\n```")
    >>> reward.total, reward.parts
    (1.6, {'tests': 0.5, 'all_passed': 1.0, 'answer_format': 0.1})

    The program is the last fenced block. What it should print or return stays outside its sandbox
    (:class:`~grpo_rl.envs.sandbox.sandbox.Sandbox`).

    Rows have ``question``, a text or chat messages, and tests (`grpo_rl.envs.grading.program_tests.read_tests`). A test
    of printed output has ``time_s`` alone, all other tests of a row have it together.

    Raises:
        ValueError: there is no sandbox.
    """

    reward_parts = ("tests", "all_passed", "answer_format")
    correct_part = "all_passed"

    def __init__(
        self,
        rows: Sequence[dict],
        *,
        tests: Annotated[float, weight("the share of tests that are passed")] = 0.5,
        all_passed: Annotated[float, weight("all tests are passed")] = 1.0,
        answer_format: Annotated[float, weight("there is a fenced block")] = 0.1,
        sandbox: Annotated[
            Kind,
            means(
                "where programs run: bubblewrap | i_accept_no_sandbox: they can read, change and delete every file "
                "that you can, and forge their verdicts"
            ),
        ] = "bubblewrap",
        time_s: Annotated[float, means("CPU seconds for one run of a program, in whole ones", ge=0.1)] = 5.0,
        memory_mib: Annotated[int, means("memory of a program", ge=64)] = 1024,
        max_tests: Annotated[
            int | None, means("tests of a row that are run, at equal distances; null: all", ge=1)
        ] = 20,
        system_prompt: SystemPrompt = SYSTEM_PROMPT,
    ) -> None:
        self._weights = {"tests": tests, "all_passed": all_passed, "answer_format": answer_format}
        self._sandbox = Sandbox(sandbox, Limits(memory_mib=memory_mib, cpu_s=time_s))
        self._max_tests, self._before, self.rows = max_tests, opening(system_prompt), rows

    def prompt(self, row: dict) -> Messages:
        """System prompt, and the task; where functions are tested, with a call as the tests have it."""
        question = row["question"]
        if isinstance(question, str) and (call := read_tests(row, self._max_tests).call):
            question = f"{question}\n\nThe program is tested by calls such as {call}."
        return asking(self._before, question)

    def score_many(self, rows: Sequence[dict], responses: Sequence[str]) -> list[Reward | Exception]:
        """The rewards of a group; equal programs run once, others side by side.

        A program that runs out of its time fails this test and those that follow, and has the measure ``timed_out``.
        A program that waits takes no other's share of the group's time; one that is left no time has no reward.
        """
        until = time.monotonic() + self._budget_s * SPENT
        tests = {id(row): read_tests(row, self._max_tests) for row in rows}
        programs = [(id(row), program_of(response)) for row, response in zip(rows, responses, strict=True)]
        distinct = [key for key in dict.fromkeys(programs) if key[1] is not None]
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        waiting = itertools.count(len(distinct), -1)

        def judge(key: tuple[int, str]) -> Reward | Exception:
            share_s = max(0.0, until - time.monotonic()) * min(1.0, workers / next(waiting))
            return self._judged(tests[key[0]], key[1], share_s)

        with ThreadPoolExecutor(workers) as threads:
            results = threads.map(judge, distinct)
            judged = dict(zip(distinct, results, strict=True))
        nothing = Reward(dict.fromkeys(self.reward_parts, 0.0))
        return [judged.get(key, nothing) for key in programs]

    def _judged(self, tests: ProgramTests, program: str, share_s: float) -> Reward | Exception:
        """The reward of one program, all of whose runs together have the time of one, or its share of the group's."""
        limits, passed, timed_out = self._sandbox.limits, 0, False
        deadline = time.monotonic() + min(share_s, limits.until_killed_s)
        if tests.code:
            try:
                verdicts, outcome = self._sandbox.test(
                    program, tests.code, tests.setup, tests.names, tests.entry_point, deadline - time.monotonic(),
                    tests.only,
                )  # fmt: skip
            except BrokenTests as error:
                return Unjudgeable(str(error))
            passed, timed_out = sum(verdicts), outcome.timed_out
        for given, wanted in tests.pairs:
            outcome = self._sandbox.run(program, given, deadline - time.monotonic())
            if timed_out := outcome.timed_out:
                break
            passed += outcome.exit_code == 0 and equal_outputs(outcome.stdout, wanted)
        if timed_out and time.monotonic() >= deadline and share_s < limits.cpu_s:
            return TimeoutError("the programs of the group were stopped; raise env.score_timeout_s or lower env.time_s")
        share, every = passed / len(tests), passed == len(tests)
        earned = {"tests": share, "all_passed": float(every), "answer_format": 1.0}
        parts = {name: float(self._weights[name]) * value for name, value in earned.items()}
        return Reward(parts, {"timed_out": float(timed_out)})

    def gold(self, row: dict) -> str | None:
        """A program that solves the task, where the data has one."""
        return row.get("solution")

    def demonstration(self, row: dict) -> str | None:
        """The program that solves the task, in a fenced block."""
        return f"```python\n{row['solution'].strip()}\n```" if row.get("solution") else None


def load_rows(path: AnySource = None, split: str = "train") -> Sequence[dict]:
    """Rows with ``question`` and tests, of :func:`grpo_rl.envs.tables.load_rows`; without a path small generated ones.

    Raises:
        ValueError: there is no such file, or a row has no question or no tests.
    """
    source = Source.of(path)
    if source.path is None:
        return generated_rows(split)
    rows = tables.load_rows(source, split, COLUMNS, chat=("question", None))
    return [row.now(_checked(row, row.where)) for row in rows]


def _checked(row: dict, where: str) -> dict:
    named = next((name for name in QUESTIONS if row.get(name)), None)
    if named is None:
        raise ValueError(f"{where} has no question; give it in a column {', '.join(QUESTIONS[:-1])} or {QUESTIONS[-1]}")
    row = {**row, "question": row[named], "solution": _solution(row)}
    try:
        read_tests(row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return row


def _solution(row: dict) -> str | None:
    value = next((row[name] for name in SOLUTIONS if row.get(name)), None)
    if isinstance(value, str) and row.get("canonical_solution") == value and isinstance(row.get("prompt"), str):
        return row["prompt"] + value
    if value is not None and value == row.get("solutions") and isinstance(value, str):  # APPS has JSON in it
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if isinstance(value, list):
        value = next((item for item in value if isinstance(item, str)), None)
    return value if isinstance(value, str) else None


CodeEnv = TaskSpec(Code, load_rows)
"""Code as a TorchRL environment."""


def generated_rows(split: str = "train") -> list[dict]:
    """Tasks with ``question``, ``tests`` and ``solution``; no held-out one is among those to train on."""
    if split not in SPLITS:
        raise ValueError(f"code has no split {split!r}; it has {' and '.join(SPLITS)}")
    kinds = [("numbers", _NUMBERS, kind) for kind in OF_NUMBERS] + [("words", _WORDS, kind) for kind in OF_WORDS]
    # Every fifth number of a task is held out, so that each kind is in both splits.
    numbers = [k for k in range(2, 50) if (k % 5 == 0) == (split == "test")]
    rows = []
    for k in numbers:
        for what, first, (asked, program, solve) in kinds:
            if what == "words" and k > 12:
                continue
            random = Random(f"{what}/{asked}/{k}")
            inputs = [_numbers(random) if what == "numbers" else _words(random) for _ in range(TESTS)]
            rows.append(
                {
                    "question": f"Read {what} from one line, separated by spaces, and {asked.format(k=k)}.",
                    "tests": [{"input": " ".join(map(str, items)), "output": str(solve(items, k))} for items in inputs],
                    "solution": first + program.format(k=k),
                }
            )
    Random(split).shuffle(rows)
    return rows


def _numbers(random: Random) -> list[int]:
    return [random.randint(1, 99) for _ in range(random.randint(3, 8))]


def _words(random: Random) -> list[str]:
    return ["".join(random.choices("abcdefgh", k=random.randint(1, 14))) for _ in range(random.randint(3, 8))]
