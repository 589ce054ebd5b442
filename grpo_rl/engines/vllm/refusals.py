"""vLLM's refusals for lack of GPU memory or of a kernel, as one line that names our settings. For vLLM 0.32."""

from __future__ import annotations

import functools
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

REPORT = "GRPO_RL_VLLM_REPORT"
"""Environment variable: the file in which vLLM's processes report why they did not start."""

_NO_ROOM = re.compile(r"No available memory for the cache blocks")
_TOO_LONG = re.compile(
    r"max seq len \((?P<length>\d+)\), \((?P<needed>[\d.]+) GiB KV cache is needed, which is larger than the available "
    r"KV cache memory \((?P<left>[\d.]+) GiB\)(?:.*estimated maximum model length is (?P<fits>\d+))?",
    re.DOTALL,
)
_TAKEN = re.compile(
    r"Free memory on device (?P<device>\S+) \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired "
    r"GPU memory utilization \([\d.]+, (?P<asked>[\d.]+) GiB\)"
)
_CHANGED = re.compile(
    r"Error in memory profiling\. Initial free memory (?P<before>[\d.]+) GiB, current free memory (?P<after>[\d.]+) GiB"
)

_NO_KERNEL = re.compile(r"expect head_dim to be multiples of 32|Unexpected head dim size")


def refusal(text: str, gpu_memory_utilization: float, max_model_len: int) -> str | None:
    """The meaning of vLLM's error in terms of our settings; None for other errors.

    >>> refusal("No available memory for the cache blocks. Try …", 0.1, 1024)
    ... # doctest: +ELLIPSIS
    'inference_model.gpu_memory_utilization=0.1 leaves vLLM no room for keys and values beside its weights; raise it...'
    """
    share = f"inference_model.gpu_memory_utilization={gpu_memory_utilization:g}"
    length = f"inference_model.max_model_len={max_model_len}"
    if _NO_ROOM.search(text):
        return f"{share} leaves vLLM no room for keys and values beside its weights; raise it, or take a smaller model"
    if found := _TOO_LONG.search(text):
        fits = f" to {found['fits']}" if found["fits"] else ""
        return (
            f"{length} takes {found['needed']} GiB of keys and values, and {share} leaves {found['left']} GiB for "
            f"them; raise gpu_memory_utilization, or lower max_model_len{fits}"
        )
    if found := _TAKEN.search(text):
        most = int(100 * float(found["free"]) / float(found["total"])) / 100
        return (
            f"{share} asks for {found['asked']} of the {found['total']} GiB of {found['device']}, and {found['free']} "
            f"GiB are free; lower it to {most:g} or less, or end what else holds memory there"
        )
    if _NO_KERNEL.search(text):
        return (
            "vLLM's kernels for linear attention on a CPU take heads of 64 or 128 numbers, and the model's are of "
            "another size; set inference_model.engine=transformers"
        )
    if found := _CHANGED.search(text):
        return (
            f"another process on the GPU freed memory while vLLM measured what {share} leaves: {found['before']} GiB "
            f"were free, then {found['after']} GiB; start again once it has ended "
            "(if it was this run's own trainer: just start again)"
        )
    return None


@contextmanager
def refusals_explained(gpu_memory_utilization: float, max_model_len: int) -> Iterator[None]:
    """A context in which vLLM starts; its refusals for lack of memory or a kernel are raised in terms of our settings.

    Raises:
        ValueError: vLLM has too little memory, or no kernel for the model.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        report.write_text("")
        before = os.environ.get(REPORT)
        os.environ[REPORT] = str(report)
        try:
            yield
        except (ValueError, AssertionError, RuntimeError) as error:
            text = f"{error}\n{report.read_text('utf-8')}"
            if told := refusal(text, gpu_memory_utilization, max_model_len):
                raise ValueError(told) from error
            raise
        finally:
            os.environ.pop(REPORT, None)
            if before is not None:
                os.environ[REPORT] = before


@functools.cache
def report_failures() -> None:
    """Has this process report the exceptions that vLLM logs while :func:`refusals_explained` waits for its start.

    Of a process of vLLM's own the waiting one sees only that it ended.
    """
    # Handlers would be gone: vLLM's processes configure its loggers anew as they start.
    make = logging.getLogRecordFactory()

    def reported(*args: Any, **settings: Any) -> logging.LogRecord:
        record = make(*args, **settings)
        # Once vLLM has started there is no report any more.
        if record.exc_info and record.name.startswith("vllm.") and os.path.exists(path := os.environ.get(REPORT, "")):
            with suppress(OSError), open(path, "a", encoding="utf-8", errors="replace") as report:
                report.write(f"{record.exc_info[1]}\n")
        return record

    logging.setLogRecordFactory(reported)
