"""Planted bugs: each is found by the simulation within 500 seeds, so the invariants have no hole of its kind."""

import os
import re
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from grpo_rl.cluster.engine_actors import RayEngine
from grpo_rl.cluster.fleet import Fleet
from grpo_rl.collectors.asynchronous import AsyncCollector
from grpo_rl.collectors.rollout_scheduler import Dropped, RolloutScheduler, StalenessManager
from grpo_rl.data.buffer import GroupBuffer
from grpo_rl.engines.base import EngineDeadError
from grpo_rl.engines.loop_thread import EngineLostError
from grpo_rl.monitor import token_log
from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.monitor.step_parts import COMPLETIONS_FOLDER, TOKENS_FOLDER, StepParts
from grpo_rl.storage import checkpoint_file
from grpo_rl.training import checkpoint
from grpo_rl.weights import remote
from grpo_rl.weights.push import WeightSync
from simulation.simulation import simulate

pytestmark = pytest.mark.nightly

MOST_SEEDS = 500
PLANTED = []


def planted(seed, told):
    """Notes the first seed that finds a bug, and what is said of it; another may be the first when the simulation
    changes."""

    def note(plant):
        PLANTED.append(pytest.param(plant, seed, told, id=plant.__name__))
        return plant

    return note


@planted(0, "groups were trained on .* times in 2 epochs")
def a_batch_is_trained_on_twice(patch):
    batches = GroupBuffer.batches

    def twice(self, epochs=1):
        batch = []
        for batch in batches(self, epochs):
            yield batch
        yield batch

    patch.setattr(GroupBuffer, "batches", twice)


@planted(10, "are in two places at once")
def a_group_that_was_complete_is_delivered_again_after_a_resume(patch):
    restore = AsyncCollector.load_state_dict

    def again(self, state):
        complete = [saved | {"group": None} for saved in state["open"] if saved["group"]]
        restore(self, state | {"open": [*state["open"], *complete]})

    patch.setattr(AsyncCollector, "load_state_dict", again)


@planted(12, r"\d groups are left for the \d steps after the next, and are due by then")
def the_bound_on_staleness_is_off_by_one(patch):
    def left(self, chosen, later):
        taken, due = set(map(id, chosen)), self.version + later - self.max_staleness - 1
        return sum(group.version <= due and id(group) not in taken for group in self.open)

    patch.setattr(StalenessManager, "_left", left)


@planted(0, "groups are open or in training, and the bound allows")
def one_step_too_many_is_in_flight(patch):
    def room(self):
        return (self.max_staleness + 2) * self.groups_per_step - len(self.open) - self._in_training

    patch.setattr(StalenessManager, "room", room)


@planted(19, "the policy version fell from")
def the_version_goes_back_when_an_engine_is_replaced(patch):
    deliver = WeightSync._deliver_to_new

    def back(self):
        self._version -= 1
        deliver(self)

    patch.setattr(WeightSync, "_deliver_to_new", back)


@planted(71, "the run goes on with another checkpoint")
def a_damaged_checkpoint_is_accepted(patch):
    patch.setattr(checkpoint, "_verified", lambda path, rank=0, size=1: checkpoint_file.read(path))


@planted(35, "the run goes on with another checkpoint")
def the_oldest_checkpoint_is_taken(patch):
    whole = checkpoint.checkpoints
    patch.setattr(checkpoint, "checkpoints", lambda folder: whole(folder)[:1])


@planted(12, "are neither trained on nor open")
def groups_in_flight_are_lost_with_their_engine(patch):
    async def run(self, group, prompt):
        try:
            self._rollouts[group.number] = await self._sample(prompt)
            self.staleness.finish(group)
        except Dropped as drop:
            self.staleness.drop(group, str(drop))
            del self._prompts[group.number]
        except EngineLostError:
            self.staleness.open.remove(group)
            self.staleness.started -= 1
            del self._prompts[group.number]
        self.fill()
        self._change.set()

    patch.setattr(RolloutScheduler, "_run", run)


@planted(73, r"has not answered for \d+ s, and nobody has noticed")
def a_wait_has_no_deadline(patch):
    async def call(self, method, *args):
        try:
            return await self._actor.call.remote(method, *args)
        except Exception as error:
            raise EngineDeadError(str(error)) from error

    patch.setattr(RayEngine, "_call", call)


