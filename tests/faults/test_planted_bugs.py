"""Planted bugs: each is found by the simulation within 500 seeds, so the invariants have no hole of its kind."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from grpo_rl.cluster.engine_actors import RayEngine
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
    patch.setattr(checkpoint, "sync_logs", lambda run: None)


def a_checkpoint_is_renamed_before_it_is_synced(patch):
    def write(path, state):
        with path.open("wb") as file:
            torch.save(dict(state), file)
        return ""

    patch.setattr(checkpoint_file, "write", write)


def what_came_after_the_checkpoint_stays_in_the_metrics(patch):
    patch.setattr(MetricsLog, "truncate", lambda self, step: None)


def deadlines_go_by_the_wall_clock(patch):
    patch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: time.time()))


FOUND_AT = {
    a_batch_is_trained_on_twice: 0,
    a_group_that_was_complete_is_delivered_again_after_a_resume: 24,
    the_bound_on_staleness_is_off_by_one: 60,
    one_step_too_many_is_in_flight: 0,
    the_version_goes_back_when_an_engine_is_replaced: 0,
    a_damaged_checkpoint_is_accepted: 137,
    the_oldest_checkpoint_is_taken: 11,
    groups_in_flight_are_lost_with_their_engine: 15,
    a_wait_has_no_deadline: 52,
    a_resume_trains_again_on_what_was_trained: 15,
    what_is_dropped_is_not_counted: 1,
    a_healthy_group_is_dropped: 34,
    a_push_that_failed_is_taken_for_delivered: 35,
    a_full_disk_is_taken_for_a_saved_checkpoint: 83,
    logs_are_not_synced_before_a_checkpoint: 10,
    a_checkpoint_is_renamed_before_it_is_synced: 0,
    what_came_after_the_checkpoint_stays_in_the_metrics: 24,
    deadlines_go_by_the_wall_clock: 1,
}
"""The first seed that finds each bug. Where the simulation has changed, another one may be the first."""


def first_seed(plant, patch, seeds):
    """The first seed that finds a bug, with what it said; None where none does."""
    plant(patch)
    for seed in seeds:
        if error := simulate(seed).error:
            return seed, error
    return None


@pytest.mark.parametrize(("plant", "seed"), FOUND_AT.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_found(plant, seed, monkeypatch):
    assert first_seed(plant, monkeypatch, [seed, *range(MOST_SEEDS)]), f"no seed below {MOST_SEEDS} finds it"
