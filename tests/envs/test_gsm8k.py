import pytest

from grpo_rl.envs.base import ScoreGuard, Unjudgeable
from grpo_rl.envs.calculator import Calculator
from grpo_rl.envs.countdown import Countdown
from grpo_rl.envs.grading import patterns
from grpo_rl.envs.gsm8k import GSM8K, load_rows
from grpo_rl.envs.guards.isolation import IsolatedCalls
from grpo_rl.envs.math import Math

ROW = {"question": "What is 50 - 8?", "answer": "50 - 8 = 42\n#### 42"}
IN_FORM = "<reasoning>50 - 8 is 42</reasoning>\n<answer>42</answer>"


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "test"])
def test_each_gold_solution_is_right_and_with_its_number_changed_wrong(real_data, split):
    rows = load_rows(real_data / "gsm8k" / f"{split}.jsonl")
    assert len(rows) == {"train": 7473, "test": 1319}[split]
    task = GSM8K(rows)
    for row in rows:
        steps, _, gold = row["answer"].rpartition("#### ")
        number = int(gold.replace(",", ""))  # every gold number is an integer, as int() itself confirms
        for right in (str(number), f"{number:,}", f"{number}.00", f"${number}", f"**{number}**."):
            assert task.score(row, steps + "#### " + right).parts["correctness"] == 2.0, (row, right)
        assert task.score(row, row["answer"]).parts["correctness"] == 2.0, row
        assert task.gold(row) == str(number)
        changed_digit = str(number)[:-1] + str((int(str(number)[-1]) + 5) % 10)
        wrong = [number + 1, number - 1, f"{number}1", f"{number}.5", f"{number + 1:,}", changed_digit, ""]
        for text in wrong + ([-number] if number else []):
            assert task.score(row, f"{steps}#### {text}").parts["correctness"] == 0.0, (row, text)


def test_the_three_rewards_are_paid_apart():
    task = GSM8K([ROW])
    parts = task.score(ROW, IN_FORM).parts
    assert parts == {"correctness": 2.0, "reasoning_format": 0.5, "answer_format": 0.5}
    assert tuple(parts) == task.reward_parts
    for response, expected in [
        (IN_FORM.replace("<answer>42", "<answer>41"), (0.0, 0.5, 0.5)),
        ("<answer>42</answer>", (2.0, 0.0, 0.5)),
        ("<reasoning>50 - 8 is 42</reasoning> 42", (2.0, 0.5, 0.0)),
        (IN_FORM + " I hope", (2.0, 0.5, 0.0)),
        ("<answer>forty-two</answer>", (0.0, 0.0, 0.0)),
        ("", (0.0, 0.0, 0.0)),
    ]:
        assert tuple(task.score(ROW, response).parts.values()) == expected, response
    with pytest.raises(ValueError, match="answer of row 1 has no number: 'none'"):
        GSM8K([ROW, bare := {"question": "How many?", "answer": "none"}])
    (found,) = GSM8K([]).score_many([bare], ["<answer>42</answer>"])
    assert isinstance(found, Unjudgeable)


@pytest.mark.slow
def test_a_users_pattern_that_backtracks_costs_the_response_it_hangs_on_and_not_the_run(monkeypatch):
    monkeypatch.setattr(patterns, "DEADLINE_S", 1.0)
    patterns._workers.cache_clear()
    task = GSM8K([ROW], reasoning_pattern=r"^(x+x+)+y", answer_pattern=r"\d$")
    guard, told = ScoreGuard(task, max_failed_fraction=1.0), []
    guard.tell = told.append
    results = guard.score(ROW, ["42", "x" * 40, "xxxy 42", "xxxy"], "row 3")
    patterns._workers.cache_clear()
    assert [getattr(result, "total", None) for result in results] == [2.5, None, 3.0, 0.5]
    assert guard.failed == {"timeout": 1} and len(told) == 1
    assert "on row 3" in told[0] and "^(x+x+)+y" in told[0] and f"'{'x' * 40}'" in told[0]


@pytest.mark.alone
def test_texts_that_a_pattern_hangs_on_leave_time_for_the_others(monkeypatch):
    with IsolatedCalls(patterns.search, workers=1) as workers:
        monkeypatch.setattr(patterns, "_workers", lambda _: workers)
        workers.start()
        # At 5 s each, the first three would take all of the time.
        found = patterns.found((r"^(x+x+)+y",), [*["x" * 40] * 4, *["xxy"] * 12], budget_s=12.0)
    assert [isinstance(result, TimeoutError) for result in found] == [True] * 4 + [False] * 12


def test_a_number_in_an_example_is_its_text():
    """YAML reads `answer: 2` as a number; a chat template fails at a content that is no text."""
    numbers = {"question": 1, "problem": 1, "answer": 2, "solution": 2, "response": 2, "call": 2}
    for make in (GSM8K, Math, Calculator, Countdown):
        task = make([], examples=[{**numbers, "numbers": [1, 1], "target": 2}])
        assert all(isinstance(message["content"], str) for message in task._before)


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("#### 8", ["48 / 6 = 8", "#### 8.0"], ["48 / 6 =", "#### 48 / 6", "<answer>\\frac{48}{6}</answer>"]),
        ("#### 1/2", ["#### 2/4", "#### 0.5", "\\boxed{\\frac{1}{2}}"], ["#### 1", "#### 2", "#### 1/3"]),
        ("#### 0.5", ["#### .50", "1 / 2 = 0.5"], ["#### 1/2"]),
    ],
)
def test_a_quotient_is_paid_only_where_the_gold_answer_is_one(gold, right, wrong):
    row, calculator = {"question": "?", "answer": gold}, Calculator([])
    for text in right + wrong:
        paid = 2.0 * (text in right)
        assert GSM8K([]).score(row, text).parts["correctness"] == paid, text
        assert calculator.score(row, text).parts["correctness"] == paid, text