@planted(10, r"are neither trained on nor open, and {'alike': \d} were dropped")
def a_resume_trains_again_on_what_was_trained(patch):
    restore = AsyncCollector.load_state_dict

    def from_the_first_row(self, state):
        load, self._env.load_state_dict = self._env.load_state_dict, lambda position: None
        restore(self, state)
        self._env.load_state_dict = load

    patch.setattr(AsyncCollector, "load_state_dict", from_the_first_row)


@planted(1, "are neither trained on nor open, and {} were dropped")
def what_is_dropped_is_not_counted(patch):
    def drop(self, group, reason):
        self.open.remove(group)
        self.started -= 1

    patch.setattr(StalenessManager, "drop", drop)


@planted(25, "was dropped, and nothing was wrong with it")
def a_healthy_group_is_dropped(patch):
    restart = StalenessManager.restart

    def drop(self, group):
        restart(self, group)
        raise Dropped("engine")

    patch.setattr(StalenessManager, "restart", drop)


@planted(21, "was sampled with weights of")
def a_push_that_failed_is_taken_for_delivered(patch):
    patch.setattr(WeightSync, "_check", lambda self, sent, engines: None)


@planted(91, "was to be saved, and is not there")
def a_full_disk_is_taken_for_a_saved_checkpoint(patch):
    save = checkpoint.save

    def hopeful(folder, step, *rest, **options):
        try:
            return save(folder, step, *rest, **options)
        except OSError:
            return folder / checkpoint.PATTERN.format(step=step)

    patch.setattr(checkpoint, "save", hopeful)


@planted(29, r"the checkpoint of step \d was safe, and there is none")
def logs_are_not_synced_before_a_checkpoint(patch):
    patch.setattr(checkpoint, "sync_logs", lambda *_: {})


@planted(24, "has its name and is not whole")
def a_checkpoint_is_renamed_before_it_is_synced(patch):
    write = checkpoint_file.write

    def renamed_first(path, state):
        digest = write(path, state)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return digest

    patch.setattr(checkpoint_file, "os", SimpleNamespace(**vars(os) | {"fsync": lambda _: None}))
    patch.setattr(checkpoint_file, "write", renamed_first)


@planted(3, "the run ended with 1 faults of crash of an engine")
def the_first_dead_engine_ends_the_run(patch):
    start = Fleet.__init__
    patch.setattr(Fleet, "__init__", lambda self, launch, size: start(self, launch, size, max_restarts=0))


@planted(72, r"the checkpoint of step \d was safe, and there is none")
def old_checkpoints_are_removed_before_the_new_one_is_safe(patch):
    save = checkpoint.save

    def removed_first(folder, *rest, **options):
        for path in checkpoint.checkpoints(folder):
            path.unlink()
        return save(folder, *rest, **options)

    patch.setattr(checkpoint, "save", removed_first)


@planted(13, r"samples with version \d, and the run is at \d")
def a_dead_engine_stays_in_its_slot(patch):
    patch.setattr(Fleet, "_replace", lambda self, slot, engine, error: None)


@planted(10, "the steps in metrics.jsonl")
def what_came_after_the_checkpoint_stays_in_the_metrics(patch):
    patch.setattr(MetricsLog, "truncate", lambda *_: 0)


@planted(136, "engines were replaced, and no fault had happened to any")
def deadlines_go_by_the_wall_clock(patch):
    patch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: time.time()))


@planted(25, "counts as loaded with")
def a_dead_engine_leaves_its_load_behind(patch):
    async def call(self, work, responses=1):
        slot = await self._least_loaded()
        engine = slot.engine
        slot.load += responses
        try:
            result = await work(engine)
        except EngineDeadError as error:
            self._replace(slot, engine, error)
            raise EngineLostError(str(error)) from error
        slot.load -= responses
        return result

    patch.setattr(Fleet, "call", call)


@planted(20, "counts as loaded with")
def a_new_engine_forgets_what_the_dead_one_still_gives_back(patch):
    replace_engine = Fleet._replace

    def forget(self, slot, engine, error):
        replace_engine(self, slot, engine, error)
        slot.load = 0

    patch.setattr(Fleet, "_replace", forget)


@planted(0, "counts as loaded with")
def a_load_is_counted_in_groups(patch):
    call = Fleet.call
    patch.setattr(Fleet, "call", lambda self, work, responses=1: call(self, work))


@planted(0, "gets group .* it samples")
def the_busiest_engine_gets_the_next_group(patch):
    least_loaded = Fleet._least_loaded

    async def most_loaded(self):
        await least_loaded(self)
        return max(self._ready(), key=lambda slot: (slot.load, slot.number))

    patch.setattr(Fleet, "_least_loaded", most_loaded)


