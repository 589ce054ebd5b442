"""Whole runs of seconds for tests and benchmarks, and the comparison of two of them."""

import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from grpo_rl.testing import save_tiny_model


def tiny_run(folder: str | Path) -> list[str]:
    """The overrides of a run of seconds: six rows, and a random model that is rewarded for digits, both in the folder.

    Four steps of four groups of four responses; later overrides win. Nothing is compiled, which would take longer than
    all the steps do.
    """
    data, model = Path(folder, "train.jsonl"), save_tiny_model(Path(folder, "model"))
    rows = [{"question": f"{i}?", "answer": f"so\n#### {i}"} for i in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.name={model}",
        f"env.path={data}",
        f"env.eval_path={data}",
        "env.system_prompt=null",
        "env.num_envs=4",
        "env.repeats=4",
        "env.reward.reasoning_pattern='[0-9]'",  # a random model meets this one now and then
        "train.optim_batch_size=8",
        "train.total_dialog_turns=64",
        "train.checkpoint_frequency=1",
        "train.keep_checkpoints=0",
        "train.micro_batch_tokens=64",
        "train_model.compile=false",
        "train_model.dtype=bfloat16",  # as on a GPU, whatever this CPU is fast at
        "inference_model.engine=transformers",
        "inference_model.max_model_len=64",
        "sampling.max_new_tokens=8",
        "optimizer.lr=1e-2",
        "evaluate.rows=0",
    ]


def run_script(script: str | Path, overrides: Sequence[str], folder: str | Path) -> Path:
    """Runs a script of sota/ in this process; the run's folder."""
    with mock.patch.object(sys, "argv", [str(script), *overrides, f"hydra.run.dir={folder}"]):
        runpy.run_path(str(script), run_name="__main__")
    return Path(folder)


def without_clocks(row: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a row of metrics, or of a run's summary, that a second run has, too: no clocks, no memory.

    >>> without_clocks({"loss/total": 0.5, "time/train_s": 3.0})
    {'loss/total': 0.5}
    """
    clocks = ("time", "throughput/", "memory/", "limit_", "seconds", "total/seconds", "checkpoint", "command")
    return {name: value for name, value in row.items() if not name.startswith(clocks)}


def same(a: Any, b: Any) -> bool:
    """True if two trees of tensors, numbers and texts are equal to the last bit; NaN equals NaN.

    >>> same({"a": [torch.zeros(2), float("nan")]}, {"a": [torch.zeros(2), float("nan")]}), same(torch.zeros(1), 0.0)
    (True, False)
    """
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return a == b or (a != a and b != b)
