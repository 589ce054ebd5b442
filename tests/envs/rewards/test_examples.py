from __future__ import annotations

import pytest

from grpo_rl.envs.rewards.examples import reward_len, sentence_ending


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", -20.0), ("x" * 19, -1.0), ("x" * 20, 0.0), ("x" * 21, -1.0), ("x" * 120, -100.0), ("é" * 20, 0.0)],
)
def test_twenty_characters_are_best(text, expected):
    assert reward_len(completion=[text]) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Yes.", 1.0), ("Yes!", 1.0), ("Yes?", 1.0), ("Yes. \n", 1.0), ("Yes", 0.0), ("Yes. So", 0.0), ("Yes,", 0.0),
     ("", 0.0), ("...", 1.0)],
)  # fmt: skip
def test_a_sentence_ends_with_its_mark(text, expected):
    assert sentence_ending(completion=[text]) == [expected]


def test_both_judge_a_batch_and_ignore_other_columns():
    batch = {"prompt": ["a", "b"], "completion": ["x" * 20 + ".", "y"], "title": [1, 2]}
    assert reward_len(**batch) == [-1.0, -19.0]
    assert sentence_ending(**batch) == [1.0, 0.0]
