"""One GPU that trains and samples at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_rl.monitor.metrics import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "sota" / "grpo_async.py"
STEPS = 6


@pytest.mark.parametrize("transfer", ["null", "shared_memory"])
def test_the_async_script_trains_and_samples_on_one_gpu(tiny_run, tmp_path, transfer):
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    overrides = [
        *tiny_run,
        "inference_model.engine=vllm",
        "inference_model.gpu_memory_utilization=0.3",
        "train_model.compile=null",
    ]
    overrides += [
        "train.optim_batch_size=16",
        f"train.total_dialog_turns={STEPS * 16}",
        f"hydra.run.dir={tmp_path}/run",
    ]
    overrides += [f"inference_model.transfer={transfer}"]
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), *overrides],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": visible},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said[-3000:]
    assert "of its memory 30% are the engine's and 65% the trainer's" in " ".join(said.split())
    rows = [row for row in read_metrics(tmp_path / "run") if "groups/started" in row]
    assert [row["policy_version"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["staleness/max"] for row in rows) <= 2
    assert all(row["mismatch/mean"] < 0.02 for row in rows if "mismatch/mean" in row)
