"""Countdown's puzzles, each with a solution: endless, and held out by their numbers."""

import zlib
from collections.abc import Sequence
from random import Random
from typing import Annotated, Any

from grpo_rl.envs.declared import means
from grpo_rl.envs.generated.chains import COMPUTE

SPLITS = ("train", "test")
HELD_OUT_SHARE = 10  # One in so many sets of numbers is held out.
MAX_TRIES = 100_000

_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2}
_COMPOUND_ON_THE_RIGHT = {"+": 1, "-": 2, "*": 2, "/": 3}  # the weakest operand that needs no brackets there


class Puzzles(Sequence[dict]):
    """``count`` puzzles with a solution, each made when it is asked for: row i depends on the settings and i alone.

    Which sets of numbers are held out is fixed for good, by a checksum of the numbers: no training puzzle has the
    numbers of a held-out one, whatever seeds and counts. Rows of one split may repeat.

    >>> Puzzles(1000)[7] == Puzzles(2000)[7], sorted(Puzzles(1000)[7])
    (True, ['numbers', 'solution', 'target'])
    """

    def __init__(
        self,
        count: int,
        split: str = "train",
        *,
        sizes: Annotated[Sequence[int], means("how many numbers a puzzle has")] = (3, 4),
        max_number: Annotated[int, means("the largest number of a puzzle", ge=1)] = 99,
        max_target: Annotated[int, means("the largest target", ge=1)] = 100,
        seed: Annotated[int, means("seed of the generator")] = 0,
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"countdown has no split {split!r}; it has {' and '.join(SPLITS)}")
        self._count, self._split, self._sizes = count, split, tuple(sizes)
        self._max_number, self._max_target, self._seed = max_number, max_target, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        return self._puzzle(Random(f"{self._seed}/{self._split}/{range(self._count)[index]}"))

    def _puzzle(self, rng: Random) -> dict:
        for _ in range(MAX_TRIES):
            numbers = [rng.randint(1, self._max_number) for _ in range(rng.choice(self._sizes))]
            if is_held_out(numbers) == (self._split == "test"):
                target, solution = _combined(numbers, rng)
                if 1 <= target <= self._max_target:
                    return {"numbers": numbers, "target": target, "solution": solution}
        raise ValueError(f"no puzzle found in {MAX_TRIES} tries; lower max_number or raise max_target")


def is_held_out(numbers: Sequence[int]) -> bool:
    """True if puzzles with these numbers, in any order, are for testing only."""
    return zlib.crc32(repr(sorted(numbers)).encode()) % HELD_OUT_SHARE == 0


def _combined(numbers: Sequence[int], rng: Random) -> tuple[int, str]:
    """All numbers combined in a random way: the value, and the expression.

    Steps are those of pencil and paper, without fractions and negative numbers.
    """
    operands = [(number, str(number), 3) for number in numbers]
    while len(operands) > 1:
        left, right = (operands.pop(rng.randrange(len(operands))) for _ in range(2))
        if left[0] < right[0]:
            left, right = right, left
        divides = right[0] and left[0] % right[0] == 0
        sign = rng.choice("+-*/" if divides else "+-*")
        before = left[1] if left[2] >= _LEVEL[sign] else f"({left[1]})"
        after = right[1] if right[2] >= _COMPOUND_ON_THE_RIGHT[sign] else f"({right[1]})"
        operands.append((COMPUTE[sign](left[0], right[0]), f"{before} {sign} {after}", _LEVEL[sign]))
    value, expression, _ = operands[0]
    return value, expression
