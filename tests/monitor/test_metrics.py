import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo_rl.data.group import Group
from grpo_rl.monitor.metrics import MetricsLog, memory_limit, memory_metrics, read_metrics, reward_metrics
from grpo_rl.testing import random_group


def group(lengths, rewards, **changes) -> Group:
    return dataclasses.replace(random_group(lengths=lengths, rewards=rewards), **changes)


def test_reward_metrics_weigh_responses_not_groups():
    # Five responses: a mean over groups would give (1 + 2) / 2 instead of (0 + 2 + 1 + 3 + 2) / 5.
    cut_off = torch.tensor([True, False])
    groups = [group([1, 2], [0.0, 2.0], truncated=cut_off), group([3, 4, 5], [1.0, 3.0, 2.0])]
    metrics = reward_metrics(groups)
    assert metrics["reward/mean"] == pytest.approx(8 / 5)
    # Squared distances from 1.6: 2.56 + 0.16 + 0.36 + 1.96 + 0.16 = 5.2; over 5 responses, not 4.
    assert metrics["reward/std"] == pytest.approx(math.sqrt(5.2 / 5))
    assert metrics["response/mean_length"] == 3.0
    assert metrics["response/max_length"] == 5.0
    assert metrics["response/truncated_fraction"] == 1 / 5


def test_a_parts_mean_and_quantiles_are_over_the_responses_that_have_it():
    parts, measures = {"code": torch.tensor([torch.nan, 0.0, 1.0, torch.nan])}, {"recall": torch.tensor([0.5] * 4)}
    one = group([1] * 4, [0.0, 0.0, 1.0, 0.0], reward_parts=parts, measures=measures)
    metrics = reward_metrics([one, group([1], [0.0])])
    assert metrics["reward/code"] == 0.5 and metrics["measure/recall"] == 0.5
    found = [metrics[f"reward_distribution/code/p{p}"] for p in (10, 50, 90)]
    assert found == pytest.approx([0.1, 0.5, 0.9])  # linear between the two


def test_length_and_reward_are_correlated_inside_groups():
    # Each group's longer response earns more by the same rate, though the group of longer responses earns less.
    groups = [group([10, 20], [5.0, 6.0]), group([100, 110], [0.0, 1.0])]
    assert reward_metrics(groups)["response/length_correlation"] == pytest.approx(1.0)
    assert "response/length_correlation" not in reward_metrics([group([3, 3], [0.0, 1.0])])


def test_repetition_is_of_the_policys_own_tokens():
    ids = torch.tensor([1, 2, 3, 4, 1, 2, 3, 4, 1, 2])  # seven 4-grams, four of them different
    said = group([10], [0.0], response_ids=ids)
    assert reward_metrics([said])["response/repetition"] == pytest.approx(3 / 7)
    a_tools = dataclasses.replace(said, trainable=torch.tensor([True] * 6 + [False] * 4))
    assert reward_metrics([a_tools])["response/repetition"] == 0.0
    # The next response begins anew, and has said nothing before.
    assert reward_metrics([group([5, 5], [0.0, 1.0], response_ids=ids)])["response/repetition"] == 0.0


def test_zero_std_fraction_counts_zero_variance_groups():
    same = group([1, 1, 1], [0.1, 0.1, 0.1])  # the float std of three 0.1s is not exactly zero
    groups = [same, same, group([1, 1], [0.0, 1.0]), group([1, 1], [2.0, 2.0])]
    assert reward_metrics(groups)["reward/zero_std_fraction"] == 0.75


def test_advantage_metrics_appear_once_every_group_has_advantages():
    ready = group([1, 9], [0.0, 1.0]).with_advantages(torch.tensor([-1.0, 3.0]))
    metrics = reward_metrics([ready])
    # Over responses, so the long response does not weigh nine times: mean (-1 + 3) / 2, std 2.
    assert (metrics["advantage/mean"], metrics["advantage/std"]) == (1.0, 2.0)
    assert "advantage/mean" not in reward_metrics([ready, group([1, 1], [0.0, 1.0])])


