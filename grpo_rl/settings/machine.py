"""Refuses settings that need what this machine lacks, as far as that can be known without importing torch."""

from __future__ import annotations

import glob
import importlib.util
import os

from grpo_rl.envs.sources import Source, repository_of
from grpo_rl.envs.spec import task_spec
from grpo_rl.policies.adapters import need
from grpo_rl.policies.model_folder import check_name
from grpo_rl.settings.derived import adapters, eval_source, train_source
from grpo_rl.settings.schema import Settings
from grpo_rl.storage.cache import cache_folder


def check_machine(settings: Settings, mode: str = "sync") -> None:
    """Refuses settings that need files or packages that are not here.

    On a cluster the trainers are elsewhere, and nothing is checked but Ray. What is found here is found again when the
    run is built, with more knowledge; here an error takes a second, and there the time of all imports.
    """
    if mode == "async":
        need("ray", "--async (mode=async)", "ray")
    if settings.ray.address is not None:
        return
    cache_folder()
    check_engine(settings)
    adapters(settings)
    for name in filter(None, (settings.model.name, settings.ref_model.name)):
        check_name(name)
    _check_rows(settings, train_source(settings), "train")
    if settings.env.eval_path:
        _check_rows(settings, eval_source(settings), "test")


def check_engine(settings: Settings) -> None:
    """Refuses an engine that is not installed; SFT has none."""
    samples = settings.mode != "sft" and settings.inference_model.engine == "vllm"
    if samples and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed; install the extra `vllm` (CUDA) or `cpu`, or set "
            "inference_model.engine=transformers"
        )


def _check_rows(settings: Settings, source: Source, split: str) -> None:
    """Raises the task's own loader's error for a path where nothing is, unless it may be of the hub."""
    path = source.path
    if path is None or repository_of(path) or glob.has_magic(path) or os.path.exists(os.path.expanduser(path)):
        return
    task_spec(settings.env.dataset).rows(source, split, settings.env)
