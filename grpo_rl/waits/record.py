"""The record of a process's waits as text, and what other processes read of it; without asyncio and torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FILE = "waits.txt"
"""The record of the run's process, in the run's folder; that of another rank is beside it."""
OVERDUE = "Overdue: "
WITH_RANKS = "It waits for the other ranks."
RENEWS = "kill -USR1 {pid} on {host} writes this anew"
_HEAD = re.compile(r"Process (?P<pid>\d+) on (?P<host>\S+), (?P<role>[^,]+), at (?P<at>[^.]+)\.")


def record_path(folder: Path, rank: int = 0) -> Path:
    """The path of a rank's record.

    >>> record_path(Path("run")).name, record_path(Path("run"), 2).name
    ('waits.txt', 'waits.rank2.txt')
    """
    return folder / (FILE if rank == 0 else f"waits.rank{rank}.txt")


@dataclass(frozen=True)
class Record:
    """A record, with what its head says.

    Args:
        at: when it was written, in UTC.
        renews: True if SIGUSR1 to the process has it written anew and does nothing else; others may be ended by it.
        overdue: the waits of the process that are beyond their deadlines.
        with_ranks: True if the process waited for the other ranks then, overdue or not.
        text: the whole record.
    """

    pid: int
    host: str
    role: str
    at: str
    renews: bool
    overdue: tuple[str, ...]
    with_ranks: bool
    text: str

    @property
    def table(self) -> str:
        """The record without stacks."""
        return self.text.partition("\n\nStacks\n")[0]


def head(pid: int, host: str, role: str, at: str, renews: bool, overdue: list[str], with_ranks: bool = False) -> str:
    """The first lines of a record.

    >>> print(head(7, "n1", "trainer", "2026-11-23 12:00:00 UTC", True, ["a checkpoint on the disk"]))
    Process 7 on n1, trainer, at 2026-11-23 12:00:00 UTC. kill -USR1 7 on n1 writes this anew.
    Overdue: a checkpoint on the disk
    """
    first = f"Process {pid} on {host}, {role}, at {at}."
    lines = [f"{first} {RENEWS.format(pid=pid, host=host)}." if renews else first]
    return "\n".join([*lines, *([WITH_RANKS] if with_ranks else []), *(f"{OVERDUE}{what}" for what in overdue)])


def ended(text: str, pid: int, host: str) -> str:
    """A record of which the process has ended its work: SIGUSR1 has it write nothing any more.

    >>> ended(head(7, "n1", "trainer", "noon", True, []), 7, "n1")
    'Process 7 on n1, trainer, at noon.'
    """
    return text.replace(f" {RENEWS.format(pid=pid, host=host)}.", "")


def read_record(path: Path) -> Record | None:
    """The record in a file; None where there is none that can be read.

    >>> read_record(Path("no/such/file"))
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    if not (found := _HEAD.match(text)):
        return None
    pid, host = int(found["pid"]), found["host"]
    first, *rest = text.split("\n\n")[0].splitlines()
    overdue = tuple(line.removeprefix(OVERDUE) for line in rest if line.startswith(OVERDUE))
    renews = RENEWS.format(pid=pid, host=host) in first
    return Record(pid, host, found["role"], found["at"], renews, overdue, WITH_RANKS in rest, text)


def shown_duration(seconds: float) -> str:
    """A duration for people.

    >>> [shown_duration(s) for s in (0.3, 42, 600, 9000, 198_000, float("inf"))]
    ['0.3 s', '42 s', '10 min', '2.5 h', '55 h', '']
    """
    if seconds == float("inf"):
        return ""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 300:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
