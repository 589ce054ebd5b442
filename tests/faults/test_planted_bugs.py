"""Planted bugs: each is found by the simulation within 500 seeds, so the invariants have no hole of its kind."""

from __future__ import annotations

import os
import re
import time
from types import SimpleNamespace

import pytest

from grpo_rl.cluster.engine_actors import RayEngine
from grpo_rl.cluster.fleet import Fleet
from grpo_rl.collectors.asynchronous import AsyncCollector
from grpo_rl.collectors.rollout_scheduler import Dropped, RolloutScheduler
from grpo_rl.collectors.staleness import StalenessManager
from grpo_rl.data.buffer import GroupBuffer
from grpo_rl.engines.base import EngineDeadError, EngineLostError
from grpo_rl.faults.simulation import simulate
from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.storage import checkpoint_file
from grpo_rl.training import checkpoint
from grpo_rl.weights import remote
from grpo_rl.weights.push import WeightSync

pytestmark = pytest.mark.nightly

MOST_SEEDS = 500


def a_batch_is_trained_on_twice(patch):
    batches = GroupBuffer.batches

    def twice(self, epochs=1):
        batch = []
        for batch in batches(self, epochs):
            yield batch
        yield batch

    patch.setattr(GroupBuffer, "batches", twice)


def a_group_that_was_complete_is_delivered_again_after_a_resume(patch):
    restore = AsyncCollector.restore

    def again(self, state):
        complete = [saved | {"group": None} for saved in state["open"] if saved["group"]]
        restore(self, state | {"open": [*state["open"], *complete]})

    patch.setattr(AsyncCollector, "restore", again)


def the_bound_on_staleness_is_off_by_one(patch):
    def left(self, chosen, later):
        taken, due = set(map(id, chosen)), self.version + later - self.max_staleness - 1
        return sum(group.version <= due and id(group) not in taken for group in self.open)

    patch.setattr(StalenessManager, "_left", left)


def one_step_too_many_is_in_flight(patch):
    def room(self):
        return (self.max_staleness + 2) * self.groups_per_step - len(self.open) - self._in_training

    patch.setattr(StalenessManager, "room", room)


def the_version_goes_back_when_an_engine_is_replaced(patch):
    deliver = WeightSync._deliver_to_new

    def back(self):
        self._version -= 1
        deliver(self)

    patch.setattr(WeightSync, "_deliver_to_new", back)


def a_damaged_checkpoint_is_accepted(patch):
    patch.setattr(checkpoint, "_verified", lambda path, rank=0, size=1: checkpoint_file.read(path))


def the_oldest_checkpoint_is_taken(patch):
    whole = checkpoint.checkpoints
    patch.setattr(checkpoint, "checkpoints", lambda folder: whole(folder)[:1])


def groups_in_flight_are_lost_with_their_engine(patch):
    async def run(self, group, prompt):
        try:
            self._rollouts[group.number] = await self._sample(prompt)
            self.staleness.finish(group)
        except Dropped as drop:
            self.staleness.drop(group, drop.reason)
            del self._prompts[group.number]
        except EngineLostError:
            self.staleness.open.remove(group)
            self.staleness.started -= 1
            del self._prompts[group.number]
        self.fill()
        self._change.set()

    patch.setattr(RolloutScheduler, "_run", run)


def a_wait_has_no_deadline(patch):
    async def call(self, method, *args):
        try:
            return await self._actor.call.remote(method, *args)
        except Exception as error:
            raise EngineDeadError(str(error)) from error

    patch.setattr(RayEngine, "_call", call)


def a_resume_trains_again_on_what_was_trained(patch):
    restore = AsyncCollector.restore

    def from_the_first_row(self, state):
        load, self._env.load_state_dict = self._env.load_state_dict, lambda position: None
        restore(self, state)
        self._env.load_state_dict = load

    patch.setattr(AsyncCollector, "restore", from_the_first_row)


def what_is_dropped_is_not_counted(patch):
    def drop(self, group, reason):
        self.open.remove(group)
        self.started -= 1

    patch.setattr(StalenessManager, "drop", drop)


def a_healthy_group_is_dropped(patch):
    restart = StalenessManager.restart

    def drop(self, group):
        restart(self, group)
        raise Dropped("engine")

    patch.setattr(StalenessManager, "restart", drop)


def a_push_that_failed_is_taken_for_delivered(patch):
    patch.setattr(WeightSync, "_check", lambda self, sent, engines: None)


