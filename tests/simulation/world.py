"""World: the decisions of a seed, how the run is set up, how long everything takes, what fails where; and the trace."""

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulation.clock import Process
from simulation.disk import Disk, damaged

OFTEN = {
    "crash of an engine": 0.02,
    "crash of an engine that starts": 0.15,
    "crash of a node": 0.02,
    "engine hangs": 0.02,
    "slow engine": 0.2,
    "weights damaged in a push": 0.02,
    "message late": 0.01,
    "message doubled": 0.1,
    "crash of the trainer": 0.02,
    "crash of the trainer in a push": 0.02,
    "crash of the trainer while it writes": 0.02,
    "power cut": 0.02,
    "disk full": 0.02,
    "checkpoint damaged": 0.7,
    "crash of a scorer": 0.1,
    "scorer hangs": 0.05,
    "clock jumps": 0.01,
}
"""Every kind of fault, with the chance of it wherever it can happen, in a seed that has it."""
OF_ENGINES = ("crash of an engine", "crash of an engine that starts", "crash of a node", "engine hangs", "message late")
"""Faults for which an engine may be replaced."""
BY_TIME = ("clock jumps", "crash of a node", "crash of the trainer", "power cut")
"""Faults that come with time."""
MOST_FAULTS = 12
"""Faults of a seed, and half of those of a long one; after them the run must get to its end."""
LONG_EVERY = 12
"""Every twelfth seed is of a long and wide run, in which many groups live on after their engine was replaced."""
RARER = 0.3
"""Chances of faults in long runs and in half of the others, over those in the rest: not all come in the first steps."""
LAST_EVENTS = 25
"""Events that are shown of a seed that fails."""


@dataclass(frozen=True)
class Setup:
    """The setup of a seed's run; the names are those of the settings."""

    engines: int
    num_envs: int
    max_staleness: int
    epochs: int
    groups_per_batch: int
    checkpoint_frequency: int
    steps: int
    drops_zero_variance: bool
    group_size: int = 2

    @property
    def responses(self) -> int:
        """Responses of the whole run."""
        return self.steps * self.num_envs * self.group_size


