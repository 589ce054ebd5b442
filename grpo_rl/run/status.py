"""``grpo-rl status``: whether a run's process is alive, how far it is, and which waits were late; without torch."""

import argparse
import socket
import time
from pathlib import Path

import psutil

from grpo_rl.run.lock import LOCK, holder_of, json_object
from grpo_rl.run.push import MODEL
from grpo_rl.storage.masking import shown
from grpo_rl.waits import FILE, STACKS, shown_duration

METRICS, SUMMARY = "metrics.jsonl", "summary.json"
"""Files of a run that modules which import torch name, too."""
TAIL_BYTES = 1 << 16


def add_status(parser: argparse.ArgumentParser) -> None:
    """Shows whether a run's process is alive, its last step with its age, and what waited for what when a wait was late
    last. Exit code 1: the run is not finished, and no process of it is alive.
    """
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.set_defaults(run_command=_status)


def _status(options: argparse.Namespace) -> int:
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
    held, holder = holder_of(folder)
    step = _last_step(folder / METRICS)
    if not (holder or step or (folder / LOCK).exists()):
        raise ValueError(f"{folder} holds no run: neither {LOCK} nor {METRICS} is there")
    if not held and _finished(folder):
        return f"Finished: {_step(step)}.", True
    if held and not holder:
        return f"Alive: a process that starts or ends holds {folder / LOCK}; {_step(step)}.", True
    if not holder:
        return f"Stopped: {_step(step)}. Go on with: resume={folder}", False
    process, hint = f"process {holder.get('pid')} on {holder.get('host')}", _last_waits(folder)
    if holder.get("host") != socket.gethostname():
        return f"Perhaps alive, as {process}: {_step(step)}. Ask there: grpo-rl status {folder}.{hint}", True
    if not held and holder.get("pid") in psutil.pids():
        return f"Perhaps alive: {process} is there, without the folder's lock; {_step(step)}.{hint}", True
    if not held:
        return f"Dead, once {process}: {_step(step)}. Go on with: resume={folder}.{hint}", False
    ask = f"kill -USR1 {holder.get('pid')} prints the stacks of its threads on its standard error"
    return f"Alive: {process} since {holder.get('since')}, {_step(step)}. {ask}.{hint}", True


def _last_waits(folder: Path) -> str:
    """The table of waits when one was late last; empty where none was."""
    path = folder / FILE
    if not path.is_file():
        return ""
    return f"\n\n{path.read_text(errors='replace').partition(STACKS)[0]}\n\nStacks are in {path}"


def _finished(folder: Path) -> bool:
    """True if the run has written its summary and its model, as `grpo_rl.run.claim.is_finished` has it."""
    summary = json_object((folder / SUMMARY).read_bytes()) if (folder / SUMMARY).exists() else {}
    return bool(summary.get("finished")) and (folder / MODEL).is_dir()


def _last_step(path: Path) -> tuple[int, float] | None:
    """The last step in ``metrics.jsonl`` and the seconds since it was logged; None where there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]  # what follows the last line is torn
    for line in reversed(lines):
        row = json_object(line)
        if isinstance(row.get("step"), int):
            at = row["time"] if isinstance(row.get("time"), float) else path.stat().st_mtime
            return row["step"], max(0.0, time.time() - at)
    return None


def _step(step: tuple[int, float] | None) -> str:
    return f"step {step[0]}, {shown_duration(step[1])} ago" if step else "no step yet"
