"""Simulator: the asynchronous loop over simulated engines, in simulated time.

Staleness manager, rollout scheduler and fleet are those of a real run; an engine is a rate at which responses grow, the
trainer a number of tokens a second. The outcome is how long each side waits and how old responses get.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_rl.cluster.fleet import Fleet
from grpo_rl.collectors.rollout_scheduler import RolloutScheduler, StalenessManager
from grpo_rl.engines.base import EngineDeadError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulation import virtual_time

Z99 = 2.3263478740408408
"""The 99 % quantile of the standard normal distribution."""


@dataclass(frozen=True)
class LogNormal:
    """Log-normal lengths of responses, in tokens.

    Args:
        p99_over_median: 1 in 100 is longer than this many medians; 1: all are alike.
        limit: none is longer.

    Raises:
        ValueError: a number is out of range.

    >>> lengths, rng = LogNormal(median=100, p99_over_median=8), random.Random(0)
    >>> sizes = sorted(lengths(rng) for _ in range(10001))
    >>> 95 < sizes[5000] < 105, 7 < sizes[9900] / sizes[5000] < 9
    (True, True)
    """

    median: float
    p99_over_median: float = 1.0
    limit: float = math.inf

    def __post_init__(self) -> None:
        if not (self.median >= 1 and self.p99_over_median >= 1 and self.limit >= 1):
            raise ValueError(f"{self}: median, p99_over_median and limit must be 1 or more")

    def __call__(self, rng: random.Random) -> int:
        drawn = self.median * self.p99_over_median ** (rng.gauss() / Z99)
        return round(min(max(1.0, drawn), self.limit))


@dataclass(frozen=True)
class SimulatorConfig:
    """The loop that is simulated. Times are in seconds.

    Args:
        slots: responses that an engine computes at a time; more wait.
        token_s: time of a decoding step, whatever it computes.
        token_s_per_response: seconds that each response in a decoding step adds to its time.
        train_tokens_per_s: response tokens that all trainers together train on in a second.
        push_s: time of a weight push, in which engines stand still and keep what they are at.
        max_staleness: the bound, in versions; 0 samples and trains in turns.
        steps: training steps that count.
        margin: steps before them, and groups for as many after them, that do not: neither the rush at the beginning nor
            the lull at the end is measured.
        deaths: times at which an engine dies, and its number.
        launch_s: time until a new engine is ready in its place.
    """

    engines: int = 8
    slots: int = 256
    token_s: float = 0.01
    token_s_per_response: float = 5e-5
    lengths: Callable[[random.Random], int] = LogNormal(median=512, p99_over_median=8)
    group_size: int = 8
    groups_per_step: int = 64
    train_tokens_per_s: float = 5e4
    push_s: float = 1.0
    max_staleness: int = 2
    steps: int = 30
    margin: int = 0
    deaths: Sequence[tuple[float, int]] = ()
    launch_s: float = 60.0
    max_restarts: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a simulation; fractions are of its time.

    Args:
        seconds: simulated time, from the first sample, or the end of the margin, to the end of the last push.
        waiting: fraction in which the trainer waited for responses.
        training: fraction in which it trained.
        idle: fraction in which an engine had nothing to sample, or was dead, mean over engines.
        staleness_max: versions between the oldest token of a response and the version that was trained on it.
    """

    seconds: float
    responses: int
    waiting: float
    training: float
    idle: float
    staleness_max: int
    staleness_mean: float
    started: int
    trained: int
    dropped: dict[str, int]
    left: int
    restarts: int

    @property
    def responses_per_s(self) -> float:
        return self.responses / self.seconds


def simulate(config: SimulatorConfig) -> Outcome:
    """The outcome of the asynchronous loop in simulated time.

    Raises:
        EngineDeadError: engines died too often.

    With responses of one length and equal phases, overlapping them doubles what taking turns gives:

    >>> from dataclasses import replace
    >>> even = SimulatorConfig(engines=1, slots=8, lengths=LogNormal(100), group_size=4, groups_per_step=2,
    ...                        token_s=0.01, token_s_per_response=0.0, train_tokens_per_s=800.0, push_s=0.0, steps=50)
    >>> both, turns = simulate(even), simulate(replace(even, max_staleness=0))
    >>> round(both.responses_per_s / turns.responses_per_s, 1), turns.waiting
    (2.0, 0.5)
    """
    return virtual_time.run(_simulate(config))


@dataclass(eq=False)
class _Group:
    """A group in an engine: ``left`` of its responses are not complete; the first was begun under ``version``."""

    tokens: int
    version: int
    left: int
    complete: asyncio.Future[None]


