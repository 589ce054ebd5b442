"""Checks of a run that is about to start, and their findings: none hides those after it; one that hangs is named."""

from __future__ import annotations

import faulthandler
import importlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grpo_rl.envs.guards.isolation import IsolatedCalls

if TYPE_CHECKING:
    from grpo_rl.settings.schema import Settings

OF_MODEL = ("model", "config", "gate")
OF_TOKENIZER = (*OF_MODEL, "tokenizer", "written files", "chat template")
"""Findings without which no model can be planned, and without which no data be tokenised, and no weights loaded."""
Checks = Mapping[str, tuple[str, tuple[str, ...]]]
"""Checks, cheapest first: the module whose function of that name yields findings, and the findings that have to be in
order before it can find anything."""
OF_MACHINE: Checks = {
    "packages": ("grpo_rl.checks.machine", ()),
    "open files": ("grpo_rl.checks.machine", ()),
    "shared memory": ("grpo_rl.checks.machine", ()),
    "run folder": ("grpo_rl.checks.folder", ()),
}
OF_RUN: Checks = {
    "engine": ("grpo_rl.checks.machine", ()),
    "loggers": ("grpo_rl.checks.machine", ()),
    "model": ("grpo_rl.checks.model", ()),
    "devices": ("grpo_rl.checks.devices", (*OF_MODEL, "engine", "ray")),
    "disk": ("grpo_rl.checks.model", (*OF_MODEL, "run folder")),
    "memory": ("grpo_rl.checks.memory", (*OF_MODEL, "devices")),
    "dataset": ("grpo_rl.checks.data", OF_TOKENIZER),
    "rewards": ("grpo_rl.checks.data", (*OF_TOKENIZER, "dataset")),
    "collectives": ("grpo_rl.checks.devices", ("devices",)),
    "weights": ("grpo_rl.checks.scores", (*OF_TOKENIZER, "engine", "devices", "memory", "context")),
}
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
    """The findings of a check; an error that ends it, of any kind, is the last one, about that."""
    try:
        with unfit(about):
            yield from check()
    except Unfit as error:
        yield error.finding


def findings_of(name: str, module: str, case: Case) -> Iterator[Finding]:
    """The findings of a check; an unexpected error is one to be fixed."""
    return caught(name, lambda: getattr(importlib.import_module(module), name.replace(" ", "_"))(case))


def all_findings(
    checks: Checks, case: Case, run: Callable[[str, str, Case], Iterator[Finding]] = findings_of
) -> Iterator[Finding]:
    """The findings of all checks, whatever those before them found; ``run`` runs one, by default with no deadline."""
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


def shown(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, each printed as soon as it is there."""
    found = []
    for finding in findings:
        print(finding, flush=True)
        found.append(finding)
    return found


def _in_child(name: str, module: str, case: Case, deadline_s: float, file: str) -> None:
    """Writes the findings of a check to a file, each at once; past the deadline this process's stack goes to stderr."""
    faulthandler.dump_traceback_later(deadline_s)
    try:
        with open(file, "w") as lines:
            for finding in findings_of(name, module, case):
                print(json.dumps(asdict(finding)), file=lines, flush=True)
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def child_process(deadline_s: float) -> Iterator[Callable[[str, str, Case], Iterator[Finding]]]:
    """A context with a way to run checks: in a child process, and all of them within so many seconds.

    The process is killed where a check takes too long, whose findings until then are kept; the next check gets another
    one. The output of libraries there goes to a file, whose last line is shown where the process dies.
    """
    end = time.monotonic() + deadline_s
    with tempfile.TemporaryDirectory(prefix="grpo_rl_doctor_") as folder, open(f"{folder}/output", "wb") as log:
        calls = IsolatedCalls(_in_child, workers=1, memory_gib=None, again=False, output=log)

        def run(name: str, module: str, case: Case) -> Iterator[Finding]:
            left = end - time.monotonic()
            if left <= 0:
                yield Finding("SKIP", name, f"the {deadline_s:g} s are over; --deadline-s gives more")
                return
            limit, file = left if name in SLOW else min(left, deadline_s / 2), Path(folder, "findings")
            log.truncate(log.seek(0))
            file.write_text("")
            try:
                calls.start()  # no part of the check's time
                [error] = calls.map([(name, module, case, limit, str(file))], limit + STACK_S)
            except (RuntimeError, OSError) as failure:  # no process can be started
                error = failure
            yield from (Finding(**json.loads(line)) for line in file.read_text().rpartition("\n")[0].splitlines())
            output = Path(log.name).read_text(errors="replace")
            if isinstance(error, TimeoutError):
                stack = FRAME.search(output.rpartition("(most recent call first)")[2])  # the main thread's is the last
                place = f", at {Path(stack[1]).name}:{stack[2]} ({stack[3]})" if stack else ""
                text = f"no result within {limit:.0f} s{place}; if it is only slow, --deadline-s gives more"
                yield Finding("FIX", name, text)
            elif error:
                words = [line.strip() for line in output.splitlines() if line.strip()]
                yield Finding("FIX", name, f"{error}{f'; its last output: {words[-1][:LONGEST]}' if words else ''}")

        try:
            yield run
        finally:
            calls.close(now=True)