def a_full_disk_is_taken_for_a_saved_checkpoint(patch):
    save = checkpoint.save

    def hopeful(folder, step, *rest, **options):
        try:
            return save(folder, step, *rest, **options)
        except OSError:
            return folder / checkpoint.PATTERN.format(step=step)

    patch.setattr(checkpoint, "save", hopeful)


def logs_are_not_synced_before_a_checkpoint(patch):
    patch.setattr(checkpoint, "sync_logs", lambda *_: {})


def a_checkpoint_is_renamed_before_it_is_synced(patch):
    write = checkpoint_file.write

    def renamed_first(path, state):
        digest = write(path, state)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return digest

    patch.setattr(checkpoint_file, "os", SimpleNamespace(**vars(os) | {"fsync": lambda _: None}))
    patch.setattr(checkpoint_file, "write", renamed_first)


def the_first_dead_engine_ends_the_run(patch):
    start = Fleet.__init__
    patch.setattr(Fleet, "__init__", lambda self, launch, size: start(self, launch, size, max_restarts=0))


def old_checkpoints_are_removed_before_the_new_one_is_safe(patch):
    save = checkpoint.save

    def removed_first(folder, *rest, **options):
        for path in checkpoint.checkpoints(folder):
            path.unlink()
        return save(folder, *rest, **options)

    patch.setattr(checkpoint, "save", removed_first)


def a_dead_engine_stays_in_its_slot(patch):
    patch.setattr(Fleet, "_replace", lambda self, slot, engine, error: None)


def what_came_after_the_checkpoint_stays_in_the_metrics(patch):
    patch.setattr(MetricsLog, "truncate", lambda *_: 0)


def deadlines_go_by_the_wall_clock(patch):
    patch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: time.time()))


FOUND_AT = {
    a_batch_is_trained_on_twice: (0, "groups were trained on .* times in 2 epochs"),
    a_group_that_was_complete_is_delivered_again_after_a_resume: (11, "are in two places at once"),
    the_bound_on_staleness_is_off_by_one: (60, "is 2 versions old in version 5; 1 may be"),
    one_step_too_many_is_in_flight: (0, "groups are open or in training, and the bound allows"),
    the_version_goes_back_when_an_engine_is_replaced: (0, "the policy version fell from"),
    a_damaged_checkpoint_is_accepted: (222, "the run goes on with another checkpoint"),
    the_oldest_checkpoint_is_taken: (24, "the run goes on with another checkpoint"),
    groups_in_flight_are_lost_with_their_engine: (25, "are neither trained on nor open"),
    a_wait_has_no_deadline: (122, "nothing is scheduled, and the program is not over"),
    a_resume_trains_again_on_what_was_trained: (15, "have ids of prompts that are still to be given out"),
    what_is_dropped_is_not_counted: (1, "are neither trained on nor open, and {} were dropped"),
    a_healthy_group_is_dropped: (19, "was dropped, and nothing was wrong with it"),
    a_push_that_failed_is_taken_for_delivered: (22, "was sampled with weights of"),
    a_full_disk_is_taken_for_a_saved_checkpoint: (128, "was to be saved, and is not there"),
    logs_are_not_synced_before_a_checkpoint: (10, "the checkpoint of step 1 was safe, and there is none"),
    a_checkpoint_is_renamed_before_it_is_synced: (11, "has its name and is not whole"),
    what_came_after_the_checkpoint_stays_in_the_metrics: (11, "the steps in metrics.jsonl"),
    the_first_dead_engine_ends_the_run: (3, "the run ended with 1 faults of crash of an engine"),
    old_checkpoints_are_removed_before_the_new_one_is_safe: (
        11,
        "the checkpoint of step 1 was safe, and there is none",
    ),
    a_dead_engine_stays_in_its_slot: (21, "samples with version 1, and the run is at 2"),
    deadlines_go_by_the_wall_clock: (227, "engines were replaced, and no fault had happened to any"),
}
"""The first seed that finds each bug, and what is said of it. Another may be the first when the simulation changes."""


def first_seed(plant, patch, seeds):
    """The first seed that finds a bug, with what it said; None where none does."""
    plant(patch)
    for seed in seeds:
        if error := simulate(seed).error:
            return seed, error
    return None


@pytest.mark.parametrize(
    ("plant", "seed", "told"),
    [(plant, *found) for plant, found in FOUND_AT.items()],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_planted_bug_is_found_by_the_invariant_that_it_breaks(plant, seed, told, monkeypatch):
    found = first_seed(plant, monkeypatch, [seed, *range(MOST_SEEDS)])
    assert found, f"no seed below {MOST_SEEDS} finds it"
    assert re.search(told, found[1]), found
