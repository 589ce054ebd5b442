import itertools
import json
import time

import pytest

from grpo_rl.envs.base import Reward, ScoreGuard, Unjudgeable
from grpo_rl.envs.grading import verification
from grpo_rl.envs.grading.boxed import equal
from grpo_rl.envs.grading.verification import MAX_CHARS, verify
from grpo_rl.envs.guards.isolation import WorkerDied
from grpo_rl.envs.math import Math, load_rows

pytestmark = pytest.mark.slow

ROW = {"problem": "What is 1/4 + 1/4?", "answer": r"\frac{1}{2}"}


class Impatient:
    """Workers of a busy machine: they have no time for some texts, for one only if it is alone, and die of others."""

    workers = 2

    def map(self, pairs, *_):
        return [self._result(*pair, len(pairs)) for pair in pairs]

    def _result(self, gold, answer, together):
        if "slow" in f"{gold} {answer}" or (answer == "1+x" and together > 1):
            return TimeoutError("no result within 5 s")
        if signal := {"killed": "SIGKILL", "deadly": "SIGSEGV"}.get(answer):
            return WorkerDied(f"twice, of {signal}", signal)
        return equal(gold, answer)


def test_what_takes_too_long_is_wrong_and_counted_unless_it_is_the_gold_answer_or_a_machine_that_is_busy(monkeypatch):
    monkeypatch.setattr(verification, "_workers", lambda *_: Impatient())
    row = {"problem": "?", "answer": "x+1"}
    texts = [r"\boxed{killed}", r"\boxed{slow}", r"\boxed{deadly}", r"\boxed{1+x}", "no box"]
    guard = ScoreGuard(Math([row]), max_failed_fraction=1.0)
    killed, *rewards = guard.score(row, texts, "row 0")
    assert killed.kind == "error" and "SIGKILL" in killed.message and guard.failed == {"error": 1}
    assert [reward.parts["correctness"] for reward in rewards] == [0.0, 0.0, 1.0, 0.0]
    assert [reward.measures["timed_out"] for reward in rewards] == [1.0, 1.0, 0.0, 0.0]
    assert verify("x+1", r"\boxed{slow}") is False
    row = {"problem": "?", "answer": "slow"}
    assert isinstance(Math([row]).score_many([row], [r"\boxed{x+1}"])[0], Unjudgeable)


def test_the_comparisons_of_a_group_share_its_time(monkeypatch):
    given = []

    class Slow(Impatient):
        def map(self, pairs, deadline_s=5.0, budget_s=60.0):
            given.append((len(pairs), deadline_s, budget_s))
            return super().map(pairs)

    monkeypatch.setattr(verification, "_workers", lambda *_: Slow())
    row = {"problem": "?", "answer": "x+1"}
    texts = [rf"\boxed{{slow {n}}}" for n in range(64)]
    ScoreGuard(Math([row]), deadline_s=60.0, max_failed_fraction=1.0).score(row, texts, "row 0")
    (calls, deadline_s, budget_s), *alone, _ = given
    assert calls == 64 and deadline_s * 64 / Slow.workers < budget_s < 60
    assert [calls for calls, *_ in alone] == [1] * 64 and sum(deadline_s for _, deadline_s, _ in alone[:1]) < 5


def test_all_500_gold_solutions_verify(real_data):
    rows = load_rows(real_data / "math500" / "math500.json")
    assert len(rows) == 500
    rewards = Math(rows).score_many(rows, [row["solution"] for row in rows])
    assert [row["answer"] for row, reward in zip(rows, rewards, strict=True) if reward.total != 1.1] == []
    # And none verifies where the problem is another: the next one, unless it happens to have the same answer.
    # "x=5" answers a question for x as "5" does.
    pairs = [
        (row, other)
        for row, other in itertools.pairwise(rows)
        if row["answer"].removeprefix("x=") != other["answer"].removeprefix("x=")
    ]
    assert len(pairs) > 480
    rewards = Math(rows).score_many([row for row, _ in pairs], [other["solution"] for _, other in pairs])
    assert [pair for pair, reward in zip(pairs, rewards, strict=True) if reward.total != 0.1] == []


def test_a_gold_answer_that_cannot_be_parsed_judges_no_response():
    for gold in ("", "  ", r"\boxed{}", "9" * (MAX_CHARS + 1)):
        assert verify(gold, r"\boxed{5}") is None
        assert verify(gold, "no box") is None
    with pytest.raises(Unjudgeable, match="gold answer '' can't be parsed"):
        Math([]).score({"problem": "?", "solution": "I don't know."}, r"\boxed{5}")


def test_an_answer_left_as_work_to_do_is_equal_to_no_other():
    answers = [r"\sum_{k=1}^{10000}\frac1k", "3", r"\frac{6}{2}", "10^{10^{10}}", "4"]
    found = Math([]).final_answers([rf"\boxed{{{answer}}}" for answer in answers])
    assert found == [answers[0], "3", "3", *answers[3:]]


def test_the_two_rewards_are_paid_apart():
    task = Math([ROW])
    for response, expected in [
        (r"It is $\boxed{\frac{2}{4}}$.", (1.0, 0.1)),
        (r"It is $\boxed{2}$.", (0.0, 0.1)),
        (r"It is $\boxed{))}$.", (0.0, 0.1)),
        (r"It is $\frac{1}{2}$.", (0.0, 0.0)),
        (r"It is $\boxed{\frac{1}{2}$.", (0.0, 0.0)),
        ("", (0.0, 0.0)),
    ]:
        parts = task.score(ROW, response).parts
        assert tuple(parts) == task.reward_parts and tuple(parts.values()) == expected, response
    weighted = Math([ROW], correctness=2, answer_format=-0.5)
    assert weighted.score(ROW, r"\boxed{0.5}").parts == {"correctness": 2.0, "answer_format": -0.5}


