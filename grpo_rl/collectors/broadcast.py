"""What ranks without an engine have in its place: rank 0 samples, and all of them get what it sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from grpo_rl.collectors.asynchronous import OverlappedCollector
from grpo_rl.data.group import Group
from grpo_rl.distributed.ranks import Ranks
from grpo_rl.weights.transport import Held

R = TypeVar("R")


class Collector(Protocol):
    """What hands out the groups of one training step after the other."""

    collected: int
    """Answers sampled so far."""

    repeats: int
    """Answers to each of the next prompts."""

    sample_s: float
    """Seconds that the last collection was waited for."""

    sampled: list[Group]
    """All groups of the last collection that had rewards, those left out as rewarded alike included."""

    def collect(self) -> list[Group]:
        """The groups of the next step."""
        ...

    def state(self) -> dict[str, Any]:
        """Where the collection stands, data position included, for a checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state`."""
        ...

    def metrics(self) -> dict[str, float]:
        """What became of all groups so far."""
        ...

    def news(self) -> list[str]:
        """What has happened since the last call that the user should be told."""
        ...


class Led:
    """Work that rank 0 does for all ranks, while the others wait: for its result, or to send weights with it.

    Sharded weights are gathered by all ranks, so that rank 0 alone can't give any to an engine that comes meanwhile.

    Args:
        ranks: all of them; None where one process trains alone.
        deliver: gives weights to such engines; takes all ranks.
    """

    def __init__(self, ranks: Ranks | None, deliver: Callable[[], None]) -> None:
        self.ranks, self._deliver = ranks, deliver

    def __call__(self, work: Callable[[], R]) -> R:
        """What the work returns on rank 0; on others it is not called."""
        if self.ranks is None:
            return work()
        if self.ranks.rank == 0:
            return self.ranks.broadcast(("result", work()))[1]
        while True:
            what, result = self.ranks.broadcast(("", None))
            if what == "result":
                return cast(R, result)
            self._deliver()

    def deliver(self) -> None:
        """Delivers on all ranks; called by rank 0, in the course of its work."""
        if self.ranks:
            self.ranks.broadcast(("deliver", None))
        self._deliver()


class SharedCollector:
    """The collections of rank 0's collector, on every rank.

    Args:
        collector: of rank 0; None on the others.
        led: how they wait for it.
        repeats: answers to each prompt.
        collected: answers sampled before, when a run is resumed.
    """

    def __init__(self, collector: Collector | None, led: Led, repeats: int, collected: int) -> None:
        self._collector, self._led = collector, led
        self.repeats, self.collected, self.sample_s = repeats, collected, 0.0
        self.sampled: list[Group] = []
        self._metrics: dict[str, float] = {}

    def collect(self) -> list[Group]:
        """See :meth:`Collector.collect`."""
        groups, self.sampled, self.collected, self.sample_s, self._metrics = self._led(self._collect)
        return groups

    def _collect(self) -> tuple[list[Group], list[Group], int, float, dict[str, float]]:
        collector = self._collector
        assert collector is not None
        collector.repeats = self.repeats
        return collector.collect(), collector.sampled, collector.collected, collector.sample_s, collector.metrics()

    def state(self) -> dict[str, Any]:
        """See :meth:`Collector.state`; that of rank 0 is what is saved."""
        return self._collector.state() if self._collector else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Collector.restore`."""
        if self._collector:
            self._collector.restore(state)

    def metrics(self) -> dict[str, float]:
        """See :meth:`Collector.metrics`."""
        return self._metrics

    def news(self) -> list[str]:
        """See :meth:`Collector.news`; told by rank 0."""
        return self._collector.news() if self._collector else []

    def advance(self) -> None:
        """See :meth:`grpo_rl.collectors.asynchronous.OverlappedCollector.advance`."""
        if isinstance(self._collector, OverlappedCollector):
            self._collector.advance()

    def close(self) -> None:
        """See :meth:`grpo_rl.collectors.asynchronous.OverlappedCollector.close`."""
        if isinstance(self._collector, OverlappedCollector):
            self._collector.close()


class NoEngine:
    """The transport of a rank that has no engine: sharded weights are gathered by all ranks, and sent by rank 0.

    Args:
        dtype: of the weights that the engine of rank 0 holds.
        takes_adapters: whether it takes them.
    """

    def __init__(self, dtype: torch.dtype, takes_adapters: bool) -> None:
        self.dtype, self.takes_adapters = dtype, takes_adapters

    def fingerprint(self, name: str, tensor: Tensor) -> int:
        """Of what nobody is asked about."""
        return 0

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Held]:
        """Takes part in the gathering of each."""
        deque(weights, maxlen=0)
        return {}

    def held(self, shapes: Mapping[str, torch.Size]) -> dict[str, Held]:
        """Nothing, of no engine."""
        return {}

    @contextmanager
    def paused(self, newcomers: bool = False) -> Iterator[bool]:
        """Nothing to pause; what is sent, rank 0 says."""
        yield False

    def close(self) -> None:
        """Nothing to free."""