def test_staleness_is_over_tokens_that_the_policy_chose():
    versions = torch.tensor([5, 5, 3, 0])
    trainable = torch.tensor([True, True, True, False])  # the last token is a tool's: its version says nothing
    stale = group([2, 2], [0.0, 1.0], versions=versions, trainable=trainable)
    metrics = reward_metrics([stale], version=6)
    assert metrics["staleness/mean"] == pytest.approx((1 + 1 + 3) / 3)
    assert metrics["staleness/max"] == 3.0
    assert metrics["response/mean_length"] == 1.5 and metrics["response/max_length"] == 2.0  # without the tool's
    assert "staleness/mean" not in reward_metrics([stale])


def test_non_finite_values_stay_strict_json_and_come_back(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(1, {"loss/total": float("nan"), "grad_norm": np.float32("-inf"), "lr": 1e-5, "tokens": torch.tensor(7)})
    [line] = log.path.read_text().splitlines()
    stored = {"step": 1, "loss/total": None, "grad_norm": None, "lr": 1e-5, "tokens": 7}
    stored["nonfinite"] = {"loss/total": "nan", "grad_norm": "-inf"}
    assert json.loads(line, parse_constant=pytest.fail) == stored  # NaN and Infinity are no JSON
    [row] = read_metrics(tmp_path)
    assert math.isnan(row["loss/total"]) and row["grad_norm"] == -math.inf and "nonfinite" not in row


def test_a_resumed_run_writes_the_file_of_an_uninterrupted_one(tmp_path):
    def steps(log, first, last):
        for step in range(first, last + 1):
            log.log(step, {"reward/mean": step / 10})
            if step % 2 == 0:
                log.log(step, {"eval/reward": float(step)})

    whole = MetricsLog(tmp_path / "whole")
    steps(whole, 0, 6)
    broken = MetricsLog(tmp_path / "broken")
    steps(broken, 0, 5)
    with broken.path.open("a") as file:
        file.write('{"step": 6, "rew')  # killed in the middle of a line
    assert read_metrics(broken.path)[-1] == {"step": 5, "reward/mean": 0.5}
    resumed = MetricsLog(tmp_path / "broken")
    resumed.truncate(2)
    steps(resumed, 3, 6)
    assert resumed.path.read_bytes() == whole.path.read_bytes()
    assert [p.name for p in (tmp_path / "broken").iterdir()] == ["metrics.jsonl"]


TORN = b'{"step": 2, "rew'


@pytest.mark.parametrize(("line", "what"), [(TORN, "is not one of metrics"), (b'{"lr": 0.1}', "has no step")])
def test_a_line_that_is_not_one_of_metrics_is_named_with_the_remedy(tmp_path, line, what):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    for read in (read_metrics, lambda folder: MetricsLog(folder).truncate(2)):
        with pytest.raises(ValueError, match=re.escape(what)) as error:
            read(tmp_path)
        assert str(error.value).startswith(f"{path}, line 2 ") and str(error.value).endswith("; remove that line")


def test_a_gpus_peak_is_divided_between_trainer_and_engine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 30 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=80 << 30))
    alone = {"memory/peak_gib": 30.0, "memory/limit_gib": 80.0}
    assert memory_metrics() == alone
    assert memory_metrics(12.5) == alone | {"memory/engine_gib": 12.5, "memory/peak_beside_engine_gib": 17.5}


def test_the_memory_of_a_cpu_is_the_machines_or_the_containers(tmp_path):
    lines = Path("/proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    for text, limit in ((str(1 << 30), 1 << 30), ("max", machine), (str(machine + 1), machine)):
        (bound := tmp_path / text).write_text(f"{text}\n")
        assert memory_limit(bound) == limit
    assert memory_limit(tmp_path / "none") == machine
    metrics = memory_metrics()
    assert 0 < metrics["memory/peak_gib"] <= metrics["memory/limit_gib"]
