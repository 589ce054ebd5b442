"""Collector: what the training loop asks for the groups of each step, and the one that gives them to every rank."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from grpo_rl.data.group import Group

if TYPE_CHECKING:
    from torchrl.envs import EnvBase

    from grpo_rl.weights.push import WeightSync


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

    weights: WeightSync | None = None
    """The owner of the policy version, for :meth:`update_policy_weights_`."""

    def collect(self) -> list[Group]:
        """The groups of the next step, of ``env.repeats`` responses each; none where all are sampled."""

    def __iter__(self) -> Iterator[list[Group]]:
        """One collection after the other, until all responses are sampled."""
        while groups := self.collect():
            yield groups

    def update_policy_weights_(self) -> None:
        """Delivers the trainer's weights to the engines, and proves that they have them: a push, `WeightSync.push`."""
        assert self.weights is not None, "the collector was made without weights"
        self.weights.push()

    def state_dict(self) -> dict[str, Any]:
        """The state of the collection, data position included, for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state_dict`."""

    def metrics(self) -> dict[str, float]:
        """Counts of all groups so far, by what became of them."""

    def events(self) -> list[str]:
        """Messages for the user about what has happened since the last call; none by default."""
        return []

    def take_sampled(self) -> list[Sampled]:
        """The groups that engines have sampled since the last call; empty where sampling is a phase of the step."""
        return []

    def shutdown(self) -> None:
        """Ends the sampling that is under way; the engines stay alive."""


def env_state(env: EnvBase) -> dict[str, Any]:
    """The data position and counts of an environment as JSON, and a copy of the state of its transforms, if any."""
    inner = getattr(env, "base_env", env)
    transforms = {} if inner is env else {"transforms": copy.deepcopy(dict(env.state_dict()))}
    return {"env": json.dumps(inner.state_dict())} | transforms


def restore_env(env: EnvBase, state: Mapping[str, Any]) -> None:
    """Goes on from :func:`env_state`; transforms begin anew where there were none then."""
    inner = getattr(env, "base_env", env)
    inner.load_state_dict(json.loads(state["env"]))
    if "transforms" in state and inner is not env:
        env.load_state_dict(state["transforms"])


@contextmanager
def unchanged(env: EnvBase) -> Iterator[None]:
    """An evaluation inside leaves the transforms around the environment as they were."""
    state = copy.deepcopy(dict(env.state_dict())) if getattr(env, "base_env", env) is not env else None
    try:
        yield
    finally:
        if state is not None:
            env.load_state_dict(state)


class BroadcastCollector(Collector):
    """Gives the collections of rank zero's collector to every rank.

    Args:
        collector: rank zero's collector; None on the others.
        weights: gives every rank what work returns on rank zero; the others take part in deliveries while they wait.
        collected: responses sampled before, when a run is resumed.
    """

    def __init__(self, collector: Collector | None, weights: WeightSync, collected: int) -> None:
        self._collector, self.weights, self._on_rank_zero = collector, weights, weights.on_rank_zero
        self.collected, self.sample_s = collected, 0.0
        self.sampled: list[Group] = []
        self._metrics: dict[str, float] = {}

    @override
    def collect(self) -> list[Group]:

        def work() -> tuple[list[Group], list[Group], int, float, dict[str, float]]:
            collector = self._collector
            assert collector is not None
            groups = collector.collect()
            return groups, collector.sampled, collector.collected, collector.sample_s, collector.metrics()

        groups, self.sampled, self.collected, self.sample_s, self._metrics = self._on_rank_zero(work)
        return groups

    @override
    def state_dict(self) -> dict[str, Any]:
        # That of rank zero is what is saved.
        return self._collector.state_dict() if self._collector else {}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._collector:
            self._collector.load_state_dict(state)

    @override
    def metrics(self) -> dict[str, float]:
        return self._metrics

    @override
    def events(self) -> list[str]:
        # Rank zero prints them.
        return self._collector.events() if self._collector else []

    @override
    def take_sampled(self) -> list[Sampled]:
        # Rank zero stores them.
        return self._collector.take_sampled() if self._collector else []

    @override
    def shutdown(self) -> None:
        if self._collector:
            self._collector.shutdown()
