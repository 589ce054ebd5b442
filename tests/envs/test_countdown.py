from __future__ import annotations

import json
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.envs.utils import check_env_specs

from grpo_rl.data import keys
from grpo_rl.envs.countdown import EXAMPLES, Countdown, CountdownEnv, load_rows
from grpo_rl.envs.generated.puzzles import Puzzles, is_held_out

ROW = {"numbers": [44, 19, 35], "target": 98, "solution": "44 + 19 + 35"}


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
    for shown in EXAMPLES:
        assert Countdown([]).score(shown, shown["response"]).total == 1.1


# ---- the data ----


def test_a_wrong_setting_is_named():
    with pytest.raises(ValueError, match=r"env\.reward\.correctness=nan"):
        Countdown([ROW], correctness=float("nan"))
    with pytest.raises(ValueError, match=r"env\.examples\[0\] has no response"):
        Countdown([ROW], examples=[ROW])


def test_a_file_of_puzzles_is_read_with_the_names_that_others_use(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"nums": [1, 2], "target": 3}) + "\n" + json.dumps({"numbers": [4], "target": 4}))
    assert load_rows(file) == [{"numbers": [1, 2], "target": 3}, {"numbers": [4], "target": 4}]
    # What a config says of generated puzzles is not about those of a file.
    assert load_rows(file, puzzles={"count": 3}) == load_rows(file)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"target": 3}', r"rows\.jsonl, line 1: numbers is None"),
        ('{"numbers": [1, "2"], "target": 3}', r"rows\.jsonl, line 1: numbers is \[1, '2'\]"),
        ('{"numbers": [1, 2], "target": 1.5}', r"rows\.jsonl, line 1: target is 1\.5"),
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


@pytest.mark.slow
def test_4096_answers_are_scored_in_two_seconds():
    puzzles = Puzzles(512)
    task = Countdown(puzzles)
    rows = [row for row in puzzles for _ in range(8)]
    responses = [f"<think>{'Let me see. ' * 50}</think><answer>{row['solution']}</answer>" for row in rows]
    start = time.process_time()
    rewards = task.score_many(rows, responses)
    assert time.process_time() - start < 2
    assert [reward.total for reward in rewards] == [1.1] * 4096
