"""What every inference engine offers: ids in, ids out, and weights that can be proven to have arrived.

Letters: G answers to one prompt, R response tokens of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import xxhash
from jaxtyping import Bool, Float, Int
from torch import Tensor

R = TypeVar("R")
ADAPTER_NAME = re.compile(r"(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
"""Of the two factors of a LoRA layer, as engines take them."""


def digest(tensor: Tensor) -> int:
    """Hash of a tensor's bytes (XXH3, https://xxhash.com), 0 … 2^64 - 1, as fast as memory is read.

    Both ends of a transfer compute it where one process holds each tensor whole; a tensor in shards has a
    `grpo_rl.engines.fingerprint`, which adds up.

    >>> x = torch.arange(12.0)
    >>> digest(x) == digest(x.reshape(3, 4)) != digest(x.flip(0))
    True
    """
    return xxhash.xxh3_64_intdigest(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


@contextmanager
def a_core_left() -> Iterator[None]:
    """Within it PyTorch takes a thread less, if it has several: both ends of a transfer work at the same time.

    Threads that wait for one which has no core cost more than they spare. It is the calling thread's setting.
    """
    threads = torch.get_num_threads()
    # In its workers vLLM has put something in the place of `torch.set_num_threads` that does nothing.
    torch._C.set_num_threads(max(1, threads - 1))
    try:
        yield
    finally:
        torch._C.set_num_threads(threads)


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled.

    Args:
        temperature: logits are divided by it; 0 is greedy.
        top_p: mass of the nucleus; 1 samples from the whole distribution.
        max_new_tokens: an answer that reaches this many tokens without ending is truncated.
        min_new_tokens: no end of sequence before this many tokens; benchmarks use it to fix the work.

    Raises:
        ValueError: a setting is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 256
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"sampling.temperature is {self.temperature}; it must be in [0, 2], 0 being greedy")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p is {self.top_p}; it must be in (0, 1]")
        if self.max_new_tokens < 1 or self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"sampling.max_new_tokens is {self.max_new_tokens}; it must be at least 1 and at least "
                f"min_new_tokens ({self.min_new_tokens})"
            )


class EngineDeadError(RuntimeError):
    """An engine's process has ended, or does not answer within its deadline; names it."""


class EngineStartError(EngineDeadError):
    """An engine's process has ended before it was ready; names it, and says why."""


class EngineLostError(RuntimeError):
    """An engine died under a group, whose answers are lost; another engine can sample it again."""


class AbortedError(RuntimeError):
    """A request was aborted before it was answered."""


@dataclass(frozen=True, eq=False)
class Samples:
    """The G answers to one prompt, flat with offsets, as in `grpo_rl.data.group.Group`.

    Args:
        response_ids: [R] int64, the end-of-sequence token included where one was sampled.
        log_probs: [R] float32, of the sampled tokens at the sampling temperature, in nats; greedy answers carry
            those at temperature 1.
        offsets: [G + 1] int64.
        truncated: [G] True where an answer met ``max_new_tokens`` (finish reason "length").
        version: policy version of the weights that sampled it; of the last of them, where they changed in between.
        token_versions: [R] int64, of each token; None where all have ``version``.
    """

    response_ids: Int[Tensor, " R"]
    log_probs: Float[Tensor, " R"]
    offsets: Int[Tensor, " G1"]
    truncated: Bool[Tensor, " G"]
    version: int
    token_versions: Int[Tensor, " R"] | None = None

    @property
    def versions(self) -> Int[Tensor, " R"]:
        """Policy version of the weights that sampled each token."""
        if self.token_versions is not None:
            return self.token_versions
        return torch.full_like(self.response_ids, self.version)

    @property
    def responses(self) -> tuple[Tensor, ...]:
        """Ids of each answer."""
        return self.response_ids.split(self.offsets.diff().tolist())

    @classmethod
    def from_lists(
        cls, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]], truncated: Sequence[bool], version: int
    ) -> Samples:
        """Samples from one list an answer.

        >>> Samples.from_lists([[5], [6, 7]], [[-0.5], [-0.1, -0.2]], [False, True], 3).offsets.tolist()
        [0, 1, 3]
        """
        # Not `torch.tensor`, which takes three times as long to read a list.
        return cls(
            response_ids=torch.from_numpy(np.fromiter(chain.from_iterable(ids), np.int64)),
            log_probs=torch.from_numpy(np.fromiter(chain.from_iterable(log_probs), np.float32)),
            offsets=torch.tensor([0, *map(len, ids)]).cumsum(0),
            truncated=torch.tensor(truncated, dtype=torch.bool),
            version=version,
        )


