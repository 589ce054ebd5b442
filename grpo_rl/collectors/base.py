"""Collector: the interface between every collector and the training loop, which asks for the groups of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_rl.data.group import Group


@dataclass(frozen=True)
class Sampled:
    """The times at which an engine sampled a group.

    Args:
        version: of the engine's weights when it began.
        begun_s, ended_s: of ``time.perf_counter()``.
    """

    engine: str
    group_id: int
    version: int
    begun_s: float
    ended_s: float


class Collector(Protocol):
    """Hands out the groups of one training step after the other."""

    collected: int
    """Responses sampled so far."""

    sample_s: float
    """Seconds spent waiting for the last collection."""

    sampled: list[Group]
    """All groups of the last collection that had rewards, zero-variance groups that were left out included."""

    def collect(self, group_size: int) -> list[Group]:
        """The groups of the next step, of ``group_size`` responses each; none where all are sampled."""
        ...

    def state(self) -> dict[str, Any]:
        """The state of the collection, data position included, for a checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counts of all groups so far, by what became of them."""
        ...

    def events(self) -> list[str]:
        """Messages for the user about what has happened since the last call."""
        ...

    def take_sampled(self) -> list[Sampled]:
        """The groups that engines have sampled since the last call; empty where sampling is a phase of the step."""
        ...

    def close(self) -> None:
        """Ends the sampling that is under way; the engines stay alive."""
        ...
