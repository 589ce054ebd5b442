"""Trainers as Ray actors: one for each device that trains, each of which runs the whole script."""

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_rl.cluster.nodes import on_node, this_address
from grpo_rl.distributed.liveness import LAST_LOST, RankLostError
from grpo_rl.storage.masking import shown
from grpo_rl.waits import waiting

log = logging.getLogger(__name__)
LAST_WORDS_S = 60.0
"""Seconds that rank zero has to end after another rank has: it writes what is to be kept."""
END_S = 30.0
"""Longest wait for the processes of a start before the next one."""

_At = tuple[str, str, int]
"""The place where an actor runs: its node's address and id, and its process id."""


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of a training's ``size`` ranks, at the store of the process that started them.

    Args:
        start: how often ranks were started before.
    """

    rank: int
    size: int
    host: str
    port: int
    start: int = 0

    def store(self) -> dist.Store:
        """The store, which outlives the ranks."""
        return dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False)


@ray.remote(max_restarts=0, max_task_retries=0)
class _Trainer:
    def place(self) -> _At:
        """The actor's node address and id, and its process id."""
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), os.getpid()

    def run(self, work: Callable[[Rendezvous], Any], rendezvous: Rendezvous) -> Any:
        """Does the work and returns its result; a run that stops early raises its message."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which Ray blocks, as terminals send it to all
        try:
            return work(rendezvous)
        except RankLostError as lost:
            raise OtherLost(lost.message) from None
        except SystemExit as stop:
            raise StoppedEarly(str(stop)) from stop
        except ValueError as error:
            raise StoppedEarly(f"error: {shown(str(error))}") from error


class OtherLost(RuntimeError):
    """A rank that ended as another one is lost, which the message names."""


class _Lost(Exception):
    """A rank was lost; the message names it and its node."""


class StoppedEarly(RuntimeError):
    """A run that was asked to stop, or whose settings can't be run, as in the message."""


def run_trainers(
    work: Callable[[Rendezvous], Any],
    count: int,
    place: PlacementGroup,
    num_cpus: float,
    num_gpus: float,
    max_restarts: int = 0,
    elastic: bool = False,
    patience_s: float = 120.0,
) -> Any:
    """Runs ``work`` on all ranks, each in a process of its own, and returns what it returns on rank zero.

    When a rank is lost, all of them are started again; what they leave in the rendezvous' store, they find there.
    Ctrl-C is passed on to all of them, which finish their step; the second one ends them.

    Args:
        work: function that each rank runs; its argument is the rendezvous.
        count: number of ranks; each runs in the bundle of its number.
        max_restarts: how often the ranks are started again.
        elastic: whether they are then as many as Ray finds room for within ``patience_s``.

    Raises:
        SystemExit: the run was stopped, or its settings can't be run.
        RuntimeError: a trainer died once too often, or finds no room any more; names its node.
    """
    store = dist.TCPStore(this_address(), 0, is_master=True, wait_for_workers=False)
    options = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    start = 0
    while True:
        trainers = [
            _Trainer.options(scheduling_strategy=PlacementGroupSchedulingStrategy(place, rank), **options).remote()  # pyrefly: ignore[missing-attribute]
            for rank in range(count)
        ]
        store.delete_key(LAST_LOST)
        try:
            found = _placed(trainers, patience_s if start else None)
            if len(found) < (1 if elastic else count):
                raise RuntimeError(
                    f"{len(found)} of {count} trainers have found a place again within {patience_s:.0f} s (fewer would "
                    "go on with train.elastic=true); the last checkpoint is safe: resume=<the run's folder>"
                )
            return _run_once(work, found, Rendezvous(0, len(found), this_address(), store.port, start))
        except _Lost as ended:
            # A rank that waited for a frozen one had to be ended in its exchange, and looks dead itself.
            lost = f"{store.get(LAST_LOST).decode()}." if store.check([LAST_LOST]) else str(ended)
            if start == max_restarts:
                raise RuntimeError(
                    f"{lost} What the last checkpoint holds is safe; go on with resume=<the run's folder>"
                ) from ended.__cause__
            start += 1
            log.warning("%s All trainers start again, %d of %d times", lost, start, max_restarts)
            _end_all(trainers, found)  # pyrefly: ignore[unbound-name]
        finally:
            for trainer in trainers:
                ray.kill(trainer)


