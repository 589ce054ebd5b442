"""Checks of a run that is about to start: none hides those after it, and one that hangs or dies is named."""

from __future__ import annotations

import faulthandler
import importlib
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_rl.checks.finding import LONGEST, Finding, Unfit, unfit
from grpo_rl.envs.guards.isolation import IsolatedCalls, WorkerDied

if TYPE_CHECKING:
    from grpo_rl.settings.schema import Settings

STACK_S = 0.5
"""Seconds that a process whose check hangs has to write its stack."""
CALLERS = ("/checks/check.py", "/guards/isolation.py")
"""Files whose lines call every check."""
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
        """Its findings; an unexpected error is one to be fixed."""
        module, name = self.function.split(":")
        try:
            with unfit(self.about):
                yield from getattr(importlib.import_module(module), name)(case)
        except Unfit as error:
            yield error.finding


def findings_of(
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
def child_process(deadline_s: float) -> Iterator[Callable[[Check, Case], Iterator[Finding]]]:
    """A context with a way to run checks: in a child process, and all of them within so many seconds.

    The process is killed where a check takes longer than it may; the next check gets another one. The output of
    libraries there goes to a file, whose last line is shown where the process dies.
    """
    end = time.monotonic() + deadline_s
    with tempfile.NamedTemporaryFile(prefix="grpo_rl_doctor_", suffix=".log") as log:
        calls = IsolatedCalls(_next_finding, workers=1, memory_gib=None, again=False, output=log)

        def run(check: Check, case: Case) -> Iterator[Finding]:
            limit = min(check.limit_s, end - time.monotonic())
            if limit <= 0:
                yield Finding("SKIP", check.about, f"the {deadline_s:g} s are over; --deadline-s gives more")
                return
            try:
                calls.start()  # no part of the check's time
            except RuntimeError as error:
                yield Finding("FIX", check.about, str(error))
                return
            until = time.monotonic() + limit
            while True:
                left = max(0.01, until - time.monotonic())
                [found] = calls.map([(check, case, left)], left + STACK_S)
                if found is None:
                    return
                if isinstance(found, Finding):
                    yield found
                    continue
                said = Path(log.name).read_text(errors="replace")
                log.truncate(log.seek(0))
                yield Finding("FIX", check.about, _failure(found, said, check, limit, deadline_s))
                return

        try:
            yield run
        finally:
            calls.close(now=True)


_under_way: dict[str, Iterator[Finding]] = {}
"""In the child process: the checks that have begun."""


def _next_finding(check: Check, case: Case, seconds: float) -> Finding | None:
    """The check's next finding; None: it has no more. The stack of one that takes longer goes to stderr."""
    faulthandler.dump_traceback_later(seconds)
    try:
        found = next(_under_way.setdefault(check.about, check.findings(case)), None)
    finally:
        faulthandler.cancel_dump_traceback_later()
    if found is None:
        del _under_way[check.about]
    return found


def _failure(error: Exception, said: str, check: Check, limit: float, deadline_s: float) -> str:
    if isinstance(error, WorkerDied):
        how = f"by {error.end}" if error.end.startswith("SIG") else f"with {error.end}"
        if error.end == signal.SIGKILL.name:
            how += ", as the kernel does where memory is short"
        lines = [line for line in said.splitlines() if line.strip()]
        return f"the process that looked ended {how}{f': {lines[-1].strip()[:LONGEST]}' if lines else ''}"
    if not isinstance(error, TimeoutError):
        return f"{type(error).__name__}: {error}"
    place = _place(said)
    if limit < check.limit_s:
        return f"not done when the {deadline_s:g} s were over{place}; if it is only slow, --deadline-s gives more"
    return f"hangs: no result within {limit:.0f} s{place}"


def _place(said: str) -> str:
    """The innermost line that the process's main thread is at, and the line of ours that called it, in words."""
    frames = FRAME.findall(said.rpartition("(most recent call first)")[2])
    ours = [frame for frame in frames if "/grpo_rl/" in frame[0] and not frame[0].endswith(CALLERS)]
    shown = list(dict.fromkeys([*frames[:1], *ours[:1]]))
    places = (f"{Path(file).name}:{line} ({name})" for file, line, name in shown)
    return f", at {', called at '.join(places)}" if shown else ""
