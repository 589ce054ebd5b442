"""Ranks meet by a store that earlier starts of them have used, too, and know who they are."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from dataclasses import dataclass

import torch.distributed as dist

POLL_S = 0.1


@dataclass(frozen=True)
class Member:
    """A rank's process; ``machine`` is the same for processes that see each other's ids."""

    rank: int
    host: str
    pid: int
    machine: str

    @classmethod
    def here(cls, rank: int) -> Member:
        """This process."""
        try:
            space = os.readlink("/proc/self/ns/pid")
        except OSError:
            space = ""
        return cls(rank, socket.gethostname(), os.getpid(), f"{socket.gethostname()} {space}")

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"


def meet(store: dist.Store, rank: int, size: int, timeout_s: float) -> str:
    """A name that the ranks of this start alone have, once all of them are there: the prefix of their keys.

    torchrun's store keeps what ranks wrote before they were started again, such as addresses at which no one answers.
    So rank zero calls by a new name until all have answered with a name of their own, and then lists those: who
    finds its own among them has been called by the rank zero of its own start.

    Raises:
        ValueError: not all ranks came within ``timeout_s``.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    if rank == 0:
        store.set("grpo_rl/call", own)
        keys = [f"grpo_rl/answer {own} {other}" for other in range(1, size)]
        while missing := [key for key in keys if not store.check([key])]:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{len(missing)} of {size} ranks did not come within {timeout_s:g} s: "
                    + ", ".join(f"rank {key.split()[-1]}" for key in missing[:8])
                )
            time.sleep(POLL_S)
        store.set(f"grpo_rl/met {own}", json.dumps([own, *(store.get(key).decode() for key in keys)]))
        return own
    answered = None
    while time.monotonic() < deadline:
        if store.check(["grpo_rl/call"]):
            call = store.get("grpo_rl/call").decode()
            if call != answered:
                store.set(f"grpo_rl/answer {call} {rank}", own)
                answered = call
            if store.check([f"grpo_rl/met {call}"]):
                met = json.loads(store.get(f"grpo_rl/met {call}"))
                if len(met) == size and met[rank] == own:
                    return call
        time.sleep(POLL_S)
    raise ValueError(f"rank 0 did not call rank {rank} within {timeout_s:g} s")
