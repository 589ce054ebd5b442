"""Expected seconds of a step's phases: the floors of `grpo_rl.perf.roofline`, at the rates that a device reaches.

What travels between devices is counted beside them: a sharded model's weights and gradients in each micro-batch, and
the weights that are pushed. What the ranks of one engine tell each other is taken to be in the share.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from grpo_rl.data.batching import micro_batches_of
from grpo_rl.perf.rates import Rates
from grpo_rl.perf.roofline import floors_s
from grpo_rl.planner.batches import BatchPlan
from grpo_rl.planner.hardware import Device
from grpo_rl.planner.memory import EngineMemory, Shape, Training, kept_state


@functools.lru_cache(maxsize=4096)  # the search for a split asks again and again
def train_s(
    shape: Shape, training: Training, batches: BatchPlan, share: float, device: Device, ranks: int, sharded: bool
) -> float:
    """Seconds of all optimizer steps of a collection, at this share of the devices' rates.

    The rank with most groups is waited for. Gathering and reducing weights runs beside the computation: what takes
    longer counts. Every number of the optimizer's state is read and written once a step.
    """
    groups = batches.assumed_groups(math.ceil(batches.batch_groups / ranks))
    compute = floors_s(groups, shape.sizes, device.rates(share), alike=False)["train"]
    if training.checkpointing:
        compute *= (3 + shape.sizes.trained) / (2 + shape.sizes.trained)
    trained = shape.adapters or shape.parameters
    if sharded:
        # Gathered for the forward pass and again for the backward pass; gradients are reduced in fp32.
        _, micro_batches = micro_batches_of(None, groups, batches.max_tokens, batches.accumulation)
        travels = micro_batches * (2 * shape.itemsize * shape.parameters + 4 * trained)
    else:
        travels = 2 * 4 * trained
    travel = travels * (ranks - 1) / ranks / device.link_bytes_per_s(ranks)
    state = kept_state(shape, training, ranks if sharded else 1)
    update = 2 * sum(state.values()) / device.rates().bytes_per_s
    return batches.batches * batches.epochs * (max(compute, travel) + update)


@functools.lru_cache(maxsize=4096)
def score_s(shape: Shape, batches: BatchPlan, share: float, device: Device, ranks: int, sharded: bool) -> float:
    """Seconds of the forward passes before training, the reference's and the policy's own, on so many devices."""
    groups = batches.assumed_groups(math.ceil(batches.prompts / ranks), reference=True)
    compute = floors_s(groups, shape.sizes, device.rates(share), alike=False)["score"]
    _, micro_batches = micro_batches_of(None, groups, batches.max_tokens)
    gathered = micro_batches * shape.itemsize * shape.parameters if sharded else 0
    travel = gathered * (ranks - 1) / ranks / device.link_bytes_per_s(ranks)
    return (batches.has_reference + batches.needs_old_log_probs) * max(compute, travel)


@functools.lru_cache(maxsize=4096)
def sample_s(
    shape: Shape, engine: EngineMemory, batches: BatchPlan, share: float, device: Device, engines: int, size: int
) -> float:
    """Seconds of sampling a collection on so many engines of ``size`` devices; infinite where none fits.

    An engine's responses run in waves of as many as its KV cache holds, and each wave reads the weights once for every
    token, of a mixture the experts that the wave's responses visit together if each chooses by itself. Keys and values
    are read beside that, as attention's kernels do nothing else.
    """
    groups = math.ceil(batches.prompts / engines)
    responses = groups * batches.group_size
    at_once = min(responses, engine.sequences, engine.tokens // (batches.prompt_tokens + batches.response_tokens))
    if at_once < 1:
        return math.inf
    waves = math.ceil(responses / at_once)
    one = device.rates(share)
    rates = Rates(size * one.gemm_flops_per_s, size * one.bytes_per_s)
    sizes, experts = shape.sizes, shape.experts
    more = experts.visited(at_once) - experts.visited(1)  # than the floor counts
    sizes = replace(sizes, decode_bytes=sizes.decode_bytes + round(more * experts.parameters * shape.itemsize))
    computed = waves * floors_s(batches.assumed_groups(math.ceil(groups / waves)), sizes, rates, alike=False)["sample"]
    keys = responses * shape.sizes.keys_seen(batches.prompt_tokens, batches.prompt_tokens + batches.response_tokens)
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
