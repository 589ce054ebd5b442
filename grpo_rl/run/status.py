"""``grpo-rl status``: whether a run's process is alive, how far it is, and who waits for whom in it; without torch."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_rl.run.lock import LOCK, holder_of
from grpo_rl.storage.masking import shown
from grpo_rl.waits.record import Record, read_record, record_path, shown_duration

METRICS, SUMMARY, MODEL = "metrics.jsonl", "summary.json", "model"
"""Files of a run that modules which import torch name, too."""
TAIL_BYTES = 1 << 16
POLL_S = 0.1


def add_status(parser: argparse.ArgumentParser) -> None:
    """Says whether a run's process is alive, its last step with its age, and, by SIGUSR1 to a live process of this
    machine, who waits there for whom. Exit code 1: the run is not finished, and no process of it is alive.
    """
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--deadline-s", type=float, default=5.0, metavar="S", help="longest wait for a live process to respond (5)"
    )
    parser.set_defaults(run_command=_status)


def _status(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if overrides:
        raise ValueError(f"status takes no overrides such as {overrides[0]}; give a run's folder")
    if not options.run.is_dir():
        raise ValueError(f"{options.run} is not a run folder; give one like outputs/2026-01-31/12-00-00")
    status = status_of(options.run, options.deadline_s)
    print(shown(status.text))  # the folder may be from elsewhere
    return int(not status.is_well)


@dataclass(frozen=True)
class Status:
    """The status of a run.

    Args:
        is_well: True if the run is finished, or its process may be alive.
    """

    text: str
    is_well: bool


def status_of(folder: Path, deadline_s: float = 5.0) -> Status:
    """The status of a run; asks its process for the table of its waits if that is alive and on this machine.

    Raises:
        ValueError: the folder is not that of a run.
        OSError: it can't be read.
    """
    held, holder = holder_of(folder)
    step = _last_step(folder / METRICS)
    if not (holder or step or (folder / LOCK).exists()):
        raise ValueError(f"{folder} holds no run: neither {LOCK} nor {METRICS} is there")
    if not held and _finished(folder):
        return Status(f"Finished: {_step(step)}.", True)
    if held and not holder:
        return Status(f"Alive: a process that starts or ends holds {folder / LOCK}; {_step(step)}.", True)
    if not holder:
        return Status(f"Stopped: {_step(step)}. Go on with: resume={folder}", False)
    process, path = f"process {holder.get('pid')} on {holder.get('host')}", record_path(folder)
    record = read_record(path)
    own = record if record and (record.pid, record.host) == (holder.get("pid"), holder.get("host")) else None
    last = f" Its last record of waits is of {own.at}: {path}" if own else ""
    if holder.get("host") != socket.gethostname():
        return Status(f"Perhaps alive, as {process}: {_step(step)}. Ask there: grpo-rl status {folder}.{last}", True)
    if not held and _exists(holder.get("pid")):
        return Status(f"Perhaps alive: {process} is there, without the folder's lock; {_step(step)}.{last}", True)
    if not held:
        return Status(f"Dead, once {process}: {_step(step)}. Go on with: resume={folder}.{last}", False)
    alive = f"Alive: {process} since {holder.get('since')}, {_step(step)}."
    if not own or not own.renews:
        return Status(f"{alive} It is not asked, as SIGUSR1 may end it.{last}", True)
    try:
        if not _has_open(own.pid, folder / LOCK):  # a signal would end whichever process has its number here
            raise ProcessLookupError
        fresh = _asked(own, path, deadline_s)
    except PermissionError:
        return Status(f"{alive} It is another user's, who alone can ask it.{last}\n\n{own.table}", True)
    except (ProcessLookupError, FileNotFoundError):
        gone = "It can't be asked: it has ended just now, or runs in another container of this host."
        return Status(f"{alive} {gone}{last}\n\n{own.table}", True)
    if fresh:
        return Status(f"{alive}\n\n{fresh.table}\n\nStacks are in {path}", True)
    return Status(
        f"{alive} It has not responded to SIGUSR1 within {deadline_s:g} s: it is stopped, or a call that never lets go "
        f"of Python's interpreter holds it; `py-spy dump --pid {own.pid}` shows which.{last}\n\n{own.table}",
        True,
    )


def _asked(own: Record, path: Path, deadline_s: float) -> Record | None:
    """The record that the process writes anew when it is asked; None where it does not in time.

    Raises:
        PermissionError, ProcessLookupError: it can't be asked.
    """
    before, until = path.stat().st_mtime_ns, time.monotonic() + deadline_s
    os.kill(own.pid, signal.SIGUSR1)
    while time.monotonic() < until:
        if path.stat().st_mtime_ns != before:
            return read_record(path)
        time.sleep(POLL_S)
    return None


def _has_open(pid: int, path: Path) -> bool:
    """True if the process has the file open.

    Raises:
        PermissionError: it is another user's.
        FileNotFoundError, ProcessLookupError: there is no such process.
    """
    file = path.stat()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(descriptor.stat(), file):
                return True
    return False


def _exists(pid: object) -> bool:
    """True if a process of this number is there; it may be another one than was meant."""
    try:
        os.kill(int(str(pid)), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _finished(folder: Path) -> bool:
    """True if the run has written its summary and its model, as `grpo_rl.run.claim.is_finished` has it."""
    summary = _json((folder / SUMMARY).read_bytes()) if (folder / SUMMARY).exists() else {}
    return bool(summary.get("finished")) and (folder / MODEL).is_dir()


def _last_step(path: Path) -> tuple[int, float] | None:
    """The last step in ``metrics.jsonl`` and the seconds since it was logged; None where there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]  # what follows the last line is torn
    for line in reversed(lines):
        row = _json(line)
        if isinstance(row.get("step"), int):
            at = row["time"] if isinstance(row.get("time"), float) else path.stat().st_mtime
            return row["step"], max(0.0, time.time() - at)
    return None


def _step(step: tuple[int, float] | None) -> str:
    return f"step {step[0]}, {shown_duration(step[1])} ago" if step else "no step yet"


def _json(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
