"""The interface of every inference engine: ids in, ids out, and weights that can be proven to have arrived.

Letters: G responses to one prompt, R tokens of all of them, K ids of their kept sets, P tokens of the prompt, L decoder
layers, X experts of a token.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from grpo_rl.engines.sampling import Sampling

if TYPE_CHECKING:
    from grpo_rl.data.group import Kept

R = TypeVar("R")
ADAPTER_NAME = re.compile(r"(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
"""Names of a LoRA layer's two factors, as engines take them."""
SIGNS = (
    "DefaultCPUAllocator: can't allocate",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "MPS backend out of memory",
)
"""Messages by which torch's generic errors report a lack of memory."""


class OutOfMemoryError(RuntimeError):
    """Memory ran out, and smaller batches can't help."""


class EngineDeadError(RuntimeError):
    """An engine's process has ended, or does not answer within its deadline; names it."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if an error is torch's or Triton's report that a GPU or the machine ran out of memory.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)


def reason(error: BaseException) -> str:
    """The beginning of an error's message, on one line; its type if it has none.

    >>> reason(RuntimeError("CUDA out of memory.\\nTried to allocate")), reason(torch.OutOfMemoryError())
    ('CUDA out of memory. Tried to allocate', 'OutOfMemoryError')
    """
    return " ".join(str(error).split())[:300] or type(error).__name__


def free_memory() -> None:
    """Gives back what is not used any more, in reference cycles and in torch's cache of a GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """A context whose random numbers follow from the seed, and that leaves those outside as they would have been.

    >>> with seeded(3):
    ...     first = torch.rand(1)
    >>> with seeded(3):
    ...     first == torch.rand(1)
    tensor([True])
    """
    if seed is None:
        yield
        return
    with forked_random_state():
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        yield


@contextmanager
def forked_random_state() -> Iterator[None]:
    """A context that draws from copies of torch's random states, and of numpy's.

    On a GPU vLLM takes the seed of each request that has none from numpy's.
    """
    before = np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        np.random.set_state(before)


@dataclass(frozen=True, eq=False)
class Samples:
    """The G responses to one prompt, flat with offsets, as in `grpo_rl.data.group.Group`.

    Args:
        response_ids: [R] int64, the end-of-sequence token included where one was sampled.
        log_probs: [R] float32, of the sampled tokens at the sampling temperature, in nats; those of greedy
            responses at temperature 1.
        offsets: [G + 1] int64.
        truncated: [G] True where a response reached ``max_new_tokens`` (finish reason "length"), and not an end of
            sequence or a stop string.
        version: policy version of the weights that sampled the last token.
        token_versions: [R] int64, policy version of each token; None where all have ``version``.
        routes: [R, L, X] experts that the routers chose, as in `grpo_rl.data.group.Group`, if they are recorded.
        prompt_routes: [P, L, X] likewise.
        kept_ids: [K] int32, the ids that each token was drawn from, token after token, where others were cut off
            (`grpo_rl.data.group.Kept`); ``log_probs`` are those of the distribution restricted to them.
        kept_counts: [R] int64, how many of them belong to each token; given with ``kept_ids``.
    """

    response_ids: Int[Tensor, " R"]
    log_probs: Float[Tensor, " R"]
    offsets: Int[Tensor, " G1"]
    truncated: Bool[Tensor, " G"]
    version: int
    token_versions: Int[Tensor, " R"] | None = None
    routes: Int[Tensor, "R L X"] | None = None
    prompt_routes: Int[Tensor, "P L X"] | None = None
    kept_ids: Int[Tensor, " K"] | None = None
    kept_counts: Int[Tensor, " R"] | None = None

    @property
    def kept(self) -> Kept | None:
        """The kept sets of the tokens; None where nothing was cut off."""
        if self.kept_ids is None or self.kept_counts is None:
            return None
        from grpo_rl.data.group import Kept  # here, not above: it imports tensordict

        return Kept(self.kept_ids, self.kept_counts)

    @property
    def versions(self) -> Int[Tensor, " R"]:
        """Policy version of the weights that sampled each token."""
        if self.token_versions is not None:
            return self.token_versions
        return torch.full_like(self.response_ids, self.version)

    @property
    def responses(self) -> tuple[Tensor, ...]:
        """Ids of each response."""
        return self.response_ids.split(self.offsets.diff().tolist())

    @classmethod
    def from_lists(
        cls,
        ids: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
        truncated: Sequence[bool],
        version: int,
        kept: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> Samples:
        """Samples from one list per response.

        Args:
            kept: the kept set of each token of each response.

        >>> Samples.from_lists([[5], [6, 7]], [[-0.5], [-0.1, -0.2]], [False, True], 3).offsets.tolist()
        [0, 1, 3]
        """
        sets = None
        if kept is not None:
            from grpo_rl.data.group import Kept

            sets = Kept.from_lists([*chain.from_iterable(kept)])
        # Not `torch.tensor`, which takes three times as long to read a list.
        return cls(
            response_ids=torch.from_numpy(np.fromiter(chain.from_iterable(ids), np.int64)),
            log_probs=torch.from_numpy(np.fromiter(chain.from_iterable(log_probs), np.float32)),
            offsets=torch.tensor([0, *accumulate(map(len, ids))]),
            truncated=torch.tensor(truncated, dtype=torch.bool),
            version=version,
            kept_ids=sets and sets.ids,
            kept_counts=sets and sets.counts,
        )


class Sampler(Protocol):
    """Samples responses to prompts: an engine, or a fleet of them."""

    version: int
    """Policy version of the weights that the engine holds."""

    dtype: torch.dtype
    """Type of the weights it holds; weights are rounded to it before they are sent."""

    max_model_len: int
    """Most tokens of a prompt and its response."""

    takes_adapters: bool
    """True if the engine holds LoRA adapters next to its weights, and takes them as ``<layer>.lora_A.weight``
    (r x inputs) and ``<layer>.lora_B.weight`` (outputs x r, scaled)."""

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples]:
        """``n`` responses to each prompt, in the prompts' order.

        Raises:
            ValueError: a prompt is empty or leaves no room for a response, or several greedy responses are asked for.
        """

    def submit(self, request: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """Queues one prompt, for one response, under a number that :meth:`step` returns; raises as :meth:`generate`."""

    def step(self) -> list[tuple[int, Samples]]:
        """Samples on for all queued prompts, and returns those that are finished now, each a group of one.

        An engine with continuous batching samples one token of each; another finishes all of them.
        """

    def abort(self) -> None:
        """Drops the queued prompts that are not finished."""

    def metrics(self) -> dict[str, float]:
        """Further counts of this engine, so far; none by default."""
        return {}

    def sleep(self) -> None:
        """Frees what it can until :meth:`wake`; a sleeping engine generates nothing."""

    def wake(self) -> None:
        """Makes a sleeping engine ready again, with the weights that it had."""


class StepByGenerate(Sampler):
    """The calls `submit` and `step` of an engine that can only sample whole batches."""

    in_rounds = True
    """Conversations wait for all replies before the next turns: a response depends on those of its batch, and which
    these are must not follow from whose reply is first."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Sequence[int], Sampling]] = {}

    @override
    def submit(self, request: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self._waiting[request] = (prompt, sampling)

    @override
    def step(self) -> list[tuple[int, Samples]]:
        finished: list[tuple[int, Samples]] = []
        while self._waiting:
            # A call has one `Sampling`: prompts that share the first one's.
            sampling = next(iter(self._waiting.values()))[1]
            batch = [request for request, (_, s) in self._waiting.items() if s == sampling]
            prompts = [self._waiting.pop(request)[0] for request in batch]
            finished += zip(batch, self.generate(prompts, 1, sampling), strict=True)
        return finished

    @override
    def abort(self) -> None:
        self._waiting.clear()


class Engine(Sampler, Protocol):
    """Holds one copy of the policy and samples from it."""

    proves_bytes: bool
    """True if :meth:`fingerprints` returns byte digests without ``read_back`` (vLLM on a CPU does if one process holds
    each tensor whole). LoRA factors always have fingerprints."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes weights by their checkpoint names; responses carry ``version`` from now on, prefix caches are dropped.

        Args:
            weights: all of a model's, or adapters alone, or both. The iterator is read once, so that a generator never
                holds them all.
        """

    def fingerprints(self, shapes: Mapping[str, torch.Size], read_back: bool = False) -> dict[str, int]:
        """Fingerprint (see `grpo_rl.engines.fingerprint`) of the weight it computes with, for each checkpoint name.

        Args:
            read_back: read the packed weights themselves, which is much slower than returning the digest taken before
                packing.

        Raises:
            LookupError: the engine holds none of that name.
        """

    def close(self) -> None:
        """Frees everything; the engine cannot be used afterwards."""


def check_request(prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, max_model_len: int) -> None:
    """Refuses requests that no engine can serve.

    Raises:
        ValueError: a prompt is empty or as long as the context, or several greedy responses are asked for.
    """
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) < max_model_len:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens; it needs at least 1 and fewer than max_model_len={max_model_len}"
            )
    if n > 1 and sampling.temperature == 0:
        raise ValueError(f"{n} greedy responses to one prompt would all be equal; ask for n=1 or a temperature above 0")
