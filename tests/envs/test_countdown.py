from __future__ import annotations

import json
import time
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.envs.utils import check_env_specs

from grpo_rl.data import keys
from grpo_rl.envs.countdown import EXAMPLES, Countdown, CountdownEnv, load_rows
from grpo_rl.envs.generated.puzzles import Puzzles, is_held_out
from grpo_rl.envs.grading.expressions import check

ROW = {"numbers": [44, 19, 35], "target": 98, "solution": "44 + 19 + 35"}

RIGHT = [
    ([44, 19, 35], 98, "44 + 19 + 35"), ([44, 19, 35], 98, "44+19+35"), ([44, 19, 35], 98, " ( 44 + 19 )\n+ 35 "),
    ([8, 3], 5, "8 - 3"), ([8, 3], 24, "3 * 8"), ([8, 4], 2, "8 / 4"), ([5], 5, "5"), ([5], 5, "((5))"),
    # precedence, and from left to right
    ([2, 3, 4], 14, "2 + 3 * 4"), ([2, 3, 4], 20, "(2 + 3) * 4"), ([9, 4, 3], 2, "9 - 4 - 3"),
    ([9, 4, 3], 8, "9 - (4 - 3)"), ([24, 4, 3], 2, "24 / 4 / 3"), ([24, 4, 3], 18, "24 / 4 * 3"),
    ([24, 4, 2], 12, "24 / (4 / 2)"), ([10, 2, 3], 16, "10 + 2 * 3"),
    # exact fractions: 8 / (3 - 8/3) = 8 / (1/3); 5 * (5 - 1/5) = 25 - 1; 6 / (1 - 3/4) = 6 * 4; 1/3 * 3 = 1
    ([3, 3, 8, 8], 24, "8 / (3 - 8/3)"), ([1, 5, 5, 5], 24, "5 * (5 - 1/5)"), ([1, 3, 4, 6], 24, "6 / (1 - 3/4)"),
    ([1, 3, 3], 1, "1/3*3"),
    # signs
    ([8, 3], 5, "-3 + 8"), ([8, 3], 11, "8 - -3"), ([8, 3], 11, "--8 + 3"), ([8, 3], -5, "-(8 - 3)"),
    # at most once: some may be left over, and what is given twice may be used twice
    ([2, 5, 7], 10, "2 * 5"), ([5, 5], 25, "5 * 5"), ([0, 5], 5, "0 + 5"),
]  # fmt: skip

WRONG = [
    # another value
    ([44, 19, 35], 98, "44 + 19 - 35"), ([2, 3, 4], 20, "2 + 3 * 4"), ([7, 2], 3, "7 / 2"), ([1, 3], 0, "1 / 3"),
    ([3, 10], 3, "10 / 3"), ([8, 3], 5, "3 - 8"),
    # other numbers
    ([3, 8], 24, "3 * 8 * 1"), ([5, 2], 25, "5 * 5"), ([44, 19], 98, "98"), ([4, 4], 44, "44"), ([1, 2], 3, "12 - 9"),
    ([7, 11], 1, "7/11 + 4/11"), ([5, 2], 10, "5 * 2 + 0"), ([5, 2], 3, "5 - 2.0"), ([5], 5, "05"), ([5], 5, "5.0"),
    # no expression
    ([5], 5, ""), ([5], 5, "   "), ([5], 5, "five"), ([5, 2], 7, "5 + 2 = 7"), ([5, 2], 7, "7 = 5 + 2"),
    ([5, 2], 7, "5 + "), ([5, 2], 7, "5 2 +"), ([5, 2], 7, "(5 + 2"), ([5, 2], 7, "5 + 2)"), ([5, 2], 7, "5 + (2"),
    ([5, 2], 7, "() 5 + 2"), ([5, 2], 10, "5(2)"), ([5, 2], 10, "(5)(2)"), ([5, 2], 10, "5 2"), ([5, 2], 52, "5 2"),
    ([5, 2], 7, "5 + 2;"), ([5, 2], 7, "$5 + 2$"), ([5, 2], 7, "5 + 2 # seven"), ([5, 2], 10, "5 * * 2"),
    ([5, 2], 10, "* 5 2"), ([5, 2], 10, "5 × 2"), ([5, 2], 10, "5 \\times 2"), ([5, 2], 7, "５ + ２"),
    ([5, 2], 7, "٥ + 2"),
    # operators that are none here
    ([5, 2], 25, "5 ** 2"), ([5, 2], 2, "5 // 2"), ([5, 2], 1, "5 % 2"), ([5, 2], 25, "5 ^ 2"), ([5, 2], 20, "5 << 2"),
    ([5, 2], 7, "5 | 2"), ([5, 2], 7, "5 or 2"), ([5], -6, "~5"), ([5, 2], 500, "5e2"), ([5, 2], 7, "0x5 + 2"),
    ([5, 2], 7, "5_ + 2"), ([5, 2], 7, "__import__('os').getpid() * 0 + 7"), ([99, 98, 97], 1, "99**98**97"),
    # division by zero
    ([5, 0], 5, "5 / 0"), ([5, 2, 2], 5, "5 / (2 - 2)"), ([5, 0, 0], 0, "0 * (5 / 0)"),
]  # fmt: skip


