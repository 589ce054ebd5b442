"""Small programming tasks with tests: what a program should print for an input, and a program that prints it."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

SPLITS = ("train", "test")
TESTS = 6
_NUMBERS = "nums = [int(word) for word in input().split()]\n"
_WORDS = "words = input().split()\n"
Kind = tuple[str, str, Callable[[Sequence, int], object]]
"""The end of a question, a program without its first line, and what it prints; ``{k}`` and k are the task's number."""

OF_NUMBERS: tuple[Kind, ...] = (
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
OF_WORDS: tuple[Kind, ...] = (
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
