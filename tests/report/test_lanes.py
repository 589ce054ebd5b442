from __future__ import annotations

from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.monitor.sampling_log import SamplingLog
from grpo_rl.report import lanes, sample


def step(sample=1.0, train=2.0, **more):
    return {"time/sample_s": sample, "time/train_s": train, "time/sync_s": 0.5, "time/other_s": 0.5} | more


def test_a_step_begins_where_its_phases_before_its_end_begin(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(0, {"eval/reward": 0.5, "time/at_s": 10.0, "time/evaluate_s": 2.0})
    log.log(1, step() | {"time/at_s": 17.0, "time/evaluate_s": 3.0})
    log.log(2, step(sample=4.0) | {"time/at_s": 30.0})
    data = lanes.build(tmp_path)
    assert data["phases"] == ["sample", "train", "sync", "other"]  # those that took any time
    assert [(one["step"], one["begun"]) for one in data["steps"]] == [(1, 13.0), (2, 23.0)]  # 17 - 4, 30 - 7
    assert data["steps"][1]["phases"] == [4.0, 2.0, 0.5, 0.5]
    assert data["evaluations"] == [[0, 10.0, 2.0], [1, 17.0, 3.0]] and not data["assumed"]


def test_neighbours_of_very_many_steps_are_put_together(tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "MAX_POINTS", 2)
    log = MetricsLog(tmp_path)
    for number in (1, 2, 3, 4):
        more = {"staleness/mean": 0.5 * number, "staleness/max": number, "groups/open": number, "time/evaluate_s": 1.0}
        log.log(number, step() | more | {"time/at_s": 10.0 * number})
    data = lanes.build(tmp_path)
    # Each step takes 4 s and begins 4 s before its end, which is where its evaluation begins.
    assert data["steps"] == [
        {"first": 1, "step": 2, "begun": 6.0, "phases": [2.0, 4.0, 1.0, 1.0], "stale": [0.75, 2], "open": 2},
        {"first": 3, "step": 4, "begun": 26.0, "phases": [2.0, 4.0, 1.0, 1.0], "stale": [1.75, 4], "open": 4},
    ]
    assert data["evaluations"] == [[2, 10.0, 2.0], [4, 30.0, 2.0]]


def test_a_run_that_did_not_record_when_steps_ended_has_them_one_after_the_other(tmp_path):
    log = MetricsLog(tmp_path)
    for number in (1, 2, 3):
        log.log(number, step())
    data = lanes.build(tmp_path)
    assert [one["begun"] for one in data["steps"]] == [0.0, 4.0, 8.0] and data["assumed"]


def test_engines_have_the_number_of_groups_in_flight(tmp_path):
    log, sampling = MetricsLog(tmp_path), SamplingLog(tmp_path)
    log.log(
        1,
        {
            "time/wait_s": 1.0,
            "time/train_s": 2.0,
            "time/at_s": 5.0,
            "staleness/mean": 0.5,
            "staleness/max": 2.0,
            "groups/open": 6,
        },
    )
    common = {"engine": "engine 0", "policy_version": 0}
    sampling.write(
        1,
        [
            common | {"group_id": 0, "begun_s": 1.0, "ended_s": 3.0},
            common | {"group_id": 1, "begun_s": 1.0, "ended_s": 4.0},
        ],
    )
    sampling.write(2, [common | {"group_id": 2, "begun_s": 3.0, "ended_s": 9.0, "engine": "engine 1"}])
    data = lanes.build(tmp_path)
    assert data["engines"] == [
        {"name": "engine 0", "groups": 2, "curve": [[1.0, 2], [3.0, 1], [4.0, 0]]},
        {"name": "engine 1", "groups": 1, "curve": [[3.0, 1], [9.0, 0]]},
    ]
    assert data["steps"][0]["stale"] == [0.5, 2.0] and data["steps"][0]["open"] == 6


def test_a_long_curve_keeps_the_most_of_each_stretch(monkeypatch):
    monkeypatch.setattr(lanes, "POINTS", 4)
    # Eight seconds in four stretches; one group of half a second in each but the third, where there are three.
    changes = {0.0: 1, 0.5: -1, 2.0: 1, 2.5: -1, 4.0: 1, 4.1: 2, 4.2: -3, 6.0: 1, 8.0: -1}
    assert lanes.curve(changes) == [[0.0, 1], [2.0, 1], [4.0, 3], [6.0, 1], [8.0, 0]]


def test_a_run_without_training_steps_has_no_such_section(tmp_path):
    assert lanes.build(tmp_path) is None
    MetricsLog(tmp_path).log(0, {"eval/reward": 0.5})
    assert lanes.build(tmp_path) is None
