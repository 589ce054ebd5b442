import json
from collections import Counter

import pytest

from grpo_rl.envs.countdown import EXAMPLES, Countdown, Puzzles, check, is_held_out, load_rows

ROW = {"numbers": [44, 19, 35], "target": 98, "solution": "44 + 19 + 35"}


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


def test_examples_are_right_by_the_rule_and_shown_as_earlier_turns():
    assert not any(is_held_out(example["numbers"]) for example in EXAMPLES)
    example = {"numbers": [4, 6], "target": 24, "response": "<answer>4 * 6</answer>"}
    messages = Countdown([ROW], examples=[example]).prompt(ROW)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert "4, 6" in messages[1]["content"] and messages[2]["content"] == "<answer>4 * 6</answer>"
    for shown in EXAMPLES:
        assert Countdown([]).score(shown, shown["response"]).total == 1.1


def test_a_file_of_puzzles_is_read_with_the_names_that_others_use(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"nums": [1, 2], "target": 3}) + "\n" + json.dumps({"numbers": [4], "target": 4}))
    assert load_rows(file) == [{"numbers": [1, 2], "target": 3}, {"numbers": [4], "target": 4}]
    # What a config says of generated puzzles is not about those of a file.
    assert load_rows(file, puzzles={"count": 3}) == load_rows(file)
    file.write_text('{"numbers": [1, "2"], "target": 3}')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: numbers is \[1, '2'\]"):
        load_rows(file)


@pytest.fixture(scope="module", params=["train", "test"])
def puzzles(request) -> Puzzles:
    return Puzzles(2000, request.param, sizes=(2, 3, 4, 6))


@pytest.mark.slow
def test_every_puzzle_has_a_solution_that_uses_all_its_numbers(puzzles):
    task = Countdown(puzzles, use_all=True)
    for row in puzzles:
        assert check(row["numbers"], row["target"], row["solution"], use_all=True), row
        # Python's own reading of it, on rows that we made ourselves, is the independent one.
        assert eval(row["solution"]) == row["target"], row
        assert task.score(row, f"<answer>{task.gold(row)}</answer>").total == 1.1


@pytest.mark.slow
def test_numbers_targets_and_sizes_are_those_asked_for_and_all_operations_occur(puzzles):
    rows = list(puzzles)
    assert {len(row["numbers"]) for row in rows} == {2, 3, 4, 6}
    assert {number for row in rows for number in row["numbers"]} == set(range(1, 100))
    targets = {row["target"] for row in rows}
    assert min(targets) == 1 and max(targets) == 100 and len(targets) > 90
    signs = Counter(sign for row in rows for sign in row["solution"] if sign in "+-*/")
    assert min(signs[sign] for sign in "+-*/") > 100


@pytest.mark.slow
def test_no_training_puzzle_has_the_numbers_of_a_held_out_one_whatever_the_seeds():
    def seen(split, seed):
        return {tuple(sorted(row["numbers"])) for row in Puzzles(3000, split, sizes=(2, 3), max_number=12, seed=seed)}

    train, test = seen("train", 0) | seen("train", 1), seen("test", 0) | seen("test", 2)
    assert len(train) > 300 and len(test) > 30 and not train & test
    endless = Puzzles(10**12, seed=3)  # none is stored
    assert endless[-1] == endless[10**12 - 1] and endless[5] == Puzzles(6, seed=3)[5] != Puzzles(6, seed=4)[5]
    # all sets of two or three of twelve numbers: 78 + 364, so nearly every one was drawn, on one side or the other
    assert len(train | test) > 400 and 0.05 < len(test) / len(train | test) < 0.15
    assert all(is_held_out(numbers[::-1]) for numbers in test)
