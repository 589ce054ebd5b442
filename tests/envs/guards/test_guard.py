"""One scorer's accident costs one response, is counted by kind and named, and too many stop the run."""

import importlib
import math
import threading
import time

import pytest

from grpo_rl.envs.base import Reward, ScoreError, ScoreGuard, Task, Unjudgeable
from grpo_rl.envs.countdown import Countdown
from grpo_rl.envs.guards import guard as guard_module
from grpo_rl.envs.task import raised

ODD = {"nothing": None, "text": "12", "big": [Reward({"good": 10**400})] * 2, "more": [Reward({"good": 1e39})] * 2,
       "unnamed": [Reward(None), Reward({"good": [1.0]})], "short": [Reward({"good": 1.0})]}  # fmt: skip
RESULTS = {"nan": Reward({"good": math.nan}), "text": Reward({"good": "much"}), "parts": Reward({"bad": 1.0}),
           "none": None, "raise": KeyError("gold"), "gold": Unjudgeable("the gold answer is empty")}  # fmt: skip


class Judge(Task):
    """Judges by the response's first word."""

    rows = ()
    reward_parts = ("good",)

    def prompt(self, row):
        return []

    def score(self, row, response):
        if response == "hang":
            threading.Event().wait(30)
        return raised(RESULTS.get(response.split()[0], Reward({"good": True})))


class Together(Judge):
    def score_many(self, rows, responses):
        if responses[0] == "exit":
            raise SystemExit(3)
        if responses[0] in ODD:
            return ODD[responses[0]]
        if responses[0] == "hang":
            threading.Event().wait(30)
        return [Reward({"good": float(len(text))}) if text != "raise" else KeyError("gold") for text in responses]


def guard(task=None, deadline_s=5.0, allowed=1.0):
    return ScoreGuard(task or Judge(), deadline_s, allowed)


def test_each_accident_is_one_typed_failure_and_the_others_keep_their_rewards():
    judge = guard()
    responses = ["fine", "raise x", "nan", "text", "parts", "none", "gold", "fine"]
    results = judge.score({}, responses, "row 7")
    kinds = [getattr(result, "kind", "reward") for result in results]
    assert kinds == ["reward", "error", "invalid", "invalid", "invalid", "invalid", "unjudgeable", "reward"]
    assert results[0] == Reward({"good": 1.0}) and isinstance(results[0].parts["good"], float)
    assert judge.failed == {"error": 1, "invalid": 4, "unjudgeable": 1} and judge.judged == 8
    message = judge.examples["error"]
    assert all(word in message for word in ("Judge", "row 7", "KeyError: 'gold'", "'raise x'"))


@pytest.mark.alone
def test_a_scorer_that_hangs_costs_its_answer_and_the_deadline_only():
    told, judge = [], guard(deadline_s=0.3)
    judge.tell = told.append
    start = time.monotonic()
    results = judge.score({}, ["fine", "hang", "fine", "hang"], "row 0")
    assert [getattr(result, "kind", "reward") for result in results] == ["reward", "timeout", "reward", "timeout"]
    assert time.monotonic() - start < 3
    assert "on row 0: no result within 0.3 s" in results[1].message
    assert len(told) == 1 and results[1].message in told[0]  # the first of its kind


def test_responses_scored_in_one_call_fail_as_one_where_the_call_fails_and_alone_where_one_does():
    judge = guard(Together(), deadline_s=0.3)
    together = [getattr(r, "kind", r) for r in judge.score({}, ["ab", "raise"], "row 0")]
    assert together == [Reward({"good": 2.0}), "error"]
    assert [r.kind for r in judge.score({}, ["hang", "ab"], "row 0")] == ["timeout", "timeout"]
    wrong = judge.score({}, ["short", "ab"], "row 3")
    assert [r.kind for r in wrong] == ["error", "error"] and "1 rewards for 2 responses" in wrong[0].message


