from __future__ import annotations

import json

import pytest

from grpo_rl.envs.countdown import EXAMPLES, Countdown, load_rows
from grpo_rl.envs.generated.puzzles import is_held_out

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


# ---- the data ----


def test_a_file_of_puzzles_is_read_with_the_names_that_others_use(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"nums": [1, 2], "target": 3}) + "\n" + json.dumps({"numbers": [4], "target": 4}))
    assert load_rows(file) == [{"numbers": [1, 2], "target": 3}, {"numbers": [4], "target": 4}]
    # What a config says of generated puzzles is not about those of a file.
    assert load_rows(file, puzzles={"count": 3}) == load_rows(file)
    file.write_text('{"numbers": [1, "2"], "target": 3}')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: numbers is \[1, '2'\]"):
        load_rows(file)