class World:
    """The decisions of a seed, over all lives of the process that trains.

    Args:
        root: the run's folder.
        keeps_all: whether :attr:`events` keeps every event, not the last ones alone.
        setup: of the run; None: the seed decides.
    """

    most_lives = 30
    """Lives of the trainer after which a run should long be over: faults are fewer."""
    patience_s = 2000.0
    """Virtual seconds in which a step, or a start, must be over: more than all deadlines and retries in a row."""
    engine_start_s = 60.0
    """Seconds until an engine must be ready."""

    def __init__(self, seed: int, root: Path, keeps_all: bool = False, setup: Setup | None = None) -> None:
        self.seed, self._rng = seed, random.Random(seed)
        draw = self._rng
        is_long = seed % LONG_EVERY == LONG_EVERY - 1
        num_envs = draw.randint(*((3, 6) if is_long else (1, 3)))
        drawn = Setup(
            engines=draw.randint(*((2, 4) if is_long else (1, 3))),
            num_envs=num_envs,
            max_staleness=draw.randint(0, 3),
            epochs=draw.randint(1, 2),
            groups_per_batch=draw.randint(1, num_envs),
            checkpoint_frequency=draw.randint(1, 3),
            steps=draw.randint(*((8, 14) if is_long else (2, 5))),
            drops_zero_variance=draw.random() < 0.5,
        )
        self.setup = setup or drawn
        # A seed with few kinds of faults finds what many at once would hide.
        share = draw.choice([0.2, 0.5, 1.0])
        self._chances = {kind: chance if draw.random() < share else 0.0 for kind, chance in OFTEN.items()}
        if draw.random() < 0.5 or is_long:
            self._chances |= {kind: RARER * self._chances[kind] for kind in OFTEN if kind != "checkpoint damaged"}
        self._left = draw.randint(1, MOST_FAULTS) * (1 + is_long)
        self.faults: Counter[str] = Counter()
        self.faults_of_life: Counter[str] = Counter()
        """Faults since the trainer was started last."""
        self.events: deque[str] = deque(maxlen=None if keeps_all else LAST_EVENTS)
        self._digest = hashlib.sha256()
        self.disk = Disk(root, draw, self._before_write)
        self.process: Process | None = None
        self.actors: list[Any] = []
        """Actors (`simulation.engines.SimulatedActor`) that were started in this life."""
        self._cuts_power = False
        self.life = 0
        self.rows: dict[int, int] = {}
        """The row of each group whose prompt was given out in any life."""
        self.left: dict[str, bytes] | None = None
        """The files that the last kill has left of the run's folder, until the next life."""
        self.unscored: set[int] = set()
        """Rows of which a scorer has failed at least once."""
        self.on_sampling: Callable[[Any, int, Future[Any]], None] = lambda actor, group_id, call: None
        """Called with the actor, the group and the call when an engine is asked to sample a group."""

    def now(self) -> float:
        """Virtual seconds since the simulation's beginning."""
        return self.process.now() if self.process else 0.0

    def tell(self, event: str) -> None:
        """Adds to the trace; nothing that comes after a kill is a part of it."""
        if self.process and self.process.killed:
            return
        event = event.replace(str(self.disk.root), "RUN")  # whose name is another at each replay
        line = f"{self.now():10.3f} s  life {self.life}  {event}"
        self.events.append(line)
        self._digest.update(line.encode())

    @property
    def digest(self) -> str:
        """SHA-256 of the trace so far."""
        return self._digest.hexdigest()

    def happens(self, kind: str, where: str = "") -> bool:
        """Decides whether a fault happens here, and counts it."""
        chance = self._chances[kind]
        if not (chance and self._left and self.process and not self.process.killed) or self._rng.random() >= chance:
            return False
        self._left -= 1
        self.count(kind, where)
        return True

    def count(self, kind: str, where: str = "") -> None:
        """Counts a fault, and tells of it."""
        self.faults[kind] += 1
        self.faults_of_life[kind] += 1
        self.tell(f"FAULT {kind}{': ' if where else ''}{where}")

    def seconds(self, mean: float) -> float:
        """Draws the seconds that something takes: mostly near the mean, sometimes several times that."""
        return self._rng.expovariate(1 / mean) if self._rng.random() < 0.3 else mean * self._rng.uniform(0.5, 1.5)

    def token_s(self, groups: int) -> float:
        """Draws how long a token takes on an engine that samples so many groups."""
        return self.seconds(0.5)

    def launch_s(self) -> float:
        """Draws how long an engine takes to start."""
        return self.seconds(5.0)

    def restart_s(self) -> float:
        """Draws how long it takes until the trainer runs again, engines aside."""
        return self.seconds(10.0)

    def train_s(self) -> float:
        """Draws how long an optimizer step takes."""
        return self.seconds(1.0)

    def checkpoint_s(self) -> float:
        """Seconds that a checkpoint takes."""
        return 0.0

    def begin_step(self) -> None:
        """Plans faults of this step alone."""

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Calls a function once so many virtual seconds have passed, unless the process is gone."""
        process = self.process
        process.call_later(seconds, lambda: process.killed or call())

    # The process that trains.

    def begin_life(self, process: Process) -> None:
        """Begins another life of the process that trains; engines of an earlier one died with it."""
        self.process, self.actors, self._cuts_power = process, [], False
        self.faults_of_life = Counter()
        self.life += 1
        self.tell("the trainer starts")
        self._schedule_timed_faults()

    def _schedule_timed_faults(self) -> None:
        # A timer that goes on for ever would hide that nothing else does.
        if self._left and any(self._chances[kind] for kind in BY_TIME):
            self.later(self.seconds(3.0), self._inject_timed_faults)

    def _inject_timed_faults(self) -> None:
        """Draws the faults that come with time, every few seconds."""
        if self.happens("clock jumps"):
            self.jump_clock()
        nodes = sorted({actor.node for actor in self.actors if actor.alive})
        if nodes and self.happens("crash of a node"):
            node = self._rng.choice(nodes)
            for actor in self.actors:
                if actor.node == node:
                    actor.die()
        if self.happens("crash of the trainer"):
            self.kill_trainer()
        if self.happens("power cut"):
            self._cuts_power = True
            self.kill_trainer()
        self._schedule_timed_faults()

    def jump_clock(self) -> None:
        """Sets the wall clock, forward or back; the monotonic one goes on."""
        self.process.wall_jump_s += self._rng.choice([-1e6, -3600.0, 3600.0, 1e6])

    def kill_trainer(self) -> None:
        """Kills the process that trains, where it stands now."""
        self.process.ask_to_kill()

    def _before_write(self, what: str, path: Path) -> None:
        where = f"{what} {path.name}"
        self.process.check()
        if self.happens("disk full", where):
            raise OSError(28, "No space left on device")
        self._cuts_power = self.happens("power cut", where)
        if self._cuts_power or self.happens("crash of the trainer while it writes", where):
            self.process.kill()

    def take_what_is_left(self) -> None:
        """Keeps what the kill leaves of the run's folder; called at its very moment."""
        self.tell("the power is cut" if self._cuts_power else "the trainer is killed")
        self.left = self.disk.after_power_cut() if self._cuts_power else self.disk.after_kill()

    def put_back(self) -> None:
        """Makes the folder hold what the kill has left."""
        self.disk.put(self.left)
        self.left = None

    # Data.

    def give_out(self, group_id: int, row: int) -> None:
        """Takes note of a prompt that was given out."""
        before = self.rows.setdefault(group_id, row)
        assert before == row, f"group {group_id} was of row {before} before the resume, and is of row {row} after it"

    def damage_newest(self) -> str | None:
        """Damages the newest of several checkpoints and returns its path; None where it leaves them as they are."""
        left = self.left
        checkpoints = sorted(name for name in left if name.startswith("checkpoints/") and name.endswith(".pt"))
        # Beside the other faults, as it does not keep a run from its end: only kills are followed by one.
        if len(checkpoints) < 2 or self._rng.random() >= self._chances["checkpoint damaged"]:
            return None
        self.count("checkpoint damaged", checkpoints[-1])
        left[checkpoints[-1]] = damaged(left[checkpoints[-1]], self._rng)
        return checkpoints[-1]
