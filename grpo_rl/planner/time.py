"""Expected seconds of a step's phases: the floors of `grpo_rl.perf.roofline`, at the rates that a device reaches.

What travels between devices is counted beside them: a sharded model's weights and gradients in each micro-batch, and
the weights that are pushed. What the ranks of one engine tell each other is taken to be in the share.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from grpo_rl.data.batching import micro_batches
from grpo_rl.data.group import Group
from grpo_rl.perf.rates import Rates
from grpo_rl.perf.roofline import floors_s
from grpo_rl.planner.batches import BatchPlan, assumed_group
from grpo_rl.planner.hardware import Device
from grpo_rl.planner.memory import EngineMemory, Shape, Training, kept_state

TRAIN_SHARE = 0.4
"""Share of the rate in matrix products: 38 to 43 % were reached with Llama 3 405B on 8,192 and 16,384 H100 (table 4 of
https://arxiv.org/abs/2407.21783). A run of one process in mode=sync logs its own as ``limit_fraction/train``."""
SAMPLE_SHARE = 0.5
"""Share of both rates, an assumption; a run of one process in mode=sync logs its own as ``limit_fraction/sample``."""


@dataclass(frozen=True)
class Work:
    """The work of a step whose groups are all alike.

    Args:
        train_share: share of a device's rates that training and scoring reach.
        sample_share: share of them that sampling reaches.
    """

    batches: BatchPlan
    train_share: float = TRAIN_SHARE
    sample_share: float = SAMPLE_SHARE

    def __post_init__(self) -> None:
        for name in ("train_share", "sample_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name.replace('_', '-')} is {getattr(self, name)}; it is more than 0 and at most 1")

    def groups(self, count: int, reference: bool = False) -> list[Group]:
        """So many groups of a collection; no two prompts begin alike."""
        b = self.batches
        return [assumed_group(b.prompt_tokens, b.response_tokens, b.group_size, i, reference) for i in range(count)]


@functools.lru_cache(maxsize=4096)  # the search for a split asks again and again
def train_s(shape: Shape, training: Training, work: Work, device: Device, ranks: int, sharded: bool) -> float:
    """Seconds of all optimizer steps of a collection.

    The rank with most groups is waited for. Gathering and reducing weights runs beside the computation: what takes
    longer counts. Every number of the optimizer's state is read and written once a step.
    """
    b, rates, link = work.batches, device.rates(work.train_share), device.link_bytes_per_s(ranks)
    groups = work.groups(math.ceil(b.batch_groups / ranks))
    compute = floors_s(groups, shape.sizes, rates)["train"]
    if training.checkpointing:
        compute *= (3 + shape.sizes.trained) / (2 + shape.sizes.trained)
    trained = shape.adapters or shape.parameters
    if sharded:
        # Gathered for the forward pass and again for the backward pass; gradients are reduced in fp32.
        count = b.accumulation and min(b.accumulation, len(groups))
        travels = len(micro_batches(groups, b.max_tokens, count)) * (
            2 * shape.itemsize * shape.parameters + 4 * trained
        )
    else:
        travels = 2 * 4 * trained
    travel = travels * (ranks - 1) / ranks / link
    state = kept_state(shape, training, ranks if sharded else 1)
    update = 2 * sum(state.values()) / device.rates().bytes_per_s
    return b.batches * b.epochs * (max(compute, travel) + update)


@functools.lru_cache(maxsize=4096)
def score_s(shape: Shape, work: Work, device: Device, ranks: int, sharded: bool) -> float:
    """Seconds of the forward passes before training, the reference's and the policy's own, on so many devices."""
    b = work.batches
    groups = work.groups(math.ceil(b.prompts / ranks), reference=True)
    compute = floors_s(groups, shape.sizes, device.rates(work.train_share))["score"]
    gathered = len(micro_batches(groups, b.max_tokens)) * shape.itemsize * shape.parameters if sharded else 0
    travel = gathered * (ranks - 1) / ranks / device.link_bytes_per_s(ranks)
    return (b.has_reference + b.needs_old_log_probs) * max(compute, travel)


@functools.lru_cache(maxsize=4096)
def sample_s(shape: Shape, engine: EngineMemory, work: Work, device: Device, engines: int, size: int) -> float:
    """Seconds of sampling a collection on so many engines of ``size`` devices; infinite where none fits.

    An engine's responses run in waves of as many as its KV cache holds, and each wave reads the weights once for every
    token. Keys and values are read beside that, as attention's kernels do nothing else.
    """
    b = work.batches
    groups = math.ceil(b.prompts / engines)
    responses = groups * b.group_size
    at_once = min(responses, engine.sequences, engine.tokens // (b.prompt_tokens + b.response_tokens))
    if at_once < 1:
        return math.inf
    waves = math.ceil(responses / at_once)
    one = device.rates(work.sample_share)
    rates = Rates(size * one.gemm_flops_per_s, size * one.bytes_per_s)
    computed = waves * floors_s(work.groups(math.ceil(groups / waves)), shape.sizes, rates)["sample"]
    keys = responses * shape.sizes.keys_seen(b.prompt_tokens, b.prompt_tokens + b.response_tokens)
    return computed + keys * engine.kv_per_token / shape.layers / one.bytes_per_s


def sync_s(shape: Shape, device: Device, devices: int, shared: bool = False) -> float:
    """Seconds of a push with its proof: passes over the weights at the memory's rate, or the way between devices.

    The weights are read and written, and read on either side for their fingerprints. On a device that trains and
    samples at the same time they are also written into memory that both sides share, and read from there.

    Args:
        devices: the number of all devices.
        shared: the trainer and an engine in another process have the same device.
    """
    passes = shape.sizes.pushed_bytes * (6 if shared else 4) / device.rates().bytes_per_s
    return passes if devices == 1 else max(passes, shape.sizes.pushed_bytes / device.link_bytes_per_s(devices))