def test_a_batch_is_judged_as_its_answers_are_alone():
    golds = [r"\frac{1}{2}", "42", "", "(3,4]"]
    answers = [r"\boxed{0.5}", r"\boxed{42}", r"\boxed{41}", "none", r"\boxed{(3, 4]}"]
    rows = [{"problem": "?", "answer": gold} for gold in golds for _ in answers]
    responses = answers * len(golds)
    task = Math([])
    for row, response, result in zip(rows, responses, task.score_many(rows, responses), strict=True):
        if row["answer"]:
            assert result == task.score(row, response)
        else:
            assert isinstance(result, Unjudgeable)


def test_the_gold_answer_is_the_answer_or_the_solutions_last_box():
    task = Math([])
    assert task.gold({"problem": "?", "answer": "5", "solution": r"\boxed{6}"}) == "5"
    assert task.gold({"problem": "?", "solution": r"\boxed{5}, so \boxed{6}"}) == "6"
    assert task.gold({"problem": "?", "answer": r"$\boxed{5}$"}) == "5"
    assert task.gold({"problem": "?", "solution": "5"}) is None


def test_rows_are_read_with_either_gold_column_and_numbers_as_answers(tmp_path):
    rows = [ROW, {"problem": "?", "solution": r"\boxed{2}"}, {"problem": "?", "answer": None, "solution": "3"}]
    (file := tmp_path / "rows.json").write_text(json.dumps([*rows, {"problem": "?", "answer": 42}]))
    assert load_rows(file) == [*rows[:2], {"problem": "?", "solution": "3"}, {"problem": "?", "answer": "42"}]
    file.write_text(json.dumps([ROW, {"problem": "?"}]))
    with pytest.raises(ValueError, match=r"row 1 has no answer or solution; its columns are \['problem'\]"):
        load_rows(file)


BOMBS = (
    "9^{9^{9^{9}}}", "9^{9^{9^{9^{9}}}}", "2^{10^{10}}", "10^{10^{100}}", "(10^{9})!", "((100!)!)!", "99999999!!",
    "\\sum_{i=1}^{10^{9}} i^{i}", "\\sum_{i=1}^{\\infty} \\frac{1}{i^{i}}", "\\prod_{n=1}^{10^{8}} n",
    "\\binom{10^{9}}{10^{5}}", "\\int_0^1 x^{x^{x^{x}}} dx", "\\int e^{e^{x^2}} \\sin(x^x) dx",
    "\\lim_{x \\to 0} \\frac{\\sin(\\sin(\\sin x))}{x^{x^x}}", "(x+1)^{10000}", "(a+b+c+d)^{60}(e+f+g+h)^{60}",
    "\\sqrt{\\sqrt{\\sqrt{2+\\sqrt{3+\\sqrt{5+\\sqrt{7+\\sqrt{11}}}}}}}", "0." + "3" * 900, "1" * 900, "1/" * 300 + "1",
    "1e999999999", "10^{-10^{10}}", "x^{x^{x^{x^{x^{x}}}}}", "\\frac{1}{0}", "\\frac{0}{0}", "\\infty - \\infty",
    "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}^{100000}", "\\sin^{1000}(x) + \\cos^{1000}(x)", "\\log_{1}{2}",
    "2^{2^{30}} - 2^{2^{30}} + 1", "(1+\\sqrt{2})^{1000} + (1-\\sqrt{2})^{1000}", "10^{10} \\mod 7^{7^{7}}", "1000000!",
    "\\gcd(10^{50}, 10^{49}+1)", "\\tan(10^{30})", "[" + "0," * 300 + "0]", "\\{" + "x," * 300 + "y\\}",
)  # fmt: skip
BRACKETS = (
    ("{", "}"), ("(", ")"), ("\\frac{1}{", "}"), ("\\sqrt{", "}"), ("\\left(", "\\right)"), ("2^{", "}"), ("-", ""),
    ("\\boxed{", "}"), ("\\sin(", ")"), ("[", "]"), ("|", "|"), ("\\text{", "}"), ("\\{", "\\}"), ("1+(", ")"),
)  # fmt: skip
PIECES = ("1", "a ", "\\boxed{1} ", "\\boxed{", "{", "}", "$", "\\", "\\frac", "答", "\\fbox ", "9^", "\n")
GOLDS = ("\\frac{\\sqrt{3}}{4}", "42", "(-\\infty, 2) \\cup (3, \\infty)", "x^2+2x+1", "\\{1,2\\}", "\\text{even}")


def test_no_hostile_text_hangs_or_crashes_the_judge():
    inside = ["\ud800\U0010ffff\u202e\x001/2"]
    for bomb in BOMBS:
        inside += [bomb, f"{bomb}+7", f"\\frac{{1}}{{{bomb}}}", bomb * 2]
    for opened, closed in BRACKETS:
        for depth in (3, 30, 1000, 100_000):
            inside += [f"{opened * depth}1{closed * left}" for left in (depth, depth - 1, depth // 2, 0)]
    megabytes = [piece * (1_000_000 // len(piece)) for piece in PIECES]
    texts = [f"So it is $\\boxed{{{text}}}$." for text in inside + megabytes]
    for text in megabytes:
        texts += [text, text + "\\boxed{1}", "\\boxed{1}" + text]
    rows = [{"problem": "?", "answer": GOLDS[at % len(GOLDS)]} for at in range(len(texts))]
    start = time.monotonic()
    results = Math([]).score_many(rows, texts)
    assert time.monotonic() - start < 300  # on a machine that does other things too
    assert [text[:200] for text, result in zip(texts, results, strict=True) if not isinstance(result, Reward)] == []
