from __future__ import annotations

import json

import pytest

from grpo_rl.monitor.completions import CompletionsLog
from grpo_rl.report import responses


def row(group_id, reward, text="4", **more):
    return {
        "group_id": group_id,
        "row": group_id + 10,
        "prompt": f"Prompt {group_id}",
        "completion": text,
        "answer": "4",
        "reward": reward,
        "reward_correct": reward,
        "advantage": 0.0,
        "tokens": len(text),
        "truncated": False,
        "policy_version": 3,
    } | more


def test_a_small_run_is_there_whole_in_the_order_of_the_run(tmp_path):
    log = CompletionsLog(tmp_path)
    log.log(2, [row(7, 1.0), row(7, 0.0, "5", truncated=True)])
    log.log(1, [row(3, 0.5), row(3, 0.5), row(4, 0.25), row(4, 2.0)])
    data = responses.build(tmp_path)
    assert [(group["step"], group["id"], group["row"]) for group in data["groups"]] == [
        (1, 3, 13),
        (1, 4, 14),
        (2, 7, 17),
    ]
    assert (data["all_responses"], data["shown_responses"], data["all_groups"], data["all_steps"]) == (6, 6, 3, 2)
    last = data["groups"][2]["responses"][1]
    assert (last["text"], last["reward"], last["truncated"], last["version"]) == ("5", 0.0, True, 3)
    assert last["parts"] == {"correct": 0.0} and data["groups"][2]["gold"] == "4"


def test_the_best_and_worst_responses_of_the_run_say_where_they_are_and_how_many_are_alike(tmp_path):
    log = CompletionsLog(tmp_path)
    log.log(1, [row(3, 0.5), row(3, 2.0)])
    log.log(2, [row(7, 2.0), row(7, -1.0)])
    data = responses.build(tmp_path)
    assert data["best"][0] == {"group": 0, "response": 1, "reward": 2.0, "alike": 2}  # of equal ones the first
    assert data["best"][1] == {"group": 1, "response": 0, "reward": 2.0, "alike": 2}
    assert data["worst"][0] == {"group": 1, "response": 1, "reward": -1.0, "alike": 1}


@pytest.mark.slow
def test_a_large_run_is_shown_in_evenly_spaced_steps_within_its_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(responses, "RESPONSES", 40)
    monkeypatch.setattr(responses, "BYTES", 3000)
    log = CompletionsLog(tmp_path)
    for step in range(1, 102):
        reward = 9.0 if step == 50 else 1.0
        log.log(
            step, [row(10 * step + g, reward if g == 1 else step / 1000, "x" * 500) for g in (0, 1) for _ in range(2)]
        )
    data = responses.build(tmp_path)
    # 40 responses: two groups a step of two responses give ten steps.
    assert len(data["groups"]) < 30 and (data["all_steps"], data["all_responses"]) == (101, 404)
    steps = sorted({group["step"] for group in data["groups"]})
    assert {1, 101, 50} <= set(steps)  # the ends, and the step of the best response
    assert len(json.dumps(data)) < 25_000
    texts = [response for group in data["groups"] for response in group["responses"]]
    assert all(len(response["text"]) + response["cut"] == 500 and response["cut"] for response in texts)
    assert data == responses.build(tmp_path)


def test_a_conversation_comes_in_turns_and_is_cut_as_a_whole(tmp_path, monkeypatch):
    log = CompletionsLog(tmp_path)
    said = "Calculator: 2+2\ntool\n4\nassistant\n<answer>4"
    log.log(1, [row(1, 1.0, said, turn_ends=[15, 33, 42]), row(1, 0.0, "no", turn_ends=[2])])
    first, second = responses.build(tmp_path)["groups"][0]["responses"]
    assert first["turns"] == ["Calculator: 2+2", "\ntool\n4\nassistant\n", "<answer>4"]
    assert second["turns"] == ["no"] and "text" not in second
    monkeypatch.setattr(responses, "LONGEST", 20)
    first = responses.build(tmp_path)["groups"][0]["responses"][0]
    assert first["turns"] == ["Calculator: 2+2", "\ntool", ""] and first["cut"] == len(said) - 20


def test_control_characters_of_a_response_are_left_out(tmp_path):
    CompletionsLog(tmp_path).log(1, [row(1, 1.0, "\x1b[2Jred\u202e"), row(1, 0.0, "\ud800")])
    texts = [response["text"] for response in responses.build(tmp_path)["groups"][0]["responses"]]
    assert texts == ["red", "?"]
