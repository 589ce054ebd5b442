"""The scripts with vLLM on a GPU, and a tiny model: adapters, a quantised base, an engine that sleeps, resuming."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import run_script

from grpo_rl.monitor.metrics import MetricsLog, read_metrics
from grpo_rl.training.checkpoint import PATTERN, load

pytestmark = pytest.mark.gpu

SOTA = Path(__file__).parents[2] / "sota"
run = functools.partial(run_script, SOTA / "grpo.py")
LORA = ["train_model.lora.rank=8", "train_model.lora.targets=[q_proj,up_proj,down_proj]"]
KINDS = {
    "whole": [],
    "asleep": ["inference_model.sleep=true"],
    "merged adapters": LORA,
    "adapters": [*LORA, "train_model.lora.push=adapter"],
    "nf4": [*LORA, "train_model.quantization=nf4"],
    "checkpointing and KL": ["train_model.gradient_checkpointing=true", "policy.kl_coef=0.1", "train.epochs=2"],
}


@pytest.fixture(scope="module")
def tiny(tiny_run, own_cache):
    pytest.importorskip("vllm")
    vllm = ["inference_model.engine=vllm", "inference_model.gpu_memory_utilization=0.1"]
    return [*tiny_run, *vllm, "optimizer.lr=1e-3", "train_model.compile=null"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_trains_on_what_its_engine_samples(tiny, tmp_path, kind):
    if any("lora" in override for override in KINDS[kind]):
        pytest.importorskip("peft")
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    rows = read_metrics(run([*tiny, *KINDS[kind]], tmp_path / "run"))
    steps = [row for row in rows if "time/train_s" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert any(row["grad_norm"] > 0 for row in steps)
    # Sampler and trainer compute the same policy: bf16 alone tells them apart.
    assert steps[0]["mismatch/mean"] < 0.1


@pytest.mark.parametrize("transfer", ["null", "shared_memory"])
def test_the_async_script_trains_and_samples_at_the_same_time(tiny, tmp_path, transfer):
    pytest.importorskip("ray")
    words = ["inference_model.gpu_memory_utilization=0.3", f"inference_model.transfer={transfer}", "optimizer.lr=1e-2"]
    words += ["train.optim_batch_size=16", "train.total_dialog_turns=96", f"hydra.run.dir={tmp_path}/run"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]}
    command = [sys.executable, SOTA / "grpo_async.py", *tiny, *words]
    ended = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said[-3000:]
    assert "of its memory 30% are the engine's and 65% the trainer's" in " ".join(said.split())
    rows = [row for row in read_metrics(tmp_path / "run") if "groups/started" in row]
    assert [row["policy_version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["staleness/max"] for row in rows) <= 2
    assert all(row["mismatch/mean"] < 0.02 for row in rows if "mismatch/mean" in row)


def test_a_run_goes_on_from_a_checkpoint_with_its_versions_and_weights(tiny, tmp_path):
    whole = run(tiny, tmp_path / "whole")
    shutil.copytree(whole, cut := tmp_path / "cut")
    second, third, last = (Path("checkpoints", PATTERN.format(step=step)) for step in (2, 3, 4))
    for later in (third, last):
        (cut / later).unlink()
    MetricsLog(cut).truncate(2)
    run([*tiny, f"resume={cut / second}"], tmp_path / "unused")
    again, first = ([row for row in read_metrics(f) if "time/train_s" in row] for f in (cut, whole))
    assert [row["step"] for row in again] == [1, 2, 3, 4]
    assert [row["policy_version"] for row in again] == [row["policy_version"] for row in first]
    ours, theirs = (load(f / last)["optimizer"] for f in (cut, whole))
    assert ours["counters"] == theirs["counters"]
    # Sums of a GPU's backward pass may come in another order, so weights are close and not equal.
    before, after = (flat(load(whole / path)["optimizer"]["masters"]) for path in (second, third))
    assert (flat(ours["masters"]) - flat(theirs["masters"])).norm() <= 0.5 * (after - before).norm()


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])