@pytest.mark.parametrize(("numbers", "target", "expression"), RIGHT)
def test_an_expression_of_the_numbers_that_equals_the_target_is_right(numbers, target, expression):
    assert check(numbers, target, expression)


@pytest.mark.parametrize(("numbers", "target", "expression"), WRONG)
def test_anything_else_is_wrong(numbers, target, expression):
    assert not check(numbers, target, expression)


def test_each_number_may_be_asked_for_exactly_once():
    assert check([2, 5, 7], 10, "2 * 5") and not check([2, 5, 7], 10, "2 * 5", use_all=True)
    assert check([2, 5, 7], 17, "2 * 5 + 7", use_all=True)
    assert not check([5, 5], 25, "5 * 5 * 5 / 5", use_all=True)
    assert check([5, 5], 25, "5 * 5", use_all=True)


@st.composite
def expressions(draw) -> tuple[str, Fraction | None, list[int]]:
    """Text, value (None: a division by zero) and numbers, put together from below: nothing here reads an expression."""
    parts = [(str(n), Fraction(n), [n]) for n in draw(st.lists(st.integers(0, 999), min_size=1, max_size=9))]
    while len(parts) > 1:
        (left, x, before), (right, y, after), *parts = parts
        sign, space = draw(st.sampled_from("+-*/")), draw(st.sampled_from(["", " ", "\n"]))
        if x is None or y is None or (sign == "/" and y == 0):
            value = None
        else:
            value = {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else None}[sign]
        negative = draw(st.booleans())
        text = f"{'-' if negative else ''}({left}{space}{sign}{space}{right})"
        parts.append((text, -value if negative and value is not None else value, before + after))
    return parts[0]


@given(expressions())
def test_a_random_expression_has_the_value_that_fractions_give(expression):
    text, value, numbers = expression
    if value is None:
        assert not check(numbers, 0, text)
    elif value.denominator == 1:
        assert check(numbers, int(value), text, use_all=True)
        assert not check(numbers, int(value) + 1, text)
    else:
        assert not check(numbers, int(value), text) and not check(numbers, int(value) + 1, text)
    if value is not None and value.denominator == 1:
        assert not check(numbers[1:], int(value), text)
        assert check(numbers + [7], int(value), text) and not check(numbers + [7], int(value), text, use_all=True)


@given(st.text(alphabet="0123456789+-*/() ", max_size=30))
def test_no_text_of_digits_and_signs_makes_it_fail(text):
    assert check([1, 2, 3], 6, text) in (True, False)


@given(st.text())
def test_no_text_makes_it_fail(text):
    assert Countdown([]).score(ROW, f"<answer>{text}</answer>").total <= 1.1


