"""``grpo-rl status``: whether a run's process is alive, how far it is, and which waits were late; without torch."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from grpo_rl.run.model_files import is_finished, read_json
from grpo_rl.storage.lock import LOCK, described, holder_of
from grpo_rl.storage.masking import shown
from grpo_rl.waits.watcher import FILE, STACKS, shown_duration

METRICS = "metrics.jsonl"
"""A file of a run that modules which import torch name, too."""
TAIL_BYTES = 1 << 16


def add_status(parser: argparse.ArgumentParser) -> None:
    """Shows whether a run's process is alive, its last step with its age, and what waited for what when a wait was late
    last. Exit code 1: the run is not finished, and no process of it is alive.
    """
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.set_defaults(run_command=_status)


def _status(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if overrides:
        raise ValueError(f"status takes no overrides such as {overrides[0]}; give a run's folder")
    if not options.run.is_dir():
        raise ValueError(f"{options.run} is not a run folder; give one like outputs/2026-01-31/12-00-00")
    text, is_well = status_of(options.run)
    print(shown(text))  # the folder may be from elsewhere
    return int(not is_well)


def status_of(folder: Path) -> tuple[str, bool]:
    """The status of a run, and whether it is finished, or its process may be alive.

    Raises:
        ValueError: the folder is not that of a run.
        OSError: it can't be read.
    """
    alive, holder = holder_of(folder)
    found = _last_step(folder / METRICS)
    if not (holder or found or (folder / LOCK).exists()):
        raise ValueError(f"{folder} holds no run: neither {LOCK} nor {METRICS} is there")
    process, step = described(holder), f"step {found[0]}, {shown_duration(found[1])} ago" if found else "no step yet"
    hint = _last_waits(folder) if holder else ""
    if not alive and is_finished(folder):
        return f"Finished: {step}.", True
    if alive is None:
        return f"Perhaps alive, as {process}: {step}. Ask on its host: grpo-rl status {folder}.{hint}", True
    if not alive:
        was = f"Dead, once {process}" if holder else "Stopped"
        return f"{was}: {step}. Go on with: resume={folder}.{hint}", False
    ask = f"kill -USR1 {holder.get('pid', 'PID')} prints the stacks of its threads on its standard error"
    return f"Alive: {process}, {step}. {ask}.{hint}", True


def _last_waits(folder: Path) -> str:
    """The table of waits when one was late last; empty where none was."""
    path = folder / FILE
    if not path.is_file():
        return ""
    return f"\n\n{path.read_text(errors='replace').partition(STACKS)[0]}\n\nStacks are in {path}"


def _last_step(path: Path) -> tuple[int, float] | None:
    """The last step in ``metrics.jsonl`` and the seconds since it was logged; None where there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]  # what follows the last line is torn
    for line in reversed(lines):
        row = read_json(line)
        if isinstance(row.get("step"), int):
            at = row["time"] if isinstance(row.get("time"), float) else path.stat().st_mtime
            return row["step"], max(0.0, time.time() - at)
    return None