async def _simulate(config: SimulatorConfig) -> Outcome:
    loop, rng = asyncio.get_running_loop(), random.Random(config.seed)
    engines: dict[int, SimulatedEngine] = {}
    replaced_idle_s = 0.0
    staleness = StalenessManager(config.groups_per_step, config.max_staleness)

    async def launch(number: int) -> SimulatedEngine:
        nonlocal replaced_idle_s
        if number in engines:
            await asyncio.sleep(config.launch_s)
            replaced_idle_s += engines[number].idle_s()  # dead until now
        engines[number] = SimulatedEngine(number, config)
        return engines[number]

    def idle_s() -> float:
        return replaced_idle_s + sum(engine.idle_s() for engine in engines.values())

    fleet = Fleet(launch, config.engines, config.max_restarts)
    lengths = (
        [config.lengths(rng) for _ in range(config.group_size)]
        for _ in range(config.groups_per_step * (config.steps + 2 * config.margin))
    )
    scheduler = RolloutScheduler(
        staleness, lambda: next(lengths, None), lambda group: fleet.call(lambda e: e.group(group), len(group))
    )

    held: set[SimulatedEngine] = set()  # those that have weights

    async def push(new_engines: bool = False) -> None:
        version = staleness.version if new_engines else staleness.version + 1

        async def one(engine: SimulatedEngine) -> None:
            try:
                await engine.update(version)
            except EngineDeadError as error:
                await fleet.lose(engine, error)
                return
            held.add(engine)
            await fleet.admit([engine])

        engines = [engine for engine in await fleet.present() if not new_engines or engine not in held]
        await asyncio.gather(*map(one, engines))

    async def batch() -> list[_Group]:
        """The next batch; meanwhile engines that join are given weights."""
        task = asyncio.ensure_future(scheduler.batch())
        try:
            while not task.done():
                joined = asyncio.ensure_future(fleet.new_engine())
                await asyncio.wait({task, joined}, return_when=asyncio.FIRST_COMPLETED)
                if joined.done():
                    joined.result()
                    await push(new_engines=True)
                joined.cancel()
            return task.result()
        finally:
            task.cancel()

    await fleet.start()
    await push(new_engines=True)
    deaths = [loop.call_later(at, lambda i=number: engines[i].die()) for at, number in config.deaths]
    start = waited = trained_s = idle_before = 0.0
    responses, stale = 0, []
    for step in range(-config.margin, config.steps):
        if step <= 0:
            start, waited, trained_s, responses, stale = loop.time(), 0.0, 0.0, 0, []
            idle_before = idle_s()
        asked = loop.time()
        groups = await batch()
        waited += loop.time() - asked
        stale += [staleness.version - group.version for group in groups]
        responses += len(groups) * config.group_size
        train_s = sum(group.tokens for group in groups) / config.train_tokens_per_s
        await asyncio.sleep(train_s)
        trained_s += train_s
        await push()
        scheduler.advance(staleness.version + 1)
    seconds = loop.time() - start
    for death in deaths:
        death.cancel()
    staleness.check()
    idle = (idle_s() - idle_before) / (seconds * config.engines)
    await scheduler.close()
    await fleet.close()
    return Outcome(
        seconds=seconds,
        responses=responses,
        waiting=waited / seconds,
        training=trained_s / seconds,
        idle=idle,
        staleness_max=max(stale),
        staleness_mean=sum(stale) / len(stale),
        started=staleness.started,
        trained=staleness.trained,
        dropped=dict(staleness.dropped),
        left=len(staleness.open),
        restarts=fleet.restarts,
    )


class SimulatedEngine:
    """An engine with continuous batching: all responses in its slots grow alike, the slower the more there are."""

    def __init__(self, number: int, config: SimulatorConfig) -> None:
        self.number, self.version = number, 0
        self._config, self._loop = config, asyncio.get_running_loop()
        # A response ends when the engine's progress, in tokens, has come to its first number; its second tells it from
        # others that end there.
        self._growing: list[tuple[float, int, _Group]] = []
        self._waiting: deque[tuple[int, _Group]] = deque()
        self._progress, self._since, self._count = 0.0, self._loop.time(), 0
        self._idle_s = 0.0
        self._paused, self._dead = False, False
        self._timer: asyncio.TimerHandle | None = None

    async def group(self, lengths: Sequence[int]) -> _Group:
        """Samples responses of these lengths.

        Raises:
            EngineDeadError: it is dead, or dies meanwhile.
        """
        if self._dead:
            raise EngineDeadError(f"engine {self.number} is dead")
        group = _Group(sum(lengths), self.version, len(lengths), self._loop.create_future())
        self._advance()
        self._waiting.extend((length, group) for length in lengths)
        self._settle()
        await group.complete
        return group

    async def update(self, version: int) -> None:
        """Stands still for the time of a push; responses go on under the new version."""
        if self._dead:
            raise EngineDeadError(f"engine {self.number} is dead")
        self._advance()
        self._paused = True
        self._settle()
        await asyncio.sleep(self._config.push_s)
        self._advance()
        self._paused, self.version = False, version
        self._settle()

    def die(self) -> None:
        """Loses what it was sampling."""
        self._advance()
        self._dead = True
        for group in [group for _, _, group in self._growing] + [group for _, group in self._waiting]:
            if not group.complete.done():
                group.complete.set_exception(EngineDeadError(f"engine {self.number} died"))
        self._growing, self._waiting = [], deque()
        self._settle()

    async def close(self) -> None:
        """Frees nothing: there is nothing."""

    def idle_s(self) -> float:
        """The seconds in which it had nothing to sample, or was dead."""
        self._advance()
        return self._idle_s

    def _rate(self) -> float:
        """The tokens that each response grows by in a second."""
        if self._paused or not self._growing:
            return 0.0
        return 1 / (self._config.token_s + self._config.token_s_per_response * len(self._growing))

    def _advance(self) -> None:
        """Brings the progress up to now; to be called before anything changes."""
        now = self._loop.time()
        self._progress += self._rate() * (now - self._since)
        if not self._growing:
            self._idle_s += now - self._since
        self._since = now

    def _settle(self) -> None:
        """Fills the slots, and waits for the response that ends next."""
        while self._waiting and len(self._growing) < self._config.slots:
            length, group = self._waiting.popleft()
            self._count += 1
            heapq.heappush(self._growing, (self._progress + length, self._count, group))
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if rate := self._rate():
            self._timer = self._loop.call_later((self._growing[0][0] - self._progress) / rate, self._on_end)

    def _on_end(self) -> None:
        self._advance()
        self._progress = max(self._progress, self._growing[0][0])  # not a rounding away from it
        while self._growing and self._growing[0][0] <= self._progress:
            group = heapq.heappop(self._growing)[2]
            group.left -= 1
            if not group.left and not group.complete.done():
                group.complete.set_result(None)
        self._settle()