@pytest.mark.parametrize(
    "piece", ["(", ")", "-", "1", "1+", "1/", "9*", " ", "<answer>", "</answer>", "<answer>(", "99**", "²"]
)
def test_a_megabyte_of_anything_takes_time_linear_in_it(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    for hostile in (text, f"<answer>{text}</answer>", f"<answer>{text[:250]}</answer>"):
        assert Countdown([]).score(ROW, hostile).parts["correctness"] == 0.0
    assert time.process_time() - start < 5


def test_depth_and_length_are_bounded_and_what_is_usual_is_far_inside():
    assert check([5], 5, "(" * 32 + "5" + ")" * 32)
    assert not check([5], 5, "(" * 33 + "5" + ")" * 33)
    assert check([5], 5, "5" + " " * 1000)  # spaces around it don't count
    assert check([5], 5, "-" * 254 + "5") and not check([5], 5, "-" * 256 + "5")


def test_the_two_rewards_are_paid_apart():
    task = Countdown([ROW])
    for response, expected in [
        ("<think>63 + 35</think> <answer>44 + 19 + 35</answer>", (1.0, 0.1)),
        ("<answer>44 + 19 - 35</answer>", (0.0, 0.1)),
        ("<answer>44 + 19 + 35 = 98</answer>", (0.0, 0.0)),
        ("<answer>44 / 0</answer>", (0.0, 0.0)),
        ("<answer></answer>", (0.0, 0.0)),
        ("44 + 19 + 35", (0.0, 0.0)),
        ("<answer>44 + 19 + 35", (0.0, 0.0)),
        # the last answer counts
        ("<answer>98</answer> no, <answer>44 + 19 + 35</answer>", (1.0, 0.1)),
        ("<answer>44 + 19 + 35</answer> no, <answer>98</answer>", (0.0, 0.1)),
        ("<answer>44 + 19 + 35</answer> or <answer>98", (1.0, 0.1)),
        ("", (0.0, 0.0)),
    ]:
        parts = task.score(ROW, response).parts
        assert tuple(parts) == task.reward_parts and tuple(parts.values()) == expected, response


def test_weights_and_the_rule_come_from_the_config():
    two = "<answer>44 - 19</answer>"
    row = {"numbers": [44, 19, 35], "target": 25}
    assert Countdown([], correctness=2, answer_format=-1.5).score(row, two).parts == {
        "correctness": 2.0, "answer_format": -1.5
    }  # fmt: skip
    task = Countdown([row], use_all=True, system_prompt=None, examples=[])
    assert task.score(row, two).parts["correctness"] == 0.0
    [message] = task.prompt(row)
    assert "44, 19, 35" in message["content"] and "25" in message["content"] and "exactly once" in message["content"]
    assert "at most once" in Countdown([row]).prompt(row)[-1]["content"]


def test_examples_are_right_by_the_rule_and_shown_as_earlier_turns():
    assert not any(is_held_out(example["numbers"]) for example in EXAMPLES)
    example = {"numbers": [4, 6], "target": 24, "response": "<answer>4 * 6</answer>"}
    messages = Countdown([ROW], examples=[example]).prompt(ROW)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert "4, 6" in messages[1]["content"] and messages[2]["content"] == "<answer>4 * 6</answer>"
    Countdown([], use_all=True)
    with pytest.raises(ValueError, match=r"examples\[1\] is wrong: '4 \+ 6' is no way to 24 with each of .* at most"):
        Countdown([], examples=[example, {**example, "response": "<answer>4 + 6</answer>"}])
    with pytest.raises(ValueError, match="exactly once"):
        Countdown([], use_all=True, examples=[{**example, "numbers": [4, 6, 1]}])
    with pytest.raises(ValueError, match=r"env\.examples\[0\]: numbers is None"):
        Countdown([], examples=[{"target": 24, "response": "24"}])
    with pytest.raises(ValueError, match=r"env\.examples\[0\] has no text response; its columns are"):
        Countdown([], examples=[{"numbers": [4, 6], "target": 24}])


# ---- the data ----


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
    assert len(train | test) > 400


def test_a_tenth_of_all_sets_of_numbers_is_held_out_in_any_order():
    sets = [[a, b, c] for a in range(1, 31) for b in range(a, 31) for c in range(b, 31)]
    held_out = [numbers for numbers in sets if is_held_out(numbers)]
    assert 0.08 < len(held_out) / len(sets) < 0.12
    assert all(is_held_out(numbers[::-1]) for numbers in held_out)


def test_a_row_depends_on_seed_and_index_alone_and_none_is_stored():
    endless = Puzzles(10**12, seed=3)
    assert len(endless) == 10**12
    assert endless[10**12 - 1] == endless[-1] == endless[10**12 - 1]
    assert endless[5] == Puzzles(6, seed=3)[5] and endless[2:4] == [endless[2], endless[3]]
    assert endless[5] != Puzzles(6, seed=4)[5]
    with pytest.raises(IndexError):
        Puzzles(6)[6]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "count=0"),
        ({"split": "validation"}, "no split 'validation'; it has train and test"),
        ({"sizes": (1, 3)}, r"sizes=\[1, 3\]"),
        ({"sizes": ()}, r"sizes=\[\]"),
        ({"max_number": 3}, "max_number=3"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Puzzles(**{"count": 5, **settings})


def test_a_weight_that_is_no_number_is_named():
    with pytest.raises(ValueError, match=r"env\.reward\.correctness=nan"):
        Countdown([ROW], correctness=float("nan"))


def test_a_file_of_puzzles_is_read_with_the_names_that_others_use(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"nums": [1, 2], "target": 3}) + "\n" + json.dumps({"numbers": [4], "target": 4}))
    assert load_rows(file) == [{"numbers": [1, 2], "target": 3}, {"numbers": [4], "target": 4}]
    # What a config says of generated puzzles is not about those of a file.
    assert load_rows(file, puzzles={"count": 3}) == load_rows(file)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"target": 3}', r"row 0: numbers is None"),
        ('{"numbers": [1, "2"], "target": 3}', r"row 0: numbers is \[1, '2'\]"),
        ('{"numbers": [1, -2], "target": 3}', r"none negative"),
        ('{"numbers": [], "target": 3}', r"row 0: numbers is \[\]"),
        ('{"numbers": [1, 2]}', r"row 0: target is None"),
        ('{"numbers": [1, 2], "target": 1.5}', r"row 0: target is 1\.5"),
        ("{oops", r"line 1 is not JSON"),
    ],
)
def test_a_broken_file_is_named_with_its_place(tmp_path, row, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(row)
    with pytest.raises(ValueError, match=message):
        load_rows(file)


def test_the_environment_scores_what_a_policy_samples(tokenizer):
    env = CountdownEnv(2, 2, tokenizer, puzzles={"count": 2}, system_prompt=None)
    check_env_specs(env)
    solutions = {index: row["solution"] for index, row in enumerate(env.task.rows)}

    def policy(tensordict):
        for at, row in enumerate(tensordict.unbind(0)):
            text = f"<answer>{solutions[int(row[keys.ROW])]}</answer>" if at % 2 else "<answer>1</answer>"
            row[keys.TOKENS_RESPONSE] = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
        return tensordict

    rollout = env.rollout(max_steps=1, policy=policy)
    assert rollout[keys.REWARD].flatten().tolist() == pytest.approx([0.1, 1.1, 0.1, 1.1])


def test_4096_answers_are_scored_in_two_seconds():
    puzzles = Puzzles(512)
    task = Countdown(puzzles)
    rows = [row for row in puzzles for _ in range(8)]
    responses = [f"<think>{'Let me see. ' * 50}</think><answer>{row['solution']}</answer>" for row in rows]
    start = time.process_time()
    rewards = task.score_many(rows, responses)
    assert time.process_time() - start < 2
    assert [reward.total for reward in rewards] == [1.1] * 4096
