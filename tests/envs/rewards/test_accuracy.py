from __future__ import annotations

import pytest

from grpo_rl.envs.rewards.text import accuracy
from grpo_rl.envs.task import Unjudgeable

pytestmark = pytest.mark.slow


def test_answers_are_compared_as_mathematics():
    assert accuracy(r"So it is $\boxed{\frac{126}{800}}$.", r"\frac{63}{400}") == 1.0
    assert accuracy(r"So it is $\boxed{\frac{64}{400}}$.", r"\frac{63}{400}") == 0.0


@pytest.mark.parametrize(("gold", "why"), [("", "can't be parsed"), (None, "no gold answer")])
def test_a_gold_answer_that_is_missing_or_makes_no_sense_is_no_wrong_answer(gold, why):
    with pytest.raises(Unjudgeable, match=why):
        accuracy(r"\boxed{7}", gold)
