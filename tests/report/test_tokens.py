from __future__ import annotations

import pyarrow as pa

from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts
from grpo_rl.monitor.token_log import SCHEMA
from grpo_rl.report import tokens


def write(run_dir, step, responses, group_id=7):
    """Tokens of a group, a list of texts for each response: one that begins with ! was read, of one with ? only ids."""
    rows = [
        {
            "step": step,
            "group_id": group_id,
            "response": number,
            "position": position,
            "token_id": 100 + position,
            "text": None if text.startswith("?") else text.removeprefix("!"),
            "special": text.startswith("<|"),
            "trainable": not text.startswith("!"),
            "policy_version": 3 + (position > 0),
            "sampler_log_prob": None if text.startswith("!") else -0.5 - position,
            "log_prob": -0.75 - position,
            "entropy": 1.5,
        }
        for number, texts in enumerate(responses)
        for position, text in enumerate(texts)
    ]
    StepParts(run_dir / TOKENS_FOLDER).write(step, pa.Table.from_pylist(rows, schema=SCHEMA))


def test_a_response_is_there_token_by_token_with_its_numbers(tmp_path):
    write(tmp_path, 4, [["So", " 4", "!\ntool", "<|end|>"]])
    data = tokens.build(tmp_path)
    one = data["responses"][0]
    assert one["texts"] == ["So", " 4", "\ntool", "<|end|>"]
    assert (one["step"], one["group"], one["response"], one["ids"]) == (4, 7, 0, [100, 101, 102, 103])
    assert one["sampler"] == [-0.5, -1.5, None, -3.5] and one["trainer"] == [-0.75, -1.75, -2.75, -3.75]
    assert (one["versions"], one["special"], one["read"]) == ([3, 4, 4, 4], [3], [2])


def test_of_evenly_spaced_steps_there_are_the_first_responses_cut_to_their_first_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "STEPS", 2)
    monkeypatch.setattr(tokens, "TOKENS_OF_RESPONSE", 2)
    for step in (1, 2, 3):
        write(tmp_path, step, [["?"] * 2, *([["a", "b", "c"]] * 5)])
    data = tokens.build(tmp_path)
    assert [(one["step"], one["response"]) for one in data["responses"]] == [
        (step, number) for step in (1, 3) for number in (1, 2, 3, 4)
    ]
    assert data["responses"][0]["ids"] == [100, 101] and data["responses"][0]["cut"] == 1
    assert tokens.recorded_groups(tmp_path) == {(1, 7), (3, 7)}
