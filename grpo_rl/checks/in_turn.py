"""Checks in turn: none hides those after it, and one that hangs or dies is named by the process that waits for it."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_rl.checks.finding import LONGEST, Finding, Unfit, unfit
from grpo_rl.envs.guards.parent import end_with_parent

if TYPE_CHECKING:
    from grpo_rl.settings.schema import Settings

POLL_S = 0.2
"""Seconds between two looks at whether a process still lives."""
STACK_S = 0.5
"""Seconds that a process that hangs has to say where."""
END_S = 3.0
"""Seconds that a process has to end in order, when all has been told."""
SERVE = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from grpo_rl.checks import in_turn; in_turn.serve"
SERVE += "(int(sys.argv[1]), int(sys.argv[3]))"
FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')


@dataclass(frozen=True)
class Case:
    """A run that is about to start, as checks see it; it goes to another process.

    Args:
        settings: of the run; None where they can't be read.
        folder: that the run will write to.
        named: whether the folder was given, and has not the time in its name.
        quick: read no weights.
        cluster: GPUs and CPUs of the Ray cluster that the run is for; None: the run is for this machine.
    """

    settings: Settings | None
    folder: Path
    named: bool = False
    quick: bool = False
    cluster: tuple[int, int] | None = None

    @property
    def read(self) -> Settings:
        """The settings, of a check that stands behind the one that reads them."""
        assert self.settings is not None
        return self.settings


@dataclass(frozen=True)
class Check:
    """A check of a run that is about to start.

    Args:
        about: its name, in findings too where it yields one alone.
        function: ``package.module:name``, imported where it runs: it takes a case, and yields findings.
        limit_s: seconds that it may take.
        needs: findings that have to be in order before it can tell anything.
    """

    about: str
    function: str
    limit_s: float = 20.0
    needs: tuple[str, ...] = ()

    def findings(self, case: Case) -> Iterator[Finding]:
        """Its findings; an error that nobody expected is one to be fixed."""
        module, name = self.function.split(":")
        try:
            with unfit(self.about):
                yield from getattr(importlib.import_module(module), name)(case)
        except Unfit as error:
            yield error.finding


def in_turn(
    checks: Sequence[Check], case: Case, run: Callable[[Check, Case], Iterator[Finding]] = Check.findings
) -> Iterator[Finding]:
    """The findings of all checks, whatever those before them found.

    Args:
        run: runs a check; by default in this process, with no deadline.
    """
    broken: set[str] = set()
    for check in checks:
        if missing := [name for name in check.needs if name in broken]:
            broken.add(check.about)
            yield Finding("SKIP", check.about, f"nothing can be told before {', '.join(missing)} is in order")
            continue
        for finding in run(check, case):
            if finding.kind == "FIX":
                broken.add(finding.about)
            yield finding


@contextmanager
def guarding(deadline_s: float) -> Iterator[Callable[[Check, Case], Iterator[Finding]]]:
    """A context with a way to run checks: in another process, and all of them within so many seconds.

    The process is killed, with all that it started, where a check takes longer than it may; the next check gets another
    one. What libraries print there goes to a file, whose last line is told where the process dies.
    """
    guard = _Guard(time.monotonic() + deadline_s, deadline_s)
    try:
        yield guard.findings
    finally:
        guard.close()


class _Guard:
    def __init__(self, end: float, deadline_s: float) -> None:
        self._end, self._deadline_s = end, deadline_s
        self._process: subprocess.Popen[bytes] | None = None

    def findings(self, check: Check, case: Case) -> Iterator[Finding]:
        """The findings of a check; also of one that does not come back."""
        limit = min(check.limit_s, self._end - time.monotonic())
        if limit <= 0:
            yield Finding("SKIP", check.about, f"the {self._deadline_s:g} s are over; --deadline-s gives more")
            return
        process = self._process = self._process or self._start()
        until = time.monotonic() + limit
        try:
            self._pipe.send((check, case))
            while (left := until - time.monotonic()) > 0:
                if not self._pipe.poll(min(left, POLL_S)):
                    # Children of the process that looks may hold its end of the pipe open.
                    if process.poll() is not None and not self._pipe.poll():
                        raise EOFError
                    continue
                finding = self._pipe.recv()
                if finding is None:
                    return
                yield finding
        except (EOFError, OSError):
            yield Finding("FIX", check.about, self._death(process))
            self._kill(process)
            return
        place = self._place(process)
        text = f"hangs: no result within {limit:.0f} s{place}"
        if limit < check.limit_s:
            text = f"not done when the {self._deadline_s:g} s were over{place}; if it is only slow, "
            text += "--deadline-s gives more"
        yield Finding("FIX", check.about, text)
        self._kill(process)

    def _start(self) -> subprocess.Popen[bytes]:
        """Starts a process with a session of its own, so that all that it starts ends with it."""
        self._log = tempfile.NamedTemporaryFile(prefix="grpo_rl_doctor_", suffix=".log")  # noqa: SIM115
        ours, theirs = socket.socketpair()
        self._pipe = Connection(ours.detach())
        command = [sys.executable, "-c", SERVE, str(theirs.fileno()), json.dumps(sys.path), str(os.getpid())]
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        return process

    def _said(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def _death(self, process: subprocess.Popen[bytes]) -> str:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STACK_S)
        code = process.returncode
        how = f"by {signal.Signals(-code).name}" if code and code < 0 else f"with exit code {code}"
        if code == -signal.SIGKILL:
            how += ", as the kernel does where memory is short"
        lines = [line for line in self._said().splitlines() if line.strip()]
        return f"the process that looked ended {how}{f': {lines[-1].strip()[:LONGEST]}' if lines else ''}"

    def _place(self, process: subprocess.Popen[bytes]) -> str:
        """The innermost line that the process is at, and the line of ours that called it, in words."""
        with suppress(OSError):
            process.send_signal(signal.SIGUSR1)
            time.sleep(STACK_S)
        _, _, stack = self._said().rpartition("(most recent call first)")
        frames = FRAME.findall(stack)
        ours = [frame for frame in frames if "/grpo_rl/" in frame[0] and not frame[0].endswith("/in_turn.py")]
        shown = list(dict.fromkeys([*frames[:1], *ours[:1]]))
        places = (f"{Path(file).name}:{line} ({name})" for file, line, name in shown)
        return f", at {', called at '.join(places)}" if shown else ""

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._pipe.close()
        self._log.close()
        self._process = None

    def close(self) -> None:
        """Ends the process, which may put its things in order first, and all that it started."""
        if (process := self._process) is not None:
            self._pipe.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            self._kill(process)


def serve(descriptor: int, parent: int) -> None:
    """Runs each check that comes, until nobody sends more, or the process that sends them has ended."""
    end_with_parent()
    if os.getppid() != parent:
        return
    pipe = Connection(descriptor)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    with suppress(EOFError):
        while True:
            check, case = pipe.recv()
            for finding in check.findings(case):
                pipe.send(finding)
            pipe.send(None)
