"""Invariants: what has to be true of a run at every moment, whatever has failed."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_rl.collectors.asynchronous import AsyncCollector
from grpo_rl.data.group import Group
from grpo_rl.run.folder import RunFolder
from grpo_rl.run.parts import Parts
from simulation.engines import DEADLINE_S, SimulatedActor
from simulation.in_flight import InFlight
from simulation.stand_ins import has_zero_variance
from simulation.stored import Stored, number_of, steps_of
from simulation.violation import Violation, check_equal
from simulation.world import OF_ENGINES, World

NOTICED_S = 5 * DEADLINE_S
"""Seconds within which an engine that hangs is noticed: several deadlines of a call, one of which may be a push's."""


class Invariants:
    """Checks a run, over all its lives.

    Args:
        world: the seed's decisions, which say what may be missing.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._updates_at: dict[int, int] = {}
        """Optimizer steps that the weights of each policy version have seen."""
        self._most_groups = (world.setup.max_staleness + 1) * world.setup.num_envs
        self._saved = 0
        """The step of the newest checkpoint that must be there after whatever happens."""
        self._damaged: set[str] = set()
        """Names of checkpoints that the disk has damaged."""
        self._parts: Parts | None = None
        self._last_progress_s = 0.0
        self.trained, self.dropped = 0, Counter[str]()
        self._stored, self._in_flight = Stored(world), InFlight(world)

    # Before and after the parts of a life are there.

    def lost(self, newest: str | None) -> None:
        """Takes note of a checkpoint that was damaged by the disk."""
        if newest is not None:
            self._damaged.add(Path(newest).name)
            whole = filter(self._world.disk.is_whole, self._world.disk.root.glob("checkpoints/checkpoint_*.pt"))
            self._saved = max((step for step in steps_of(whole) if step <= self._saved), default=0)

    def expected(self) -> Path | None:
        """The checkpoint that a run in the folder has to go on with: the newest whole one that the metrics reach."""
        root = self._world.disk.root
        metrics = root / "metrics.jsonl"
        lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []  # the last one may be cut
        logged = max((json.loads(line)["step"] for line in lines), default=0)
        for path in sorted(root.glob("checkpoints/checkpoint_*.pt"), reverse=True):
            step = number_of(path)
            if not self._world.disk.is_whole(path) and path.name not in self._damaged:
                raise Violation(f"{path.name} has its name and is not whole, though no disk has damaged it")
            if step <= logged and self._world.disk.is_whole(path):
                if step < self._saved:
                    raise Violation(f"the checkpoint of step {self._saved} was safe, and the newest is of step {step}")
                return path
        if self._saved:
            raise Violation(f"the checkpoint of step {self._saved} was safe, and there is none")
        return None

    def opened(self, folder: RunFolder, expected: Path | None) -> None:
        """Checks what a run has found in its folder; called when its logs are those of the checkpoint."""
        found = folder.restored[0] if folder.restored else None
        check_equal(found, expected, "the run goes on with another checkpoint")
        trained = folder.restored[1]["optimizer"]["trained"].tolist() if folder.restored else []
        self._stored.check(folder.path, folder.step, [(step, group_id) for step, group_id in trained])
        self._in_flight.opened(folder.step)

    @contextmanager
    def watching(self, parts: Parts, collector: AsyncCollector) -> Iterator[None]:
        """Watches the parts of a life, until they are closed."""
        self._parts, self._collector, self._last_version = parts, collector, parts.weights.version
        self._held: dict[int, int] = {}
        self._last_progress_s = self._world.now()
        self._in_flight.begin(parts.engine.fleet, collector, parts.env)
        parts.weights.subscribe(self._pushed)
        try:
            yield
        finally:
            self._in_flight.end()

    def end(self) -> None:
        """Ends watching: the life is over."""
        self._parts = None
        self._last_progress_s = self._world.now()

    # At every moment.

    def after_turn(self) -> None:
        """Checks what can be seen between two turns of the event loop."""
        if self._world.now() - self._last_progress_s > self._world.patience_s:
            raise Violation(f"no step in {self._world.patience_s:g} s: something waits without a deadline")
        if self._parts is None or self._world.process is None or self._world.process.killed:
            return
        staleness, weights = self._collector.staleness, self._parts.weights
        staleness.check()
        if (held := len(staleness.open) + staleness._in_training) > self._most_groups:
            raise Violation(f"{held} groups are open or in training, and the bound allows {self._most_groups}")
        if weights.version < self._last_version:
            raise Violation(f"the policy version fell from {self._last_version} to {weights.version}")
        self._last_version = weights.version
        replaced = 0  # in this life; the fleet's own count goes on from the checkpoint's
        for slot in self._parts.engine.fleet._slots:
            replaced += max(0, slot.launches - 1)
            actor: SimulatedActor | None = getattr(slot.engine, "_actor", None)
            if actor is not None and actor.alive:
                self._holds(actor, staleness.version)
        if replaced and not any(self._world.faults_of_life[kind] for kind in OF_ENGINES):
            raise Violation(f"{replaced} engines were replaced, and no fault had happened to any")
        self._in_flight.check(replaced)

    def _holds(self, actor: SimulatedActor, version: int) -> None:
        """Checks an engine that groups are given to."""
        engine = actor.engine
        if actor.silent_s > NOTICED_S:
            raise Violation(f"{engine.name} has not answered for {actor.silent_s:.0f} s, and nobody has noticed")
        before = self._held.get(id(actor), engine.version)
        if engine.version not in (before, before + 1):
            raise Violation(f"{engine.name} went from version {before} to {engine.version}")
        self._held[id(actor)] = engine.version
        if engine.version < version:
            raise Violation(f"{engine.name} samples with version {engine.version}, and the run is at {version}")

    # By the thread that trains.

    def _pushed(self, version: int) -> None:
        updates = int(self._parts.policy.model.steps.item())
        if self._updates_at.get(version, updates) != updates:
            raise Violation(
                f"version {version} stood for {self._updates_at[version]} optimizer steps, and now for {updates}"
            )
        self._world.tell(f"version {version} is pushed")
        self._updates_at = {v: u for v, u in self._updates_at.items() if v < version} | {version: updates}

    def resumed(self, step: int, restored: Mapping[str, Any] | None) -> None:
        """Checks what is under way when a run goes on after this step, with the state that was restored."""
        check_equal(self._parts.weights.version, step + 1, "the first push after a resume has another version")
        self._accounts(())
        self._in_flight.resumed(step, restored, self._world.disk.root)

    def collected(self, groups: Sequence[Group]) -> None:
        """Checks the groups of a step, and the whereabouts of all others."""
        version, bound = self._parts.weights.version, self._world.setup.max_staleness
        for group in groups:
            late = version - int(group.versions.min())
            if not 0 <= late <= bound or int(group.versions.max()) > version:
                raise Violation(f"group {group.group_id} is {late} versions old in version {version}; {bound} may be")
            for at, log_prob in zip(group.versions.tolist(), group.log_probs.tolist(), strict=True):
                if -log_prob != self._updates_at.get(at):
                    raise Violation(
                        f"group {group.group_id} says version {at}, of {self._updates_at.get(at)} optimizer steps, and "
                        f"was sampled with weights of {-log_prob:g}"
                    )
            self._stored.collected(group)
        self._accounts([group.group_id for group in groups])

    def _accounts(self, in_hand: Sequence[int]) -> None:
        """Checks that each group is trained on, in hand, open or dropped with a reason, and exactly one of these."""
        env, staleness = self._parts.env, self._collector.staleness
        trained = {group_id for _, group_id in self._parts.optimizer.trained}
        open_ids = [prompt.group_id for _, prompt, _ in self._collector._scheduler.open()]
        whereabouts = Counter([*trained, *in_hand, *open_ids])
        if twice := [group_id for group_id, count in whereabouts.items() if count > 1]:
            raise Violation(f"groups {twice} are in two places at once")
        missing = set(range(env.issued)) - whereabouts.keys()
        if len(missing) != staleness.dropped.total():
            raise Violation(
                f"groups {sorted(missing)} are neither trained on nor open, and {dict(staleness.dropped)} were dropped"
            )
        drops = self._world.setup.drops_zero_variance
        for group_id in missing:
            row = self._world.rows[group_id]
            if row not in self._world.unscored and not (drops and has_zero_variance(self._world.seed, row)):
                raise Violation(f"group {group_id} was dropped, and nothing was wrong with it")
        check_equal(staleness.trained, len(trained) + len(in_hand), "the count of trained groups is another")
        if nobodys := [group_id for group_id in whereabouts if group_id >= env.issued]:
            raise Violation(f"groups {nobodys} have ids of prompts that are still to be given out")

    def stepped(self, step: int, folder: RunFolder) -> None:
        """Checks a step when it is logged, and saved where that was due."""
        parts = self._parts
        self._last_progress_s = self._world.now()
        check_equal(parts.weights.version, step + 1, f"the version after step {step}")
        visits = Counter(group_id for _, group_id in parts.optimizer.trained)
        if wrong := {group_id: n for group_id, n in visits.items() if n != self._world.setup.epochs}:
            raise Violation(f"groups were trained on {wrong} times in {self._world.setup.epochs} epochs")
        if len({group_id for _, group_id in parts.optimizer.trained}) < len(set(parts.optimizer.trained)):
            raise Violation("a group was trained on in two steps")
        self._accounts(())
        self._in_flight.stepped(step, folder.path)
        if step % self._world.setup.checkpoint_frequency == 0:
            saved = folder._saved
            if saved is None or saved[0] != step or not self._world.disk.is_whole(saved[1]):
                raise Violation(f"the checkpoint of step {step} was to be saved, and is not there")
            self._saved = step
            self._damaged.discard(saved[1].name)

    def finished(self, step: int, folder: RunFolder) -> None:
        """Checks a run that is over."""
        parts, staleness, setup = self._parts, self._collector.staleness, self._world.setup
        check_equal(len(staleness.open), 0, "groups are left")
        check_equal(parts.collector.collected, setup.responses, "the number of responses")
        check_equal(parts.env.issued * setup.group_size, setup.responses, "the number of prompts")
        self._stored.check(folder.path, step, parts.optimizer.trained)
        self.trained, self.dropped = staleness.trained, staleness.dropped