class Sampler(Protocol):
    """What answers prompts: an engine, or a fleet of them."""

    version: int
    """Policy version of the weights it holds."""

    dtype: torch.dtype
    """Of the weights it holds; what is sent is rounded to it."""

    max_model_len: int
    """Prompt and answer, in tokens."""

    takes_adapters: bool
    """Whether it holds LoRA adapters beside its weights, and takes them as ``<layer>.lora_A.weight`` (r x inputs) and
    ``<layer>.lora_B.weight`` (outputs x r, scaled)."""

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples]:
        """``n`` answers to each prompt, in the prompts' order.

        Raises:
            ValueError: a prompt is empty or leaves no room for an answer, or several greedy answers are asked for.
        """
        ...

    def submit(self, request: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """Takes in one prompt, to be answered once, under a number that :meth:`step` gives back.

        Raises:
            ValueError: as :meth:`generate`.
        """
        ...

    def step(self) -> list[tuple[int, Samples]]:
        """Goes on with all prompts taken in, and returns those that are answered now, each a group of one.

        An engine with continuous batching goes on by a token; another answers all of them.
        """
        ...

    def abort(self) -> None:
        """Forgets the prompts that were taken in and not answered."""
        ...

    def sleep(self) -> None:
        """Frees what it can until :meth:`wake`; a sleeping engine generates nothing."""
        ...

    def wake(self) -> None:
        """Ready again, with the weights it had."""
        ...


class Engine(Sampler, Protocol):
    """An engine holds one copy of the policy and samples from it."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes weights by their checkpoint names; answers carry ``version`` from now on, prefix caches go.

        Args:
            weights: read once, one after the other: whoever makes them as they are asked for never holds them all.
                Either all of a model's, or adapters alone, or both.
        """
        ...

    def fingerprints(self, shapes: Mapping[str, torch.Size]) -> dict[str, int]:
        """Fingerprint (see `grpo_rl.engines.fingerprint`) of the weight it computes with, for each checkpoint name.

        Raises:
            LookupError: it cannot say where it holds one of the names.
        """
        ...

    def close(self) -> None:
        """Frees everything; the engine is of no use after it."""
        ...


class AsyncEngine(Protocol):
    """An engine in a process of its own, spoken to from one event loop; it goes on while weights are replaced.

    Every call but :meth:`generate` has a deadline, and a death is noticed in each; both raise EngineDeadError.
    """

    name: str
    """For messages."""

    version: int
    """Policy version of the weights it holds."""

    dtype: torch.dtype
    max_model_len: int
    takes_adapters: bool

    proves_bytes: bool
    """Whether :meth:`fingerprints` are digests of bytes, but for adapters: it holds each tensor whole, on a CPU."""

    async def generate(self, request_id: str, prompt: Sequence[int], n: int, sampling: Sampling) -> Samples:
        """``n`` answers to a prompt; tokens from before and after an update carry their own versions.

        Raises:
            ValueError: as :meth:`Engine.generate`.
            AbortedError: :meth:`abort` was called.
            EngineDeadError: the engine died, or hangs.
        """
        ...

    async def abort(self, *request_ids: str) -> None:
        """Ends requests that are under way."""
        ...

    async def pause(self) -> None:
        """Holds all requests where they are; after it no token is on its way."""
        ...

    async def resume(self) -> None:
        """Goes on with the requests that were held, and those that came since."""
        ...

    async def fingerprints(self, shapes: Mapping[str, Sequence[int]], read_back: bool = False) -> dict[str, int]:
        """See :meth:`Engine.fingerprints`.

        Args:
            read_back: of what products are made with, rather than of what it was packed from.
        """
        ...

    async def check_health(self) -> None:
        """Returns when the engine answers."""
        ...

    async def sleep(self) -> None:
        """See :meth:`Engine.sleep`; requests under way are held."""
        ...

    async def wake(self) -> None:
        """See :meth:`Engine.wake`."""
        ...

    async def close(self) -> None:
        """Ends the process, within the deadline; may be called on a dead engine, and twice."""
        ...


class EngineFleet(Protocol):
    """Engines on an event loop in another thread; dead ones are replaced. EngineDeadError: they died too often."""

    replaced: int
    """Engines that were or are to be replaced, so far."""

    async def call(self, work: Callable[[AsyncEngine], Awaitable[R]], responses: int) -> R:
        """What ``work``, which samples so many responses, returns of the engine with the least to do.

        Raises:
            EngineLostError: the engine died; a new call goes to another.
        """
        ...

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """What a short piece of work on the fleet's loop returns."""
        ...

    def wait(self, work: Coroutine[Any, Any, R]) -> R:
        """As :meth:`run`, for work that samples: engines that join in the meantime are given weights."""
        ...

    def events(self) -> list[str]:
        """What became of engines since the last call."""
        ...


class StepByGenerate:
    """:meth:`Engine.submit` and :meth:`Engine.step` of an engine that can only answer whole batches."""

    generate: Callable[..., list[Samples]]

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Sequence[int], Sampling]] = {}

    def submit(self, request: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """See :meth:`Engine.submit`."""
        self._waiting[request] = (prompt, sampling)

    def step(self) -> list[tuple[int, Samples]]:
        """See :meth:`Engine.step`."""
        answered: list[tuple[int, Samples]] = []
        while self._waiting:
            # One call takes one way of sampling: those that share the first one's.
            sampling = next(iter(self._waiting.values()))[1]
            batch = [request for request, (_, s) in self._waiting.items() if s == sampling]
            prompts = [self._waiting.pop(request)[0] for request in batch]
            answered += zip(batch, self.generate(prompts, 1, sampling), strict=True)
        return answered

    def abort(self) -> None:
        """See :meth:`Engine.abort`."""
        self._waiting.clear()


def check_request(prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, max_model_len: int) -> None:
    """Refuses what no engine can answer.

    Raises:
        ValueError: a prompt is empty or as long as the context, or several greedy answers are asked for.
    """
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) < max_model_len:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens; it needs at least 1 and fewer than max_model_len={max_model_len}"
            )
    if n > 1 and sampling.temperature == 0:
        raise ValueError(f"{n} greedy answers to one prompt would all be equal; ask for n=1 or a temperature above 0")
