"""Runs of four ranks go on by themselves when one is killed or frozen: on four, equal to a run that was resumed by
hand, and on three, with the same groups and losses."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import without_clocks

from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts
from grpo_rl.monitor.stored_tokens import read_step
from grpo_rl.report.files import read_summary

pytestmark = pytest.mark.nightly

FAULTY = Path(__file__).with_name("faulty_rank.py")
DEADLINE_S, MODES = 5.0, ("ddp", "fsdp")
RANKS = {"ranks/size", "ranks/restarts"}
"""Metrics that differ where other ranks go on."""


@dataclass
class Ended:
    """The outcome of a start: its folder, exit code, lines with the time of each, and whom the fault hit."""

    folder: Path
    code: int
    lines: list[tuple[float, str]]
    witness: dict[str, Any]

    @property
    def said(self) -> str:
        return "\n".join(line for _, line in self.lines)


def torchrun(folder: Path, words: list[str], launch: list[str], fault: dict[str, Any] | None = None) -> Ended:
    """Starts ranks in a folder of their own; ``hydra.run.dir`` is left to the date and the time."""
    folder.mkdir(exist_ok=True)
    process = launched(folder, words, launch, fault)
    lines = [(time.time(), line.rstrip()) for line in process.stdout]
    code, witness = process.wait(60), folder / "witness"
    found = json.loads(witness.read_text()) if witness.exists() else {}
    return Ended(folder, code, lines, found)


def launched(folder: Path, words: list[str], launch: list[str], fault: dict[str, Any] | None) -> subprocess.Popen:
    said = {"GRPO_RL_FAULT": json.dumps(fault | {"witness": str(folder / "witness")})} if fault else {}
    command = [sys.executable, "-m", "torch.distributed.run", *launch, str(FAULTY), *words]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"} | said, **output)


def the_run(folder: Path) -> Path:
    """The only folder that a run has written to."""
    (metrics,) = folder.glob("outputs/*/*/metrics.jsonl")
    return metrics.parent


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in without_clocks(row).items() if k not in RANKS} for row in read_metrics(folder)]


@pytest.fixture(scope="module")
def words(tiny_run) -> list[str]:
    waits = ["train_model.timeout_s=120", f"train_model.deadline_s={DEADLINE_S}"]
    return [*tiny_run, *waits, "train_model.dtype=float32", "train.lineage=true", "optimizer.lr=1e-3"]


KILLED = {"signal": signal.SIGKILL, "rank": 2, "step": 5, "after_s": 1.5}
"""In the first of two optimizer steps of step 3; the last checkpoint is of step 2."""


@pytest.fixture(scope="module", params=MODES)
def by_hand(request, words, tmp_path_factory) -> tuple[list[str], Path, Path]:
    """The words of a run, its folder as the killed rank left it, and once more where it was resumed by hand."""
    words, folder = [*words, f"train_model.parallel={request.param}"], tmp_path_factory.mktemp("by_hand") / "run"
    cut = torchrun(folder, words, ["--standalone", "--nproc-per-node=4", "--max-restarts=0"], KILLED)
    assert cut.code == 1 and not Path(f"/proc/{cut.witness['pid']}").exists()
    assert f"rank 2 ({os.uname().nodename}, process {cut.witness['pid']}) died in phase train of step 3" in cut.said
    left = shutil.copytree(the_run(folder), folder.parent / "left")
    (resumed,) = [the_run(folder)]
    again = torchrun(folder, [*words, f"resume={resumed}"], ["--standalone", "--nproc-per-node=4"])
    assert again.code == 0, again.said[-3000:]
    return words, left, resumed


def test_a_killed_rank_is_replaced_and_the_run_equals_one_that_was_resumed_by_hand(by_hand, tmp_path):
    words, _, expected = by_hand
    run = torchrun(tmp_path / "run", words, ["--standalone", "--nproc-per-node=4", "--max-restarts=2"], KILLED)
    assert run.code == 0, run.said[-3000:]
    assert run.witness["rank"] == 2 and f"process {run.witness['pid']}) died in phase train of step 3" in run.said
    folder = the_run(run.folder)
    assert "Restart 1 of the run, with 4 ranks: rank 2 (" in (folder / "grpo.log").read_text()
    assert numbers(folder) == numbers(expected)
    assert (folder / "model/model.safetensors").read_bytes() == (expected / "model/model.safetensors").read_bytes()
    assert [row["ranks/restarts"] for row in read_metrics(folder)] == [0, 0, 1, 1]
    summary = read_summary(folder)
    assert (summary["ranks"], summary["restarts"], summary["finished"]) == (4, 1, True)


def groups_of(folder: Path) -> list[list[tuple[Any, ...]]]:
    """The groups of each step, as they are in the lineage: row of the prompt, and what was sampled."""
    return [
        sorted((group.row, *group.response_ids.tolist()) for group in read_step(folder, step).groups)
        for step in StepParts(folder / TOKENS_FOLDER).steps()
    ]


def test_a_node_that_dies_is_done_without_where_the_run_is_elastic(by_hand, tmp_path):
    """Two nodes with three ranks and one; the second, its torchrun too, is killed."""
    words, _, expected = by_hand
    folder = tmp_path / "run"
    folder.mkdir()
    meet = ["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29731", "--rdzv-id=elastic"]
    meet += ["--rdzv-conf=last_call_timeout=5,join_timeout=60", "--max-restarts=2"]
    fault, words = KILLED | {"rank": 3, "node": True}, [*words, "train.elastic=true"]
    first = launched(folder, words, [*meet, "--nproc-per-node=3"], fault)
    time.sleep(3)  # the first to come hosts the store
    second = launched(folder, words, [*meet, "--nproc-per-node=1"], fault)
    said = first.communicate(timeout=700)[0]
    assert second.wait(10) == -signal.SIGKILL and first.returncode == 0, said[-3000:]
    run = the_run(folder)
    sizes = [(row["ranks/size"], row["ranks/restarts"]) for row in read_metrics(run)]
    assert sizes == [(4, 0), (4, 0), (3, 1), (3, 1)]
    assert "Trained by 4 ranks until step 2, and by 3 from there on" in (run / "grpo.log").read_text()
    assert groups_of(run) == groups_of(expected)
    for got, want in zip(numbers(run), numbers(expected), strict=True):
        for name in ("loss/total", "grad_norm", "reward/mean"):
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name


def test_other_ranks_than_before_are_refused_with_what_to_do(by_hand, tmp_path):
    words, left, _ = by_hand
    run = shutil.copytree(left, tmp_path / "left")
    refused = torchrun(tmp_path / "run", [*words, f"resume={run}"], ["--standalone", "--nproc-per-node=1"])
    assert refused.code == 1
    told = r"error: 4 ranks trained until step 2, and 1 would go on; start 4 \(.*train.elastic=true"
    assert re.search(told, refused.said)


def test_a_frozen_rank_is_named_in_time_and_the_run_goes_on_without_its_process(words, tmp_path):
    words, fault = [*words, "train_model.parallel=ddp"], KILLED | {"signal": signal.SIGSTOP, "rank": 1}
    run = torchrun(tmp_path / "run", words, ["--standalone", "--nproc-per-node=4", "--max-restarts=1"], fault)
    assert run.code == 0, run.said[-3000:]
    ((when, line),) = [(when, line) for when, line in run.lines if line.startswith("error: rank")]
    assert f"rank 1 ({os.uname().nodename}, process {run.witness['pid']})" in line
    assert "has given no sign of life for 5 s" in line and "in phase train of step 3 since" in line
    assert DEADLINE_S - 1 < when - run.witness["at"] < DEADLINE_S + 5
    assert read_summary(the_run(run.folder))["restarts"] == 1


def test_ranks_with_dropout_resume_as_if_they_had_not_been_cut_off(words, tmp_path):
    words = [*words, "train_model.parallel=ddp", "train_model.lora.rank=2", "train_model.lora.dropout=0.3"]
    launch = ["--standalone", "--nproc-per-node=2", "--max-restarts=0"]
    whole = torchrun(tmp_path / "whole", [*words, "train.checkpoint_frequency=1", "train.keep_checkpoints=0"], launch)
    assert whole.code == 0, whole.said[-3000:]
    cut = Path(shutil.copytree(the_run(whole.folder), tmp_path / "cut"))
    start = cut / "checkpoints" / "checkpoint_000002.pt"
    again = torchrun(tmp_path / "again", [*words, "train.checkpoint_frequency=1", f"resume={start}"], launch)
    assert again.code == 0, again.said[-3000:]
    assert numbers(cut) == numbers(the_run(whole.folder))
