"""Checks of a run that is about to start, and their findings: none hides those after it; one that hangs is named."""

from __future__ import annotations

import faulthandler
import importlib
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grpo_rl.envs.guards.isolation import IsolatedCalls

if TYPE_CHECKING:
    from grpo_rl.settings.schema import Settings

CHECKS = "grpo_rl.checks"
OF_MODEL = ("model", "config", "gate")
OF_TOKENIZER = (*OF_MODEL, "tokenizer", "written files", "chat template")
"""Findings without which no model can be planned, and without which no data be tokenised, and no weights loaded."""
OF_MACHINE = {
    "packages": (f"{CHECKS}.machine", ()),
    "open files": (f"{CHECKS}.machine", ()),
    "shared memory": (f"{CHECKS}.machine", ()),
    "run folder": (f"{CHECKS}.folder", ()),
    "leftovers": (f"{CHECKS}.folder", ()),
}
OF_RUN = {
    "engine": (f"{CHECKS}.machine", ()),
    "loggers": (f"{CHECKS}.machine", ()),
    "model": (f"{CHECKS}.model", ()),
    "devices": (f"{CHECKS}.devices", (*OF_MODEL, "engine", "ray")),
    "disk": (f"{CHECKS}.model", (*OF_MODEL, "run folder")),
    "memory": (f"{CHECKS}.memory", (*OF_MODEL, "devices")),
    "dataset": (f"{CHECKS}.data", OF_TOKENIZER),
    "rewards": (f"{CHECKS}.data", (*OF_TOKENIZER, "dataset")),
    "collectives": (f"{CHECKS}.devices", ("devices",)),
    "weights": (f"{CHECKS}.scores", (*OF_TOKENIZER, "engine", "devices", "memory", "context")),
}
"""Checks, cheapest first: the module whose function of that name yields findings, and the findings that have to be in
order before it can find anything."""
SLOW = ("model", "weights")
"""Checks that may take all the time there is, for a download or the start of an engine; the others take half of it."""
STACK_S = 0.5
"""Seconds that a process whose check hangs has to write its stack."""
LONGEST = 500
"""Characters of an error's text that a line shows."""
FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Args:
        kind: ``OK``; ``note``, which limits what can be trained; ``FIX``, without which training goes wrong; ``SKIP``:
            it was not looked at.
        about: what was looked at, in a word or two.
        text: what was found, and what to do where it is not in order.
        override: setting without which the model can't be trained.

    >>> print(Finding("OK", "python", "3.11.7"))
    OK    python            3.11.7
    """

    kind: Literal["OK", "note", "FIX", "SKIP"]
    about: str
    text: str
    override: str = ""

    def __str__(self) -> str:
        return f"{self.kind:<4}  {self.about:<16}  {self.text}"


class Unfit(Exception):
    """An error behind which nothing more can be looked at; carries its finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.finding = finding


@contextmanager
def unfit(about: str, remedy: str = "") -> Iterator[None]:
    """A context whose errors become a finding: libraries raise errors of any kind for a model that they can't take.

    Raises:
        Unfit: there was an error.

    >>> with unfit("gate"):
    ...     [][1]
    Traceback (most recent call last):
    grpo_rl.checks.check.Unfit: IndexError: list index out of range
    """
    try:
        yield
    except Unfit:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
        # Errors of these types have readable messages; of others, the type is most informative.
        text = text if text and isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {text}"
        raise Unfit(Finding("FIX", about, f"{text}{remedy}")) from error


@dataclass(frozen=True)
class Case:
    """A run that is about to start, as checks see it; it goes to another process.

    Args:
        settings: of the run; None where they can't be read.
        folder: that the run will write to.
        quick: read no weights.
        cluster: GPUs and CPUs of the Ray cluster that the run is for; None: the run is for this machine.
    """

    settings: Settings | None
    folder: Path
    quick: bool = False
    cluster: tuple[int, int] | None = None

    @property
    def read(self) -> Settings:
        """The settings, in the checks of :data:`OF_RUN`."""
        assert self.settings is not None
        return self.settings


def caught(about: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; an error that ends it is the last one, about that."""
    try:
        with unfit(about):
            yield from check()
    except Unfit as error:
        yield error.finding


def shown(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, each printed as soon as it is there."""
    found = []
    for finding in findings:
        print(finding, flush=True)
        found.append(finding)
    return found


def findings_of(name: str, module: str, case: Case) -> Iterator[Finding]:
    """The findings of a check; an unexpected error is one to be fixed."""
    return caught(name, lambda: getattr(importlib.import_module(module), name.replace(" ", "_"))(case))


def _in_child(name: str, module: str, case: Case, deadline_s: float) -> list[Finding]:
    """The findings of a check; where it takes longer, the stack of this process goes to stderr."""
    faulthandler.dump_traceback_later(deadline_s)
    try:
        return list(findings_of(name, module, case))
    finally:
        faulthandler.cancel_dump_traceback_later()


def all_findings(
    checks: Mapping[str, tuple[str, tuple[str, ...]]],
    case: Case,
    run: Callable[[str, str, Case], Iterator[Finding]] = findings_of,
) -> Iterator[Finding]:
    """The findings of all checks, whatever those before them found.

    Args:
        run: runs a check; by default in this process, with no deadline.
    """
    broken: set[str] = set()
    for name, (module, needs) in checks.items():
        if missing := [need for need in needs if need in broken]:
            broken.add(name)
            yield Finding("SKIP", name, f"not looked at before {', '.join(missing)} is in order")
            continue
        for finding in run(name, module, case):
            if finding.kind == "FIX":
                broken.add(finding.about)
            yield finding


@contextmanager
def child_process(deadline_s: float) -> Iterator[Callable[[str, str, Case], Iterator[Finding]]]:
    """A context with a way to run checks: in a child process, and all of them within so many seconds.

    The process is killed where a check takes too long; the next check gets another one. The output of libraries there
    goes to a file, whose last line is shown where the process dies.
    """
    end = time.monotonic() + deadline_s
    with tempfile.NamedTemporaryFile(prefix="grpo_rl_doctor_", suffix=".log") as log:
        calls = IsolatedCalls(_in_child, workers=1, memory_gib=None, again=False, output=log)

        def run(name: str, module: str, case: Case) -> Iterator[Finding]:
            left = end - time.monotonic()
            if left <= 0:
                yield Finding("SKIP", name, f"the {deadline_s:g} s are over; --deadline-s gives more")
                return
            limit = left if name in SLOW else min(left, deadline_s / 2)
            log.truncate(log.seek(0))
            try:
                calls.start()  # no part of the check's time
                [found] = calls.map([(name, module, case, limit)], limit + STACK_S)
            except (RuntimeError, OSError) as error:  # no process can be started
                found = error
            if isinstance(found, list):
                yield from found
                return
            output = Path(log.name).read_text(errors="replace")
            if isinstance(found, TimeoutError):
                stack = FRAME.search(output.rpartition("(most recent call first)")[2])  # the main thread's is the last
                place = f", at {Path(stack[1]).name}:{stack[2]} ({stack[3]})" if stack else ""
                text = f"no result within {limit:.0f} s{place}; if it is only slow, --deadline-s gives more"
            else:
                words = [line.strip() for line in output.splitlines() if line.strip()]
                text = f"{found}{f'; its last output: {words[-1][:LONGEST]}' if words else ''}"
            yield Finding("FIX", name, text)

        try:
            yield run
        finally:
            calls.close(now=True)
