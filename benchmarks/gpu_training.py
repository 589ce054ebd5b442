"""The rows of `gpu.py` about training steps: their time, and the share of the GPU's peak that they reach."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import harness
import torch

if TYPE_CHECKING:
    from gpu_rows import Figures, Place


LARGEST_GROUP = 2048
TOKENS = {"512 tokens": (512, 64), "16,384 tokens": (16_384, 256)}
"""Tokens of a step, and of a toy's, by the name of their figures."""


def training(place: Place, shape: str) -> Figures:
    """Forward, backward and optimizer step of packed groups, as training takes them."""
    from grpo_rl.perf.roofline import ModelSizes
    from grpo_rl.policies.policy import TrainPolicy
    from grpo_rl.training.optimizer import PolicyOptimizer

    policy = TrainPolicy.load(place.model(shape), torch.bfloat16, place.device, compile=None)
    sizes, optimizer = ModelSizes.of(policy.model), PolicyOptimizer(policy.model, lr=1e-6)
    peak = peak_flops_per_s(place.device)
    for name, (whole, toy) in TOKENS.items():
        tokens = toy if place.toy else whole
        groups = sampled(policy, packed_groups(tokens, policy.model.config.vocab_size))
        largest, seconds = at_largest_micro_batch(functools.partial(trained, policy, optimizer, groups), tokens)
        yield f"{name}, tokens a micro-batch", largest
        yield f"{name}, step_ms", 1000 * seconds
        yield f"{name}, share of the peak", share_of_peak(groups, sizes, seconds, peak)
    if torch.device(place.device).type == "cuda":
        yield "peak_gib", torch.cuda.max_memory_allocated() / 2**30


def packed_groups(tokens: int, vocab: int) -> list:
    """Groups of 8 responses with a quarter of the tokens in the prompt, 2,048 tokens each at most.

    >>> [group.num_tokens for group in packed_groups(4096, vocab=32)], packed_groups(512, 32)[0].lengths[0]
    ([2048, 2048], tensor(48))
    """
    from grpo_rl.testing import random_group

    each = min(tokens, LARGEST_GROUP)
    signs = torch.tensor([1.0, -1.0]).repeat(4)  # no advantage is zero: a group without one would not be computed
    return [
        random_group(each // 4, [each * 3 // 32] * 8, vocab, group_id=i, seed=i).with_advantages(signs)
        for i in range(tokens // each)
    ]


def sampled(policy, groups: Sequence) -> list:
    """The groups with the policy's own log-probabilities as the sampler's: ratios are 1, and no token is clipped."""
    return [
        replace(group, log_probs=group.old_log_probs, old_log_probs=None, old_entropies=None)
        for group in policy.add_log_probs(groups, LARGEST_GROUP)
    ]


def trained(policy, optimizer, groups: Sequence, max_tokens: int) -> float:
    """Seconds of a step over the groups, the median of five after three that compile."""
    from grpo_rl.data.batching import MicroBatching
    from grpo_rl.losses.grpo import GRPOLoss
    from grpo_rl.training.micro_batches import scored_micro_batches

    loss = GRPOLoss()

    def step() -> dict[str, float]:
        harness.synchronize(str(policy.device))
        start = time.perf_counter()
        for tokens in scored_micro_batches(policy, groups, MicroBatching(max_tokens)):
            loss(tokens)["loss"].backward()
        result = optimizer.step()
        harness.synchronize(str(policy.device))
        seconds = time.perf_counter() - start
        assert not result.skipped, f"no step was taken: {result}"
        return {"step_s": seconds}

    try:
        (reports,) = harness.rounds({f"micro-batches of {max_tokens}": step}, count=5, warmup=3).values()
    except torch.OutOfMemoryError:
        optimizer.clear_gradients()
        policy.model.zero_grad()
        raise
    return median(report["step_s"] for report in reports)


def at_largest_micro_batch(run: Callable[[int], float], tokens: int) -> tuple[int, float]:
    """The largest micro-batch that fits into memory, of all the tokens, half or a quarter; and the seconds of a step.

    >>> def run(tokens):
    ...     if tokens > 50:
    ...         raise torch.OutOfMemoryError
    ...     return 2.0
    >>> at_largest_micro_batch(run, 100)
    (50, 2.0)
    """
    for parts in (1, 2):
        with contextlib.suppress(torch.OutOfMemoryError):
            return tokens // parts, run(tokens // parts)
        harness.release_gpu()
    return tokens // 4, run(tokens // 4)


def peak_flops_per_s(device: str) -> float:
    """Dense bf16 operations a second: the GPU's datasheet, else what a product reaches here."""
    from grpo_rl.perf.roofline import measure_rates
    from grpo_rl.planner.hardware import known_device

    known = known_device(torch.cuda.get_device_name(device)) if torch.device(device).type == "cuda" else None
    return known.tflops * 1e12 if known else measure_rates(torch.bfloat16, device).gemm_flops_per_s


def share_of_peak(groups: Sequence, sizes, seconds: float, flops_per_s: float) -> float:
    """Operations of a training step that are needed for the groups, over those that the device could do meanwhile.

    Six for each of 100 weights of the trunk and 9 tokens, and of 40 of the head and 5 responses' tokens: 6,600.

    >>> from grpo_rl.perf.roofline import ModelSizes
    >>> from grpo_rl.testing import random_group
    >>> sizes = ModelSizes(100, hidden=4, vocab=10, attention=0, decode_bytes=280, pushed_bytes=280, windows=())
    >>> share_of_peak([random_group(prompt=4, lengths=[3, 2])], sizes, seconds=2.0, flops_per_s=6600.0)
    0.5
    """
    from grpo_rl.perf.roofline import Rates, floors_s

    return floors_s(groups, sizes, Rates(flops_per_s, 1.0))["train"] / seconds
