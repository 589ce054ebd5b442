"""Invariants of groups in flight: which engine is asked for them, how often, and in which order they are trained on.

What the run itself counts is compared with the calls that reach the engines. Between the two lie turns of the event
loop: a group that no engine samples may wait for one, or for its rewards, or its engine is dead and the run has not got
to it yet. So many counts may be off, and no more.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from grpo_rl.cluster.fleet import Fleet
from grpo_rl.collectors.asynchronous import AsyncCollector
from grpo_rl.collectors.rollout_scheduler import InFlightGroup
from simulation.engines import SimulatedActor
from simulation.stand_ins import Environment
from simulation.stored import metrics_of, sampled_in
from simulation.violation import Violation, check_equal
from simulation.world import World

COUNTS = {"resampled": "groups/resampled", "replaced": "engines/replaced"}
"""Counts that go on over a resume: their names in a checkpoint, and as metrics."""


class InFlight:
    """Checks the groups in flight, over all lives of the trainer."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._under: dict[int, tuple[int, float]] = {}
        """The least and the largest version, by group, under which its last sampling can have been started."""
        self._counted = dict.fromkeys(COUNTS, 0)
        """The counts of the run by now."""
        self._counted_at: dict[int, dict[str, int]] = {}
        """The counts at the end of each step that a run can go on from."""

    def opened(self, step: int) -> None:
        """Forgets what came after the step that a run goes on from."""
        self._counted_at = {at: counts for at, counts in self._counted_at.items() if at <= step}

    def begin(self, fleet: Fleet[Any], collector: AsyncCollector, env: Environment) -> None:
        """Begins to watch a life."""
        self._fleet, self._env = fleet, env
        self._collector, self._staleness, self._scheduler = collector, collector.staleness, collector._scheduler
        self._calls: dict[int, tuple[SimulatedActor, Future[Any]]] = {}
        """The call by which each group is sampled, and the actor of the engine."""
        self._asked, self._stored = Counter[int](), Counter[int]()
        """How often engines were asked for each group in this life; and how often is stored."""
        self._before: dict[str, int] | None = None
        """The counts that this life goes on from; None until the collector is restored."""
        self._issued = 0
        self._wrong: str | None = None
        self._watches = True
        self._world.on_sampling = self._begins
        setattr(self._staleness, "take", partial(self._take, self._staleness.take))  # noqa: B010

    def end(self) -> None:
        """Ends watching: groups in flight are given up."""
        self._watches = False

    # At every moment.

    def check(self, replaced: int) -> None:
        """Checks loads and counts; engines were replaced so many times in this life."""
        if not self._watches:
            return
        if self._wrong:
            raise Violation(self._wrong)
        sampled, others = self._sampled()
        size = self._world.setup.group_size
        for slot in self._fleet._slots:
            least = size * sampled[slot.number]
            if not least <= slot.load <= least + size * others:
                raise Violation(
                    f"engine {slot.number} counts as loaded with {slot.load} responses; it samples {least}, and "
                    f"{size * others} are in flight that no engine samples"
                )
        if self._before is not None:
            self._check_counts(self._before, replaced, others)

    def _check_counts(self, before: Mapping[str, int], replaced: int, others: int) -> None:
        self._counted = {"resampled": self._scheduler.resampled, "replaced": self._fleet.restarts}
        launching = sum(slot.launching for slot in self._fleet._slots)
        again, started = self._asked.total() - len(self._asked), len(self._world.actors) - len(self._fleet._slots)
        bounds = {"resampled": (again, again + others), "replaced": (replaced, started + launching)}
        for name, (least, most) in bounds.items():
            if not least <= self._counted[name] - before[name] <= most:
                raise Violation(
                    f"{COUNTS[name]} is {self._counted[name]}, and was {before[name]} when this life began; in it "
                    f"there were {least} to {most}"
                )
        if self._env.issued > self._issued and self._scheduler._again:
            waiting = len(self._scheduler._again)
            raise Violation(f"a prompt is given out, and {waiting} groups wait to be sampled again")
        self._issued = self._env.issued

    def _sampled(self) -> tuple[dict[int, int], int]:
        """The number of groups that each slot's engine samples, and that of all others in flight."""
        places = {id(actor): slot.number for slot in self._fleet._slots if (actor := _actor_of(slot.engine))}
        sampled, others = {slot.number: 0 for slot in self._fleet._slots}, 0
        for actor, _ in self._calls.values():
            if id(actor) in places:
                sampled[places[id(actor)]] += 1
                others -= 1
        for group in self._staleness.open:
            others += not group.finished
        return sampled, others

    def _begins(self, actor: SimulatedActor, group_id: int, call: Future[Any]) -> None:
        """Takes note that an engine is asked for a group; it has to be one with the least to do."""
        sampled, others = self._sampled()
        ready = [slot for slot in self._fleet._slots if slot.engine is not None]
        chosen = next((slot.number for slot in ready if _actor_of(slot.engine) is actor), None)
        least = min((sampled[slot.number] for slot in ready), default=0)
        if chosen is None or sampled[chosen] > least + others - 1:  # the group itself is one of the others
            has = sampled[chosen]
            self._wrong = f"engine {chosen} gets group {group_id}; it samples {has}, and another one {least}"
        lost_under = self._under[group_id][0] if self._asked[group_id] else 0
        self._under[group_id] = lost_under, self._staleness.version
        self._asked[group_id] += 1
        self._calls[group_id] = actor, call
        call.add_done_callback(partial(self._ends, group_id))

    def _ends(self, group_id: int, call: Future[Any]) -> None:
        if self._calls.get(group_id, (None, None))[1] is not call:
            return  # of an earlier life, or the run has given it up and asked another engine
        del self._calls[group_id]
        if not call.cancelled() and call.exception():
            self._under[group_id] = self._staleness.version, math.inf

    # By the thread that trains, and what it calls.

    def resumed(self, step: int, restored: Mapping[str, Any] | None, run: Path) -> None:
        """Checks what a run goes on with after a step: the state that was restored, None in a new run."""
        saved = restored["collector"] if restored else {**dict.fromkeys(COUNTS, 0), "open": []}
        self._before = {name: saved[name] for name in COUNTS}
        check_equal(self._scheduler.resampled, saved["resampled"], "the groups sampled again, after a resume")
        row = next((row for row in metrics_of(run) if row["step"] == step), {})
        most = self._counted_at.get(step, self._counted)
        for name, metric in COUNTS.items():
            if not row.get(metric, 0) <= saved[name] <= most[name]:
                raise Violation(
                    f"the checkpoint of step {step} has {saved[name]} for {metric}, and it was "
                    f"{row.get(metric, 0):g} to {most[name]} then"
                )
        found = [(prompt.group_id, group and version) for version, prompt, group in self._scheduler.open()]
        expected = [(saved["prompt"]["group_id"], saved["group"] and saved["version"]) for saved in saved["open"]]
        # Those that were complete come first.
        check_equal(found, sorted(expected, key=lambda group: group[1] is None), "the groups in flight after a resume")
        self._issued = self._env.issued

    def _take(self, take: Callable[..., list[InFlightGroup] | None], last: bool = False) -> list[InFlightGroup] | None:
        """The groups of the next step, which have to be those that are due first."""
        staleness = self._staleness
        finished = sorted((group.version, group.number) for group in staleness.open if group.finished)
        if (chosen := take(last)) is None:
            return None
        found = [(group.version, group.number) for group in chosen]
        check_equal(found, finished[: len(found)], "the versions and numbers of the groups that are trained on next")
        for later in range(staleness.max_staleness + 1):
            due = staleness.version + later - staleness.max_staleness
            left = sum(group.version <= due for group in staleness.open)
            if left > later * staleness.groups_per_step:
                raise Violation(f"{left} groups are left for the {later} steps after the next, and are due by then")
        for group in chosen:
            group_id = self._scheduler._prompts[group.number].group_id
            least, most = self._under[group_id]
            if not least <= group.version <= most:
                raise Violation(
                    f"group {group_id} counts as started under version {group.version}, and was sampled when the "
                    f"run was at {least} to {most:g}"
                )
        return chosen

    def stepped(self, step: int, run: Path) -> None:
        """Checks when a step is over that it is stored of each group how often engines were asked for it."""
        self._counted_at[step] = self._counted
        self._stored += sampled_in(run, step)
        stored = self._stored + Counter(sampled.group_id for sampled in self._collector._sampled)
        in_flight = {prompt.group_id for _, prompt, group in self._scheduler.open() if group is None}
        for group_id in self._asked.keys() - in_flight:
            check_equal(stored[group_id], self._asked[group_id], f"how often group {group_id} was sampled")


def _actor_of(engine: Any) -> Any:
    return getattr(engine, "_actor", None)
