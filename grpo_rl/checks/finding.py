"""Findings: the lines of a check's report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

LONGEST = 500
"""Characters of an error's text that a line shows."""


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Args:
        kind: ``OK``; ``note``, which limits what can be trained; ``FIX``, without which training goes wrong; ``SKIP``:
            it was not looked at.
        about: what was looked at, in a word or two.
        text: what was found, and what to do where it is not in order.
        override: setting without which the model can't be trained.

    >>> print(Finding("OK", "pad token", "none is needed"))
    OK    pad token         none is needed
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
    grpo_rl.checks.finding.Unfit: IndexError: list index out of range
    """
    try:
        yield
    except Unfit:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
        # Errors of these kinds are written for people; of others the kind says most.
        text = text if text and isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {text}"
        raise Unfit(Finding("FIX", about, f"{text}{remedy}")) from error


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
