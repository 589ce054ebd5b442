"""Endings of a rank: when another is lost, when all of them stop, and by an error of its own."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

LOST_CODE = 75
"""Exit code of a rank that ends as another is lost: EX_TEMPFAIL of sysexits.h, as the run can go on in a new start."""

LAST_LOST = "grpo_rl/lost"
"""Key of a launcher's store under which ranks say which of them was lost."""


class RankLostError(SystemExit):
    """Ends a rank because another one is lost, which was said on stderr; exit code 75."""

    def __init__(self, message: str = "") -> None:
        super().__init__(LOST_CODE)
        self.message = message


class Stopped(SystemExit):
    """Ends all ranks in order, as they agreed: the run was asked to stop, and can go on later.

    The exit code is 1, as the run is not finished; under a torchrun that would start it again at once, it is 0.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
            if os.environ.get("RANK", "0") == "0":
                print(message, file=sys.stderr, flush=True)
            self.code = 0


def is_of_exchange(error: BaseException) -> bool:
    """Tells whether an exchange of ranks failed with this error."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL", "ProcessGroup"))
    )


def exit_message(error: BaseException | None) -> str:
    """The message to the others on the error that ends a rank; empty where all of them end in order."""
    orderly = isinstance(error, (Stopped, RankLostError)) or (isinstance(error, SystemExit) and error.code in (None, 0))
    return "" if error is None or orderly else f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The beginning of what an error says."""
    return (str(error).splitlines() or [""])[0][:200]
