import math

import pytest

from grpo_rl.envs.rewards.text import cosine, group_length, soft_overlong_punishment


@pytest.mark.parametrize(
    ("lengths", "correct", "expected"),
    [
        ([100, 200, 300], [1, 1, 1], [0.5, 0.0, -0.5]),
        ([100, 200, 300], [0, 0, 0], [0.0, 0.0, -0.5]),
        ([100, 500, 200, 400], [1, 1, 1, 0], [0.5, -0.5, 0.25, -0.25]),
        ([7, 7, 7], [1, 0, 1], [0.0, 0.0, 0.0]),
        ([7], [1], [0.0]),
        ([], [], []),
    ],
)
def test_the_length_of_a_response_is_judged_within_its_group(lengths, correct, expected):
    assert group_length(lengths, [bool(right) for right in correct]) == expected


HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("length", "right", "wrong"),
    [
        # cos(45°) = sqrt(1/2), so 0.5 + 0.25 (1 + cos) and -0.5 - 0.25 (1 + cos).
        (250, 0.75 + 0.25 * HALF, -0.75 - 0.25 * HALF),
        (500, 0.75, -0.75),
        (1000, 0.5, -0.5),
        # The wave does not turn back.
        (1001, 0.5, -0.5),
    ],
)
def test_short_is_best_where_right_and_worst_where_wrong(length, right, wrong):
    assert cosine(length, True) == pytest.approx(right, abs=1e-12)
    assert cosine(length, False) == pytest.approx(wrong, abs=1e-12)


def test_other_values_and_one_for_what_fills_the_context_can_be_set():
    # A right response earns 2 down to 1, a wrong one -10 up to 0, and one that fills the context -10.
    values = {
        "max_len": 100, "max_value_correct": 2.0, "min_value_correct": 1.0, "min_value_wrong": -10.0,
        "max_value_wrong": 0.0, "value_exceeded": -10.0,
    }  # fmt: skip
    right = [cosine(length, True, **values) for length in (0, 50, 99, 100, 101)]
    assert right == [2.0, pytest.approx(1.5), pytest.approx(1.0, abs=1e-3), -10.0, -10.0]
    assert [cosine(length, False, **values) for length in (0, 50, 100)] == [-10.0, pytest.approx(-5.0), -10.0]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, 0.0), (16383, 0.0), (16384, 0.0),
        (16385, -1 / 4096), (17408, -0.25), (18432, -0.5), (20479, -4095 / 4096),
        (20480, -1.0), (20481, -1.0), (100_000, -1.0),
    ],
)  # fmt: skip
def test_the_punishment_grows_over_the_cache_as_in_dapo(length, expected):
    assert soft_overlong_punishment(length, max_len=20480, cache=4096) == expected
