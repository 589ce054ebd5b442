"""Kill points: compiles kill_points.c, has a process begin anew with it, and arms a fork of that process."""

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

SOURCE = Path(__file__).with_name("kill_points.c")
KINDS = ("write", "torn write", "fsync", "rename", "open", "truncate", "remove", "mkdir", "process start")
STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec")
"""Python's audit events of starting a process."""


@dataclass(frozen=True)
class Point:
    """A point of a start: its number from 0, its kind and the file."""

    number: int
    kind: str
    path: str


def missing() -> str | None:
    """Says what this machine lacks for kill points; None: nothing."""
    if sys.platform != "linux":
        return "kill points need Linux: its calls are caught by LD_PRELOAD"
    return None if shutil.which("cc") else "kill points need a C compiler, cc"


def compiled(folder: Path) -> Path:
    """The library, compiled into the folder."""
    library = folder / "kill_points.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


def folder_of_library() -> Path | None:
    """The folder of the library if this process has begun anew with it; else None."""
    library = Path(os.environ.get("LD_PRELOAD", ""))
    return library.parent if library.name == "kill_points.so" else None


def begin_anew_with_kill_points(folder: Path) -> NoReturn:
    """Replaces this process by itself with the library preloaded, which it compiles into the folder."""
    os.environ["LD_PRELOAD"] = str(compiled(folder))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["LD_PRELOAD"])


def arm(within: Path, kill_at: int | None, tally: Path | None, witness: Path) -> None:
    """Arms this process: it dies by SIGKILL at its point of this number, once it has told the witness.

    Args:
        within: the folder whose files count; process starts always do.
        kill_at: None: it passes all points.
        tally: gets a line for each point that is passed.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    tally_to = os.open(tally, flags) if tally else -1
    library = _library()
    library.kill_points_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    library.kill_points_arm(os.fsencode(within), -1 if kill_at is None else kill_at, tally_to, os.open(witness, flags))

    def on_event(event: str, arguments: tuple) -> None:
        if event in STARTS:
            library.kill_points_pass(b"process start", str(arguments[0] if arguments else "").encode())

    sys.addaudithook(on_event)


def points(file: Path) -> list[Point]:
    """The points in a tally or a witness."""
    lines = [line.split("\t") for line in file.read_text().splitlines()] if file.exists() else []
    return [Point(int(number), kind, path) for number, kind, path in lines]