@pytest.mark.parametrize(
    ("first", "kind"),
    [("exit", "error"), ("nothing", "error"), ("text", "error"), ("big", "invalid"), ("more", "invalid"),
     ("unnamed", "invalid")],
)  # fmt: skip
def test_whatever_a_scorer_returns_is_a_typed_failure(first, kind):
    results = guard(Together()).score({}, [first, "ab"], "row 0")
    assert [result.kind for result in results] == [kind, kind]


def test_a_reward_lacks_a_part_only_where_the_task_says_that_it_may():
    class Parted(Judge):
        reward_parts = ("good", "short")

        def score(self, row, response):
            return Reward({"good": 1.0} | ({"short": 2.0} if response == "x" else {}))

    whole, lacking = guard(Parted()).score({}, ["x", "long"], "row 0")
    assert whole == Reward({"good": 1.0, "short": 2.0}) and lacking.kind == "invalid"
    Parted.parts_may_lack = True
    assert guard(Parted()).score({}, ["x", "long"], "row 0") == [whole, Reward({"good": 1.0})]


def test_too_many_failures_stop_the_run_with_an_example_of_each_kind():
    judge = guard(allowed=0.1)
    for _ in range(8):  # 8 of the first 80 responses are allowed
        judge.score({}, ["raise"], "row 1")
    with pytest.raises(ScoreError, match=r"9 of 9 responses.*8 error, 1 invalid.*max_failed_fraction=0\.1") as caught:
        judge.score({}, ["nan"], "row 2")
    assert "KeyError" in str(caught.value) and "nan" in str(caught.value)
    with pytest.raises(ScoreError, match="1 of 2"):
        guard(allowed=0.0).score({}, ["fine", "gold"], "row 0")


def test_a_failure_quotes_what_others_wrote_without_secrets_and_what_a_terminal_would_obey():
    failure = guard_module.Failure("error", "the judge says: \x1b[2JAuthorization: Bearer abc")
    assert failure.message == "the judge says: Authorization: Bearer ***"


def test_an_isolated_task_scores_the_same_in_another_process():
    row = {"numbers": [3, 4], "target": 12}
    task, isolated = Countdown([row]), Countdown([row])
    isolated.isolated = True
    responses = ["<answer>3 * 4</answer>", "<answer>3 + 4</answer>", "no"]
    assert guard(isolated, deadline_s=60.0).score(row, responses, "row 0") == guard(task).score(row, responses, "row 0")
    with pytest.raises(ValueError, match="sent to a worker"):
        local = Judge()
        local.isolated, local.unsendable = True, threading.Lock()
        guard(local)


OWN = """
import re
from grpo_rl.envs.task import Reward, Task

class Own(Task):
    rows, reward_parts = (), ("good",)

    def prompt(self, row):
        return []

    def score(self, row, response):
        if response == "raise":
            raise ValueError("two\\nlines")
        if response == "hang":  # in one call that keeps the interpreter to itself
            re.match(r"(a+)+$", "a" * 40 + "b")
        return Reward({"good": 1.0})
"""


@pytest.fixture
def own(written_module):
    return importlib.import_module(written_module("own_scorer", OWN)).Own()


@pytest.mark.parametrize("isolated", [False, True])
def test_what_a_task_raises_is_one_line_with_its_file_and_line_also_from_another_process(own, tmp_path, isolated):
    own.isolated = isolated
    (failure,) = guard(own, deadline_s=60.0).score({}, ["raise"], "row 7")
    place = f"({tmp_path / 'own_scorer.py'}, line 13)"
    assert failure.message == f"Own failed on row 7: ValueError: two lines {place}; the response was 'raise'"


@pytest.mark.slow
def test_an_isolated_scorer_that_keeps_the_interpreter_to_itself_is_killed(own):
    own.isolated = True
    judge = guard(own, deadline_s=2.0)
    judge.score({}, ["fine"], "row 0")  # the worker starts
    results = judge.score({}, ["fine", "hang", "fine"], "row 0")
    assert [getattr(result, "kind", "reward") for result in results] == ["reward", "timeout", "reward"]
