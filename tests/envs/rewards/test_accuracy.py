from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from grpo_rl.envs.rewards.text import accuracy
from grpo_rl.envs.task import Unjudgeable

pytestmark = pytest.mark.slow

VERDICTS = {("7", "7"): True, ("7", "8"): False, ("?", "7"): None}


@pytest.fixture
def verifier(monkeypatch):
    fake = SimpleNamespace(verify=lambda gold, response: VERDICTS[gold, response])
    monkeypatch.setitem(sys.modules, "grpo_rl.envs.grading.verification", fake)


def test_a_right_answer_earns_one_and_a_wrong_one_nothing(verifier):
    assert accuracy("7", "7") == 1.0
    assert accuracy("8", "7") == 0.0


def test_a_gold_answer_that_is_missing_or_makes_no_sense_is_no_wrong_answer(verifier):
    with pytest.raises(Unjudgeable, match=r"can't be parsed: '\?'"):
        accuracy("7", "?")
    with pytest.raises(Unjudgeable, match="no gold answer"):
        accuracy("7", None)


def test_answers_are_compared_as_mathematics():
    assert accuracy(r"So it is $\boxed{\frac{126}{800}}$.", r"\frac{63}{400}") == 1.0
    assert accuracy(r"So it is $\boxed{\frac{64}{400}}$.", r"\frac{63}{400}") == 0.0
