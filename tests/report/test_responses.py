import pytest

from grpo_rl.monitor.completions import CompletionsLog
from grpo_rl.monitor.step_parts import StepParts
from grpo_rl.report import responses
from tests.report.runs import response as row
from tests.report.runs import write_tokens


def test_a_small_run_is_there_whole_in_the_order_of_the_run(tmp_path):
    log = CompletionsLog(tmp_path)
    log.log(2, [row(7, 1.0), row(7, 0.0, "5", truncated=True)])
    log.log(1, [row(3, 0.5), row(3, 0.5), row(4, 0.25), row(4, 2.0)])
    data = responses.build(tmp_path)
    places = [(group["step"], group["id"], group["row"]) for group in data["groups"]]
    assert places == [(1, 3, 13), (1, 4, 14), (2, 7, 17)]
    assert (data["all_responses"], data["all_groups"]) == (6, 3)
    last = data["groups"][2]["responses"][1]
    assert (last["text"], last["reward"], last["truncated"], last["version"]) == ("5", 0.0, True, 3)
    assert last["parts"] == {"correct": 0.0} and data["groups"][2]["gold"] == "4"


def test_a_large_run_is_shown_in_evenly_spaced_groups_within_its_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(responses, "RESPONSES", 40)
    monkeypatch.setattr(responses, "BYTES", 3000)
    log = CompletionsLog(tmp_path)
    for step in range(1, 42):
        log.log(step, [row(10 * step + g, step / 1000, "x" * 500) for g in (0, 1) for _ in range(2)])
    write_tokens(tmp_path, 13, [["x"]], group_id=130)
    data = responses.build(tmp_path)
    groups = [(group["step"], group["id"]) for group in data["groups"]]
    # 40 responses are 20 groups of two, of 82; one of them is recorded token by token.
    assert len(groups) == 20 and groups == sorted(groups) and {(1, 10), (13, 130), (41, 411)} < set(groups)
    assert (data["all_groups"], data["all_responses"]) == (82, 164)
    texts = [response for group in data["groups"] for response in group["responses"]]
    assert len(texts) == 40 and all(len(response["text"]) + response["cut"] == 500 for response in texts)
    assert sum(len(response["text"]) for response in texts) <= 2000


def test_a_conversation_comes_in_turns_and_is_cut_as_a_whole(tmp_path, monkeypatch):
    log = CompletionsLog(tmp_path)
    said = "Calculator: 2+2\ntool\n4\nassistant\n<answer>4"
    log.log(1, [row(1, 1.0, said, turn_ends=[15, 33, 42]), row(1, 0.0, "no", turn_ends=[2])])
    first, second = responses.build(tmp_path)["groups"][0]["responses"]
    assert first["turns"] == ["Calculator: 2+2", "\ntool\n4\nassistant\n", "<answer>4"]
    assert second["turns"] == ["no"]
    monkeypatch.setattr(responses, "LONGEST", 20)
    first = responses.build(tmp_path)["groups"][0]["responses"][0]
    assert first["turns"] == ["Calculator: 2+2", "\ntool", ""] and first["cut"] == len(said) - 20


def test_control_characters_of_a_response_are_left_out(tmp_path):
    CompletionsLog(tmp_path).log(1, [row(1, 1.0, "\x1b[2Jred\u202e"), row(1, 0.0, "\ud800")])
    texts = [response["text"] for response in responses.build(tmp_path)["groups"][0]["responses"]]
    assert texts == ["red", "?"]


def test_a_damaged_part_is_left_out_by_its_name(tmp_path):
    log, parts = CompletionsLog(tmp_path), StepParts(tmp_path / "completions.parquet")
    for step in (1, 2):
        log.log(step, [row(step, 1.0), row(step, 0.0)])
    parts.path(1).write_bytes(b"PAR1")
    data = responses.build(tmp_path)
    assert [group["id"] for group in data["groups"]] == [2] and "part-00000001.parquet" in data["unread"][0]
    parts.path(2).write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="part-00000002.parquet"):
        responses.build(tmp_path)
