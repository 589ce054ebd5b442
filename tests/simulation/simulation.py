"""Simulation: one seed's run from its start to its end, through as many lives of the trainer as it takes."""

import errno
import io
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from grpo_rl.engines.base import EngineDeadError, Sampling
from grpo_rl.run.folder import Room, RunFolder
from grpo_rl.run.held_out import HeldOut
from grpo_rl.run.run import Run, RunOptions
from grpo_rl.settings.sections import Evaluate, Train
from grpo_rl.weights.push import WeightDeliveryError
from simulation.clock import Killed, Process, lived_by
from simulation.invariants import Invariants
from simulation.parts import simulated_parts, simulated_ray
from simulation.stand_ins import STEPPED, AtOnce, Diagnosis, Logs, config_of
from simulation.violation import Violation
from simulation.world import OF_ENGINES, World

ENDS = {
    Killed: (
        "crash of the trainer",
        "crash of the trainer in a push",
        "crash of the trainer while it writes",
        "power cut",
    ),
    OSError: ("disk full",),
    WeightDeliveryError: ("weights damaged in a push",),
    EngineDeadError: OF_ENGINES,
    SystemExit: OF_ENGINES,
}
"""Errors that may end a life of the trainer, with the faults that explain it, of the same life."""
MOST_REPLACED = 3
"""Engines of one slot that a fleet replaces; each of them, and the last, takes a fault."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a seed.

    Args:
        error: what was wrong, in a line; None: nothing.
        events: the last events, or all.
        digest: SHA-256 of the trace; the same seed has the same one.
        lives: starts of the trainer.
        seconds: virtual seconds.
    """

    seed: int
    error: str | None
    events: tuple[str, ...]
    digest: str
    lives: int
    seconds: float
    faults: Counter[str]
    trained: int
    dropped: Counter[str]


def simulate(seed: int, keeps_all: bool = False) -> Outcome:
    """The outcome of a seed, always the same one.

    >>> simulate(0).digest == simulate(0).digest
    True
    """
    with run_folder() as root:
        return outcome_of(World(seed, root, keeps_all))


@contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder for a run, in memory where there is such a place."""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="faults-", dir=shared) as folder:
        root = Path(folder, "run")
        root.mkdir()
        yield root


def outcome_of(world: World) -> Outcome:
    """The outcome of a world, from the run's start to its end."""
    invariants, error = Invariants(world), None
    try:
        writer = mock.patch("grpo_rl.run.folder.Background", AtOnce)
        with world.disk.watched(), simulated_ray(world), writer, redirect_stderr(io.StringIO()):
            while not _live(world, invariants):
                if world.life == world.most_lives:
                    raise Violation(f"the run is not over after {world.most_lives} lives")
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Outcome(
        world.seed,
        error,
        tuple(world.events),
        world.digest,
        world.life,
        world.now(),
        world.faults,
        invariants.trained,
        invariants.dropped,
    )


def _live(world: World, invariants: Invariants) -> bool:
    """One life of the process that trains; returns whether the run is over."""
    begun_s = world.now() + (world.restart_s() if world.life else 0.0)
    process = Process(begun_s, invariants.after_turn, world.take_what_is_left)
    world.begin_life(process)
    if world.left is not None:  # by a kill
        damaged = world.damage_newest()
        world.put_back()
        invariants.lost(damaged)
    try:
        with lived_by(process):
            _train(world, invariants)
        return True
    except tuple(ENDS) as error:
        causes = next(causes for kind, causes in ENDS.items() if isinstance(error, kind))
        # A start that takes longer than it may is not tried again where no other engine runs.
        needed = MOST_REPLACED + 1 if causes is OF_ENGINES and "was not ready within" not in str(error) else 1
        happened = sum(world.faults_of_life[kind] for kind in causes)
        if happened < needed or (isinstance(error, OSError) and error.errno != errno.ENOSPC):
            raise Violation(f"the run ended with {happened} faults of {', '.join(causes)}: {error!r}") from error
        if isinstance(error.__cause__, AssertionError):
            raise Violation(f"an engine met what it may not: {error.__cause__}") from error
        world.tell(f"the run ends: {type(error).__name__}")
        return False
    finally:
        invariants.end()
        process.end()


def _train(world: World, invariants: Invariants) -> None:
    """A run in the folder, from its beginning or from its newest checkpoint, as ``sota/grpo_async.py`` has it."""
    process, setup = world.process, world.setup
    root, text = world.disk.root, config_of(world)
    config = json.loads(text)
    expected = invariants.expected()
    train = Train(total_dialog_turns=setup.responses, checkpoint_frequency=setup.checkpoint_frequency, seed=world.seed)
    resume = str(root) if any(root.iterdir()) else None
    with RunFolder(root, resume, config, text, Room(3, 1e4, 1e4), train) as folder:
        folder.prepare()
        invariants.opened(folder, expected)
        with simulated_parts(world, folder.collected) as (parts, collector):
            logs = Logs(folder.path, config, world.tell, process.now)
            held_out = HeldOut(parts.env, [], Sampling(), Evaluate())
            options = RunOptions(train, 0, "", "", "wait", False, {})
            step_metrics = lambda parts, groups, record: parts.collector.metrics()  # noqa: E731
            others = Diagnosis(), held_out, step_metrics, SimpleNamespace(asked=False), options
            with invariants.watching(parts, collector):
                with Run(folder, logs, parts, *others, hooks=logs.hooks) as run:
                    _loop(run, world, process, invariants)
                invariants.finished(run.step, folder)


def _loop(run: Run, world: World, process: Process, invariants: Invariants) -> None:
    parts, optimizer = run.parts, run.parts.optimizer
    parts.weights.push()
    for groups in _collections(run, invariants):
        invariants.collected(groups)
        world.begin_step()
        parts.buffer.extend(groups)
        for batch in run.optimizer_steps(parts.buffer.batches(world.setup.epochs)):
            process.sleep(world.train_s())
            ids = [group.group_id for group in batch]
            world.tell(f"step {run.step + 1} trains on groups {ids}, started by version {parts.weights.version}")
            optimizer.train(run.step + 1, batch)
            run.add_result(STEPPED)
        parts.weights.push()
        run.finish_step(parts.buffer.drain())
        world.tell(f"step {run.step} is over")
        if run.step % world.setup.checkpoint_frequency == 0:
            process.sleep(world.checkpoint_s())
        invariants.stepped(run.step, run.folder)
    run.save_checkpoint()


def _collections(run: Run, invariants: Invariants) -> Iterator[list[Any]]:
    """The run's collections; what is under way after a resume is checked before the first is asked for."""
    collector, collect = run.parts.collector, run.parts.collector.collect

    def check_and_collect() -> list[Any]:
        collector.collect = collect
        invariants.resumed(run.step, run.folder.restored[1] if run.folder.restored else None)
        return collect()

    collector.collect = check_and_collect
    return run.collections()