def _placed(trainers: list[Any], patience_s: float | None) -> list[tuple[Any, _At]]:
    """The trainers that run somewhere within so many seconds, each with its place."""
    places = [trainer.place.remote() for trainer in trainers]
    with waiting("all trainers to have a place", f"{len(places)} of them", patience_s):
        ready, _ = ray.wait(places, num_returns=len(places), timeout=patience_s)
    found = []
    for trainer, at in zip(trainers, places, strict=True):
        with contextlib.suppress(RayActorError if patience_s else ()):
            if at in ready:
                found.append((trainer, ray.get(at)))
    return found


def _run_once(work: Callable[[Rendezvous], Any], found: list[tuple[Any, _At]], first: Rendezvous) -> Any:
    """The result of rank zero, once all ranks have one."""
    runs = [trainer.run.remote(work, replace(first, rank=rank)) for rank, (trainer, _) in enumerate(found)]
    pending, asked_to_stop = list(runs), False
    with waiting("the trainers to end", deadline_s=math.inf) as wait:  # each logs its own waits
        while pending:
            try:
                wait.detail = f"{len(pending)} of {len(runs)} run"
                # As soon as one fails: the others would wait for it. Ray notices Ctrl-C between the calls alone.
                ready, pending = ray.wait(pending, timeout=1.0)
                for run in sorted(ready, key=runs.index):
                    _check(run, found[runs.index(run)][1][0], runs[0])
            except KeyboardInterrupt:
                if asked_to_stop:
                    raise
                asked_to_stop = True
                for _, (_, node, pid) in found:
                    _interrupt.options(scheduling_strategy=on_node(node)).remote(pid)
        return ray.get(runs[0])


def _check(run: Any, node: str, first: Any) -> None:
    """Raises the error that ended a rank's run; rank zero's reason to stop takes precedence."""
    try:
        ray.get(run)
    except RayActorError as error:
        raise _Lost(f"the trainer on {node} died: {str(error).splitlines()[0]}") from error
    except RayTaskError as error:
        if isinstance(error.cause, OtherLost):
            raise _Lost(f"{error.cause}.") from error
        with waiting("rank zero to write what is to be kept", deadline_s=LAST_WORDS_S):
            ray.wait([first], timeout=LAST_WORDS_S)
        stop = _stop_of(first) or _stop_of(run)
        raise (SystemExit(str(stop)) if stop else error) from None


def _stop_of(run: Any) -> StoppedEarly | None:
    """The run's message when it stopped early; None where it ended otherwise."""
    try:
        ray.get(run, timeout=0)
    except RayTaskError as error:
        return error.cause if isinstance(error.cause, StoppedEarly) else None
    except (RayActorError, GetTimeoutError):
        pass
    return None


def _end_all(trainers: list[Any], found: list[tuple[Any, _At]]) -> None:
    """Ends all trainers; returns when their processes, frozen ones too, hold neither devices nor the run's folder."""
    for trainer in trainers:
        ray.kill(trainer)
    ends = [_end.options(scheduling_strategy=on_node(node)).remote(pid) for _, (_, node, pid) in found]
    with waiting("the processes of the last start to end", deadline_s=END_S):
        ray.wait(ends, num_returns=len(ends), timeout=END_S)  # on a node that is gone nothing runs


@ray.remote(num_cpus=0, max_retries=0)
def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


@ray.remote(num_cpus=0, max_retries=0)
def _interrupt(pid: int) -> None:
    os.kill(pid, signal.SIGINT)
