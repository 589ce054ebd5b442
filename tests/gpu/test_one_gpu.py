"""One GPU that trains and samples at the same time, and what log-probabilities cost an engine on a GPU."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
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


def test_log_probs_cost_an_engine_less_than_a_twentieth(default_model):
    pytest.importorskip("vllm")
    from vllm import SamplingParams

    from grpo_rl.engines.base import Sampling
    from grpo_rl.engines.vllm.engine import VLLMEngine
    from grpo_rl.engines.vllm.sampling import sampling_params

    engine = VLLMEngine(default_model, max_model_len=512, gpu_memory_utilization=0.3, max_num_seqs=128)
    try:
        asked = sampling_params(8, Sampling(max_new_tokens=256, min_new_tokens=256), ())
        plain = SamplingParams(n=8, max_tokens=256, min_tokens=256, detokenize=False, output_kind=asked.output_kind)
        prompts = [{"prompt_token_ids": list(range(10 + i, 74 + i))} for i in range(16)]

        def seconds(parameters: SamplingParams) -> float:
            start = time.perf_counter()
            engine._llm.generate(prompts, parameters, use_tqdm=False)
            return time.perf_counter() - start

        taken = [(seconds(asked), seconds(plain)) for _ in range(7)][2:]
        with_them, without = (statistics.median(arm) for arm in zip(*taken, strict=True))
        assert with_them <= 1.05 * without, (with_them, without)
    finally:
        engine.close()
