"""The async script itself with vLLM in Ray actors: on this machine, and on two nodes of which one dies."""

import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pandas as pd
import pytest

from grpo_rl.monitor.metrics import STEP_PHASES, read_metrics
from tests.helpers import responses_by_step

pytest.importorskip("ray")
pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "sota" / "grpo_async.py"
STEPS = 6
PATIENCE_S = 900
"""For a run beside other tests: its engines start in half a minute where nothing else computes."""


@pytest.fixture(scope="module")
def tiny(tiny_run):
    """A short run on vLLM, of four groups of four a step."""
    sizes = ["train.optim_batch_size=16", f"train.total_dialog_turns={STEPS * 16}"]
    return [*tiny_run, *sizes, "inference_model.engine=vllm", "evaluate.rows=4"]


def start(overrides, folder, **environment):
    """The script in a process of its own, with all that it starts marked."""
    name, value = "GRPO_RL_TEST", uuid.uuid4().hex
    arguments = [sys.executable, str(SCRIPT), *overrides, f"hydra.run.dir={folder}"]
    with open(folder.with_suffix(".log"), "w") as log:
        output = {"stdout": log, "stderr": subprocess.STDOUT}
        env = os.environ | environment | {name: value}
        process = subprocess.Popen(arguments, **output, env=env, cwd=folder.parent)
    return process, f"{name}={value}"


def processes_with(mark):
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes() and (path / "stat").read_text().split()[2] != "Z":
                found.append((path / "cmdline").read_text()[:80])
        except OSError:
            continue
    return found


def said(folder):
    return re.sub(r"\s+", " ", folder.with_suffix(".log").read_text())


def finished(process, folder, timeout=PATIENCE_S):
    assert process.wait(timeout) == 0, said(folder)[-3000:]
    return [row for row in read_metrics(folder) if "groups/started" in row]


def trained_groups(folder):
    return sorted(group for rows in responses_by_step(folder).values() for group in {row["group_id"] for row in rows})


def unaccounted(row):
    """The number of groups that were started, and are neither trained on nor open nor dropped."""
    dropped = sum(value for name, value in row.items() if name.startswith("groups/dropped"))
    return row["groups/started"] - row["groups/trained"] - row["groups/open"] - dropped


@pytest.fixture(scope="module")
def ran(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("async") / "run"
    process, mark = start(tiny, folder)
    rows = finished(process, folder)
    end = time.monotonic() + 20
    while (left := processes_with(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    return folder, rows, left


def test_sampling_goes_on_while_it_trains_within_the_bound_and_every_group_is_accounted_for(ran):
    folder, rows, _ = ran
    assert len(rows) == STEPS and max(row["staleness/max"] for row in rows) == 2
    assert not any(map(unaccounted, rows))
    assert rows[-1]["groups/started"] == rows[-1]["groups/trained"] == 4 * STEPS
    assert trained_groups(folder) == list(range(4 * STEPS)), "each group is trained on once"
    assert all(row["mismatch/mean"] < 0.02 for row in rows if "mismatch/mean" in row)
    assert [row["policy_version"] for row in rows] == list(range(1, STEPS + 1))


def test_the_run_stores_when_the_engine_sampled_each_group(ran):
    folder, rows, _ = ran
    sampled = pd.read_parquet(folder / "sampling.parquet")
    assert sorted(sampled["group_id"]) == list(range(4 * STEPS)) and set(sampled["engine"]) == {"engine 0 on 127.0.0.1"}
    assert (sampled["ended_s"] > sampled["begun_s"]).all() and sampled["ended_s"].max() < rows[-1]["time/at_s"]
    # A step's responses are there before it is trained on.
    ended = sampled.groupby("group_id")["ended_s"].max()
    responses = responses_by_step(folder)
    for row in rows:
        groups = {response["group_id"] for response in responses[int(row["step"])]}
        of_training = sum(row.get(f"time/{phase}_s", 0.0) for phase in STEP_PHASES[STEP_PHASES.index("train") :])
        assert ended[list(groups)].max() <= row["time/at_s"] - of_training + 0.05


def test_nothing_that_the_run_started_is_left(ran):
    assert ran[2] == []


TWO_NODE_STEPS = 24


@pytest.fixture
def two_nodes(tiny, tmp_path):
    """A cluster of a head and a place for one more node, and the overrides of a run with an engine on each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    settings = ["inference_model.num_devices=2", f"ray.address={cluster.address}", "ray.nodes=2"]
    settings += [f"train.total_dialog_turns={TWO_NODE_STEPS * 16}", "train.keep_checkpoints=2"]
    yield cluster, [*tiny, *settings]
    cluster.shutdown()


def run_and_kill(two_nodes, folder, steps, *overrides):
    """The run on both nodes, of which one is killed after so many steps."""
    cluster, settings = two_nodes
    node = cluster.add_node(num_cpus=1)
    environment = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")}  # as of the cluster
    process, _ = start([*settings, *overrides], folder, **environment)
    end = time.monotonic() + PATIENCE_S
    while not (folder / "metrics.jsonl").exists() or len(read_metrics(folder)) < steps:
        assert time.monotonic() < end and process.poll() is None, said(folder)[-3000:]
        time.sleep(0.2)
    cluster.remove_node(node, allow_graceful=False)
    return process


@pytest.mark.nightly
def test_a_node_dies_and_the_run_stops_by_name_is_resumed_and_lives_through_another_ones_death(two_nodes, tmp_path):
    folder = tmp_path / "run"
    process = run_and_kill(two_nodes, folder, 5, "inference_model.max_restarts=0")
    assert process.wait(PATIENCE_S) == 1
    stopped = re.search(r"Stopped after step (\d+): engine 1 on [\d.]+ died .* Go on with: resume=", said(folder))
    assert stopped and int(stopped[1]) < TWO_NODE_STEPS, said(folder)[-3000:]

    process = run_and_kill(two_nodes, folder, int(stopped[1]) + 5, f"resume={folder}")
    rows = finished(process, folder)
    assert "It is replaced, and its unfinished groups are sampled again" in said(folder)
    assert rows[-1]["engines/replaced"] == 1 and len(rows) == TWO_NODE_STEPS
    assert trained_groups(folder) == list(range(4 * TWO_NODE_STEPS)), "each group is trained on once"
    assert not any(map(unaccounted, rows))
