"""The share of time that is training while parts of a run fail: the simulated run with times that were measured.

The share is the time that the run's steps take to be trained once, forward, backward and optimizer, over the time from
the first start of the trainer to the end of the last step. Whatever else takes time counts against it: starting,
steps that are trained again after a crash, waiting for groups, pushes, checkpoints.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulation.simulation import outcome_of, run_folder
from simulation.world import Setup, World

ROLES = ("trainer", "engine", "scorer")


@dataclass(frozen=True)
class Failures:
    """The setup of a run whose parts fail, and the seconds that everything takes.

    Args:
        chance: of a failure in each step, at a time drawn evenly over ``step_s`` after its groups were collected.
        roles: parts that fail, each as often as the others. A scorer that fails costs its group's reward and no time.
        step_s: training of a step: forward, backward, optimizer.
        sample_s: sampling of a group, as long as an engine has no more than its part of all groups.
        engine_s: until a new engine is ready: 25 s of vLLM's import and 46 s of its start, as measured on an H100.
        trainer_s: until a new trainer asks for engines: 30 s for its imports and its model, and 13 s of compilation, as
            measured in the first step of a quickstart on an H100.
        checkpoint_s: a checkpoint's time, in which nothing is trained: one of 0.6B parameters has 7 GB.
        checkpoint_frequency: steps between checkpoints.
    """

    step_s: float = 300.0
    chance: float = 0.1
    roles: tuple[str, ...] = ROLES
    sample_s: float = 240.0
    engine_s: float = 71.0
    trainer_s: float = 43.0
    checkpoint_s: float = 10.0
    checkpoint_frequency: int = 1
    engines: int = 4
    groups: int = 8
    max_staleness: int = 2
    steps: int = 200
    seed: int = 0


class FailingWorld(World):
    """A world in which nothing happens but the failures that are asked for."""

    most_lives = 10_000

    def __init__(self, root: Path, failures: Failures) -> None:
        setup = Setup(
            engines=failures.engines,
            num_envs=failures.groups,
            max_staleness=failures.max_staleness,
            epochs=1,
            groups_per_batch=failures.groups,
            checkpoint_frequency=failures.checkpoint_frequency,
            steps=failures.steps,
            drops_zero_variance=False,
        )
        super().__init__(failures.seed, root, setup=setup)
        self._chances = dict.fromkeys(self._chances, 0.0)
        self._failures, self._fails_next_score = failures, False
        self.patience_s = 100 * failures.step_s
        self.engine_start_s = 1800.0
        self._full = failures.groups * (failures.max_staleness + 1) / failures.engines

    def happens(self, kind: str, where: str = "") -> bool:
        """See :meth:`World.happens`."""
        if kind != "crash of a scorer" or not self._fails_next_score:
            return False
        self._fails_next_score = False
        return True

    def begin_step(self) -> None:
        """See :meth:`World.begin_step`."""
        draw = self._rng
        if draw.random() >= self._failures.chance:
            return
        role, at_s = draw.choice(self._failures.roles), draw.uniform(0.0, self._failures.step_s)
        self.later(at_s, lambda: self._fail(role))

    def _fail(self, role: str) -> None:
        kind = f"crash of {'an' if role == 'engine' else 'the'} {role}"
        self.count(kind)
        if role == "trainer":
            self.kill_trainer()
        elif role == "scorer":
            self._fails_next_score = True
        elif alive := [actor for actor in self.actors if actor.alive]:
            self._rng.choice(alive).die()

    def seconds(self, mean: float) -> float:
        """See :meth:`World.seconds`."""
        return mean * self._rng.uniform(0.9, 1.1)

    def token_s(self, groups: int) -> float:
        """See :meth:`World.token_s`; a group has two responses of one or two tokens, three in the mean."""
        return self.seconds(self._failures.sample_s / 3) * max(1.0, groups / self._full)

    def launch_s(self) -> float:
        """See :meth:`World.launch_s`."""
        return self.seconds(self._failures.engine_s)

    def restart_s(self) -> float:
        """See :meth:`World.restart_s`."""
        return self.seconds(self._failures.trainer_s)

    def train_s(self) -> float:
        """See :meth:`World.train_s`; a step is one optimizer step."""
        return self._failures.step_s

    def checkpoint_s(self) -> float:
        """See :meth:`World.checkpoint_s`."""
        return self._failures.checkpoint_s


@dataclass(frozen=True)
class Share:
    """A run whose parts failed: how often, and what share of its time was training."""

    failures: Failures
    failed: dict[str, int]
    seconds: float

    @property
    def share(self) -> float:
        """Training of all steps, once, over all of the time."""
        return self.failures.steps * self.failures.step_s / self.seconds


def share_of(failures: Failures) -> Share:
    """The share of training in a run whose parts fail.

    Raises:
        RuntimeError: an invariant was broken.
    """
    with run_folder() as root:
        outcome = outcome_of(FailingWorld(root, failures))
    if outcome.error:
        raise RuntimeError("\n".join([*outcome.events, outcome.error]))
    return Share(failures, dict(outcome.faults), outcome.seconds)


CASES = (
    (60.0, "any role", 1),
    (300.0, "nothing", 1),
    (300.0, "any role", 1),
    (300.0, "the trainer", 1),
    (600.0, "any role", 1),
    (600.0, "the trainer", 1),
    (300.0, "any role", 5),
    (300.0, "the trainer", 5),
)
"""Seconds of a step, what fails in one of ten steps, and steps between checkpoints."""


def table(steps: int, runs: int, show: Callable[[str], None] = print) -> None:
    """Prints the shares of :data:`CASES`, each of several runs of so many steps."""
    show("a step | in 10 % of steps fails | steps between checkpoints | failures | share of training")
    for step_s, who, frequency in CASES:
        failures = Failures(
            step_s=step_s,
            sample_s=0.8 * step_s,
            chance=0.0 if who == "nothing" else 0.1,
            roles=("trainer",) if who == "the trainer" else ROLES,
            checkpoint_frequency=frequency,
            steps=steps,
        )
        found = [share_of(replace(failures, seed=seed)) for seed in range(runs)]
        failed = sum((Counter(one.failed) for one in found), Counter())
        share = runs * steps * step_s / sum(one.seconds for one in found)
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(failed.items())) or "none"
        show(f"{step_s:.0f} s | {who} | {frequency} | {counts} | {100 * share:.1f} %")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--runs", type=int, default=3, help="of each case")
    options = parser.parse_args()
    table(options.steps, options.runs, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
