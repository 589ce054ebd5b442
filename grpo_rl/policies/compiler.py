"""torch.compile on this machine: whether it works, and where compiled code is kept."""

import functools
import os
import shutil
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from grpo_rl.storage.cache import cache_folder

INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
BUILD = "_CxxBuild"
"""The end of the name of a folder in which PyTorch builds the library next to it, under a lock of the library's key."""


def keep_compiled_code() -> None:
    """Has PyTorch keep compiled code in our cache folder, unless ``TORCHINDUCTOR_CACHE_DIR`` names another one.

    PyTorch's own default is below /tmp, which machines clear when they start, and it writes that into the variable.
    """
    if os.environ.get(INDUCTOR_CACHE, default_cache_dir()) != default_cache_dir():
        return
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ[INDUCTOR_CACHE] = str(folder)
        for built in (folder, Path(default_cache_dir(), "precompiled_headers")):
            _remove_unfinished(built)


def _remove_unfinished(folder: Path) -> None:
    """Removes libraries and headers at whose build a process was killed: PyTorch takes what is there, and would fail.

    The folder in which PyTorch builds one is there then, as it is removed last.
    """
    for build in list(folder.rglob(f"*{BUILD}")):
        library = build.name.removesuffix(BUILD)
        key, _, kind = library.partition(".")
        if kind not in ("", "main", "h"):  # of another lock
            continue
        try:
            with FileLock(folder / "locks" / f"{key}.lock", timeout=0):
                for suffix in (".o", ".so", ".gch"):
                    build.with_name(library + suffix).unlink(missing_ok=True)
                shutil.rmtree(build, ignore_errors=True)
        except (Timeout, OSError):  # another process builds it now
            continue


def has_compiler(device: torch.device | str) -> bool:
    """True if torch.compile finds its compiler, Triton on CUDA and a C++ compiler on a CPU, without trying it."""
    if torch.device(device).type == "cuda":
        from grpo_rl.policies import head_triton  # Triton takes long to import, and no CPU needs it

        return head_triton.available(device)
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def why_uncompiled(device: torch.device | str) -> str | None:
    """The reason why nothing can be compiled for the device, in one line; None: a small function was, and ran.

    A compiler may be there and fail: Triton builds its launchers with a C compiler and Python's headers.
    """
    device = torch.device(device)
    if not has_compiler(device):
        on_gpu = device.type == "cuda"
        return f"there is no {'Triton' if on_gpu else 'C++ compiler (g++, or the one that CXX names)'}"
    return _failure(device)


@functools.cache
def _failure(device: torch.device) -> str | None:
    try:
        if device.type == "cuda":
            from grpo_rl.policies.head_triton import tile_statistics

            # torch.compile may do without Triton's own launcher; our kernels do not.
            tile_statistics(torch.zeros(1, 16, device=device), torch.zeros(1, dtype=torch.long, device=device))
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # compilers fail in many ways
        return f"compiling for {device.type} failed: {_first_error(error)}"
    return None


def _first_error(error: Exception) -> str:
    """The most informative line of an error's message: a compiler's own error, or else the first.

    >>> _first_error(RuntimeError("C++ compile error\\n\\nOutput:\\nx.cpp:1: fatal error: Python.h: No such file"))
    'x.cpp:1: fatal error: Python.h: No such file'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if " error: " in line), lines[0])[:300]
