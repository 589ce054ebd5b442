"""Facts about this machine's hardware, and whether torch can use it, that need no import of torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Files of the drivers of GPUs: NVIDIA's, WSL's, and AMD's; without one there is no GPU."""
CPU_FILE = Path("/proc/cpuinfo")


def has_no_gpu() -> bool:
    """True if torch certainly sees no GPU: there is none, all are hidden, or it is a build for CPUs.

    False: torch has to be queried.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return hidden or not any(Path(name).exists() for name in GPU_FILES) or _torch_is_for_cpus()


def lacks_bfloat16() -> bool:
    """True if this is an x86 CPU without AVX-512; nearly all of these multiply bfloat16 matrices in plain loops.

    On two AMD cores with AVX2 those loops do 1 GFLOP/s, and PyTorch's float32 kernels 116. The few that have bfloat16
    without AVX-512 (AVX-NE-CONVERT) count as well: Linux does not list that flag.
    """
    try:
        text = CPU_FILE.read_text(errors="replace")
    except OSError:
        return False
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)  # ARM's list is called Features
    return flags is not None and "avx512bw" not in flags[1].split()


def default_dtype(ray_address: str | None = None) -> str:
    """Name of the dtype for training: bfloat16, or float32 on a CPU without fast bfloat16 kernels.

    A cluster at ``ray_address`` gets bfloat16, as its CPUs can't be seen from here.
    """
    return "float32" if ray_address is None and has_no_gpu() and lacks_bfloat16() else "bfloat16"


def _torch_is_for_cpus() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
