from grpo_rl.report import responses
from tests.report.runs import write_tokens


def test_a_response_is_there_token_by_token_with_its_numbers(tmp_path):
    write_tokens(tmp_path, 4, [["So", " 4", "!\ntool", "<|end|>"]])
    data = responses.build_tokens(tmp_path)
    one = data["responses"][0]
    assert one["texts"] == ["So", " 4", "\ntool", "<|end|>"]
    assert (one["step"], one["group"], one["response"], one["ids"]) == (4, 7, 0, [100, 101, 102, 103])
    assert one["sampler"] == [-0.5, -1.5, None, -3.5] and one["trainer"] == [-0.75, -1.75, -2.75, -3.75]
    assert (one["versions"], one["special"], one["read"]) == ([3, 4, 4, 4], [3], [2])


def test_of_evenly_spaced_steps_there_are_the_first_responses_cut_to_their_first_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(responses, "STEPS", 2)
    monkeypatch.setattr(responses, "TOKENS_OF_RESPONSE", 2)
    for step in (1, 2, 3):
        write_tokens(tmp_path, step, [["?"] * 2, *([["a", "b", "c"]] * 5)])
    data = responses.build_tokens(tmp_path)
    assert [(one["step"], one["response"]) for one in data["responses"]] == [
        (step, number) for step in (1, 3) for number in (1, 2, 3, 4)
    ]
    assert data["responses"][0]["ids"] == [100, 101] and data["responses"][0]["cut"] == 1
    assert responses.recorded_groups(tmp_path) == {(1, 7), (3, 7)}
