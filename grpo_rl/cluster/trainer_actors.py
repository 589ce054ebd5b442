"""Trainers as Ray actors: one for each device that trains, each of which runs the whole script."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_rl.cluster.nodes import on_node

LAST_WORDS_S = 60.0
"""Seconds that rank zero has to end after another rank has: it writes what is to be kept."""


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of a training's ``size`` ranks, at rank zero's address and port; ``rank`` is this process's."""

    rank: int
    size: int
    host: str
    port: int

    def store(self) -> dist.Store:
        """The store of the process group; blocks until rank zero has started it."""
        return dist.TCPStore(self.host, self.port, self.size, is_master=self.rank == 0)


@ray.remote(max_restarts=0, max_task_retries=0)
class _Trainer:
    """A process that trains, perhaps on another machine."""

    def place(self) -> tuple[str, str, int, int]:
        """The actor's node address and id, its process id, and a port that was free a moment ago."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), os.getpid(), port

    def run(self, work: Callable[[Rendezvous], Any], rendezvous: Rendezvous) -> Any:
        """Does the work and returns its result; a run that stops early raises what it says."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which Ray blocks, as terminals send it to all
        try:
            return work(rendezvous)
        except SystemExit as stop:
            raise StoppedEarly(str(stop)) from stop
        except ValueError as error:
            raise StoppedEarly(f"error: {error}") from error


class StoppedEarly(RuntimeError):
    """A run that was asked to stop, or whose settings can't be run; the message says which."""


def run_trainers(
    work: Callable[[Rendezvous], Any], count: int, place: PlacementGroup, num_cpus: float, num_gpus: float
) -> Any:
    """Runs ``work`` on all ranks, each in a process of its own, and returns what it returns on rank zero.

    Ctrl-C is passed on to all of them, which finish their step; the second one ends them.

    Args:
        work: function that each rank runs; its argument is the rendezvous.
        count: number of ranks; each runs in the bundle of its number.

    Raises:
        SystemExit: the run was stopped, or its settings can't be run.
        RuntimeError: a trainer died; names its node.
    """
    trainers = [
        _Trainer.options(
            num_cpus=num_cpus, num_gpus=num_gpus, scheduling_strategy=PlacementGroupSchedulingStrategy(place, rank)
        ).remote()
        for rank in range(count)
    ]
    places = ray.get([trainer.place.remote() for trainer in trainers])
    host, _, _, port = places[0]
    runs = [trainer.run.remote(work, Rendezvous(rank, count, host, port)) for rank, trainer in enumerate(trainers)]
    pending, asked_to_stop = list(runs), False
    try:
        while pending:
            try:
                # As soon as one fails: the others would wait for it. Ray notices Ctrl-C between the calls alone.
                ready, pending = ray.wait(pending, timeout=1.0)
                for run in sorted(ready, key=runs.index):
                    _check(run, places[runs.index(run)][0], runs[0])
            except KeyboardInterrupt:
                if asked_to_stop:
                    raise
                asked_to_stop = True
                for _, node, pid, _ in places:
                    _interrupt.options(scheduling_strategy=on_node(node)).remote(pid)
        return ray.get(runs[0])
    finally:
        for trainer in trainers:
            ray.kill(trainer)


def _check(run: Any, node: str, first: Any) -> None:
    """Raises the error that ended a rank's run; rank zero's reason to stop takes precedence."""
    try:
        ray.get(run)
    except RayActorError as error:
        raise RuntimeError(
            f"the trainer on {node} died: {str(error).splitlines()[0]} What the last checkpoint holds is safe; go on "
            "with resume=<the run's folder>"
        ) from error
    except RayTaskError as error:
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


@ray.remote(num_cpus=0, max_retries=0)
def _interrupt(pid: int) -> None:
    os.kill(pid, signal.SIGINT)