@planted(25, "groups/resampled is")
def what_is_sampled_again_is_not_counted(patch):
    begin, restart = RolloutScheduler.__init__, StalenessManager.restart

    def known(self, staleness, *rest):
        begin(self, staleness, *rest)
        staleness.scheduler = self

    def uncounted(self, group):
        restart(self, group)
        self.scheduler.resampled -= 1

    patch.setattr(RolloutScheduler, "__init__", known)
    patch.setattr(StalenessManager, "restart", uncounted)


@planted(59, "the groups sampled again, after a resume")
def groups_sampled_again_before_a_resume_are_forgotten(patch):
    restore = AsyncCollector.load_state_dict
    patch.setattr(AsyncCollector, "load_state_dict", lambda self, state: restore(self, state | {"resampled": 0}))


@planted(25, "engines/replaced is")
def engines_replaced_before_a_resume_are_forgotten(patch):
    restore = AsyncCollector.load_state_dict
    patch.setattr(AsyncCollector, "load_state_dict", lambda self, state: restore(self, state | {"replaced": 0}))


@planted(35, "counts as started under version")
def a_group_sampled_again_keeps_its_first_version(patch):
    restart = StalenessManager.restart

    def keep(self, group):
        version = group.version
        restart(self, group)
        group.version = version

    patch.setattr(StalenessManager, "restart", keep)


@planted(59, "the versions and numbers of the groups that are trained on next")
def groups_are_taken_by_their_numbers(patch):
    def take(self, last=False):
        finished = sorted((group for group in self.open if group.finished), key=lambda group: group.number)
        everything = last and len(finished) == len(self.open) > 0
        chosen = finished[: self.groups_per_step]
        later = range(self.max_staleness + 1)
        if len(finished) < self.groups_per_step and not everything:
            return None
        if any(self._left(chosen, steps) > steps * self.groups_per_step for steps in later):
            return None
        self.open = [group for group in self.open if group not in chosen]
        self._in_training += len(chosen)
        self.trained += len(chosen)
        return chosen

    patch.setattr(StalenessManager, "take", take)


@planted(10, "the groups in flight after a resume")
def complete_groups_are_as_new_after_a_resume(patch):
    reopen = RolloutScheduler.reopen

    def as_new(self, groups):
        reopen(self, ((self.staleness.version, prompt, rollout) for _, prompt, rollout in groups))

    patch.setattr(RolloutScheduler, "reopen", as_new)


@planted(10, "groups wait to be sampled again")
def new_prompts_come_before_groups_that_were_in_flight(patch):
    fill = RolloutScheduler.fill

    def new_first(self):
        again, self._again = self._again, deque()
        fill(self)
        self._again = again

    patch.setattr(RolloutScheduler, "fill", new_first)


@planted(10, "the steps of completions.parquet")
def completions_of_after_the_checkpoint_stay(patch, folder=COMPLETIONS_FOLDER):
    truncate = StepParts.truncate
    patch.setattr(StepParts, "truncate", lambda parts, step: parts.folder.name == folder or truncate(parts, step))


@planted(10, "the steps of tokens.parquet")
def tokens_of_after_the_checkpoint_stay(patch):
    completions_of_after_the_checkpoint_stay(patch, TOKENS_FOLDER)


@planted(21, "the rows of tokens.parquet/")
def all_tokens_of_a_group_are_logged_with_one_version(patch):
    rows = token_log._rows

    def of_its_first(group, *rest):
        return rows(replace(group, versions=group.versions[:1].expand_as(group.versions)), *rest)

    patch.setattr(token_log, "_rows", of_its_first)


@planted(12, "how often group .* was sampled")
def a_sampling_that_was_lost_is_not_recorded(patch):
    timed = AsyncCollector._timed

    @contextmanager
    def only_if_whole(self, engine, prompt):
        try:
            with timed(self, engine, prompt) as ended:
                yield ended
        except EngineDeadError:
            self._sampled.pop()
            raise

    patch.setattr(AsyncCollector, "_timed", only_if_whole)


@pytest.mark.parametrize(("plant", "seed", "told"), PLANTED)
def test_a_planted_bug_is_found_by_the_invariant_that_it_breaks(plant, seed, told, monkeypatch):
    plant(monkeypatch)
    found = next((error for seed in [seed, *range(MOST_SEEDS)] if (error := simulate(seed).error)), None)
    assert found, f"no seed below {MOST_SEEDS} finds it"
    assert re.search(told, found), found
