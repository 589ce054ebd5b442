"""NullTransport: the transport of a rank without an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from grpo_rl.weights.transport import Held


class NullTransport:
    """Sends nothing, and takes part in gathering the sharded weights that rank zero sends.

    Args:
        dtype: dtype of the weights that the engines of rank zero hold.
        takes_adapters: whether those engines take adapters.
    """

    on_new_engine: Callable[[], None] | None = None

    def __init__(self, dtype: torch.dtype, takes_adapters: bool) -> None:
        self.dtype, self.takes_adapters = dtype, takes_adapters

    def fingerprint(self, name: str, tensor: Tensor) -> int:
        """Unused: this rank has nothing to compare with."""
        return 0

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Held]:
        """Takes part in gathering each tensor."""
        deque(weights, maxlen=0)
        return {}

    def held(self, shapes: Mapping[str, torch.Size]) -> dict[str, Held]:
        """Empty: this rank has no engine."""
        return {}

    @contextmanager
    def paused(self, only_new: bool = False) -> Iterator[bool]:
        """Pauses nothing; rank zero says what is sent."""
        yield False

    def close(self) -> None:
        """Frees nothing."""
