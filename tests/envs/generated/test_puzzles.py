from __future__ import annotations

from collections import Counter

import pytest

from grpo_rl.envs.countdown import Countdown
from grpo_rl.envs.generated.puzzles import Puzzles, is_held_out
from grpo_rl.envs.grading.expressions import check

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["train", "test"])
def puzzles(request) -> Puzzles:
    return Puzzles(2000, request.param, sizes=(2, 3, 4, 6))


def test_every_puzzle_has_a_solution_that_uses_all_its_numbers(puzzles):
    task = Countdown(puzzles, use_all=True)
    for row in puzzles:
        assert check(row["numbers"], row["target"], row["solution"], use_all=True), row
        # Python's own reading of it, on rows that we made ourselves, is the independent one.
        assert eval(row["solution"]) == row["target"], row
        assert task.score(row, f"<answer>{task.gold(row)}</answer>").total == 1.1


def test_numbers_targets_and_sizes_are_those_asked_for_and_all_operations_occur(puzzles):
    rows = list(puzzles)
    assert {len(row["numbers"]) for row in rows} == {2, 3, 4, 6}
    assert {number for row in rows for number in row["numbers"]} == set(range(1, 100))
    targets = {row["target"] for row in rows}
    assert min(targets) == 1 and max(targets) == 100 and len(targets) > 90
    signs = Counter(sign for row in rows for sign in row["solution"] if sign in "+-*/")
    assert min(signs[sign] for sign in "+-*/") > 100


def test_no_training_puzzle_has_the_numbers_of_a_held_out_one_whatever_the_seeds():
    def seen(split, seed):
        return {tuple(sorted(row["numbers"])) for row in Puzzles(3000, split, sizes=(2, 3), max_number=12, seed=seed)}

    train, test = seen("train", 0) | seen("train", 1), seen("test", 0) | seen("test", 2)
    assert len(train) > 300 and len(test) > 30 and not train & test
    # all sets of two or three of twelve numbers: 78 + 364, so nearly every one was drawn, on one side or the other
    assert len(train | test) > 400 and 0.05 < len(test) / len(train | test) < 0.15
    assert all(is_held_out(numbers[::-1]) for numbers in test)


def test_a_row_depends_on_seed_and_index_alone_and_none_is_stored():
    endless = Puzzles(10**12, seed=3)
    assert len(endless) == 10**12
    assert endless[10**12 - 1] == endless[-1] == endless[10**12 - 1]
    assert endless[5] == Puzzles(6, seed=3)[5] and endless[2:4] == [endless[2], endless[3]]
    assert endless[5] != Puzzles(6, seed=4)[5]
    with pytest.raises(IndexError):
        Puzzles(6)[6]
