"""Plan: what a scenario needs before anything is loaded, as memory by role and device and seconds by phase.

Seconds are the floors of `grpo_rl.perf.roofline`, at the rates that a device reaches. What travels between devices is
counted in addition: a sharded model's weights and gradients in each micro-batch, and the weights that are pushed. What
the ranks of one engine exchange is taken to be in the share.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from grpo_rl.data.batching import micro_batches_of
from grpo_rl.perf.rates import Rates
from grpo_rl.perf.roofline import floors_s
from grpo_rl.planner.batches import BatchPlan
from grpo_rl.planner.hardware import GIB, Device
from grpo_rl.planner.memory import EngineMemory, Shape, Training, kept_state, reference_activations
from grpo_rl.planner.scenario import Scenario
from grpo_rl.settings.devices import USABLE, allocate
from grpo_rl.weights.shared_memory import GPU_BYTES

TOKEN_STEP = 256
"""Micro-batches are planned in multiples of so many tokens."""
MOST_TOKENS = 1 << 22


@dataclass(frozen=True)
class Layout:
    """The number of devices of each role.

    Args:
        ref: devices of the reference alone; 0: it shares the trainer's, or there is none.
        colocated: the devices that sample are those that train, in turns.
    """

    train: int
    ref: int
    inference: int
    engine_size: int
    colocated: bool = False

    @property
    def engines(self) -> int:
        return self.inference // self.engine_size

    @property
    def total(self) -> int:
        """The number of devices in use."""
        return self.train + self.ref + (0 if self.colocated else self.inference)


@dataclass(frozen=True)
class Role:
    """The memory that one device of a role holds."""

    name: str
    parts: Mapping[str, float]
    usable: float
    moment: str

    @property
    def needed(self) -> float:
        return sum(self.parts.values())

    @property
    def missing_gib(self) -> float:
        """The memory that it lacks; 0 where it fits."""
        return max(0.0, self.needed - self.usable) / GIB


@dataclass(frozen=True)
class Plan:
    """A scenario on a layout.

    Args:
        held: bytes of what shares the trainer's devices while it trains.
        roles: memory of each role that has devices of its own; other roles are in the parts of those they share with.
    """

    scenario: Scenario
    layout: Layout
    held: Mapping[str, float]
    roles: tuple[Role, ...]
    engine: EngineMemory
    seconds: Mapping[str, float]

    @property
    def missing(self) -> dict[str, float]:
        """GiB that roles lack, by role."""
        return {role.name: role.missing_gib for role in self.roles if role.missing_gib > 0}

    @property
    def fits(self) -> bool:
        return not self.missing

    @property
    def shared(self) -> bool:
        """True if a GPU trains and samples at the same time."""
        return self.scenario.shares_gpu(self.layout.colocated)

    @property
    def step_s(self) -> float:
        """Seconds of a step: phases in turns, or sampling in parallel with all others.

        On a device that does both at the same time each phase slows the other down: the sum is planned there, too.
        """
        if not self.scenario.overlaps or self.shared:
            return sum(self.seconds.values())
        return max(self.seconds["sample"], sum(s for phase, s in self.seconds.items() if phase != "sample"))

    @cached_property
    def largest_tokens(self) -> int:
        """The largest multiple of :data:`TOKEN_STEP` that a micro-batch could have; 0: none fits."""
        usable = self.roles[0].usable - sum(self.held.values())
        sizes = range(TOKEN_STEP, MOST_TOKENS + 1, TOKEN_STEP)
        fitting = bisect_right(sizes, usable, key=lambda tokens: self.scenario.trainer(self.layout.train, tokens).total)
        return fitting * TOKEN_STEP

    @property
    def largest_len(self) -> int:
        """Tokens of the longest prompt and response that the engine could hold."""
        return min(self.engine.tokens, self.scenario.shape.positions)

    @property
    def refused(self) -> str:
        """The reason why no script runs it, and the remedy; empty where one does."""
        if self.scenario.overlaps or self.scenario.settings.inference_model.engine != "vllm":
            return ""
        if self.layout.train > 1:
            return "with mode=sync vLLM is in the process of one trainer, and here are several; use mode=async"
        if self.layout.engines > 1:
            return f"with mode=sync there is one engine, and here are {self.layout.engines}; use mode=async"
        return ""

    @property
    def overrides(self) -> dict[str, object]:
        """The settings that ask for this layout."""
        layout, settings = self.layout, self.scenario.settings
        return {
            "train_model.num_devices": layout.train,
            "inference_model.num_devices": layout.inference,
            "inference_model.tensor_parallel_size": layout.engine_size,
            "inference_model.gpu_memory_utilization": settings.inference_model.gpu_memory_utilization,
        }


def make_plan(scenario: Scenario) -> Plan:
    """The plan of a scenario with the devices that its config asks for.

    Raises:
        ValueError: the devices are not there, or can't be divided like that; several trainers, and a reference on a
            device of its own; the batches' lengths do not fit.
    """
    shape = scenario.shape
    devices = allocate(scenario.settings, scenario.settings.mode, scenario.visible, shape.heads)
    size, ranks = devices.tensor_parallel_size, len(devices.train)
    if not shape.can_split_keys(size):
        raise ValueError(
            f"inference_model.tensor_parallel_size={size}: {shape.kv_heads} key-value heads can be neither split nor "
            f"repeated {size} ways; use a divisor or a multiple of {shape.kv_heads}"
        )
    ref = len(devices.ref) if scenario.has_reference and devices.ref != devices.train else 0
    if ref and ranks > 1:
        raise ValueError(
            f"ref_model asks for devices of its own next to {ranks} that train, each of which scores the reference "
            "itself; leave ref_model.num_devices and ref_model.devices null, or train on one"
        )
    return plan_layout(scenario, Layout(ranks, ref, len(devices.inference), size, devices.colocated))


def plan_layout(scenario: Scenario, layout: Layout) -> Plan:
    """The plan of a scenario on this layout, whatever devices its config asks for."""
    shape, device, ranks = scenario.shape, scenario.cluster.device, layout.train
    usable, engine = USABLE * device.memory, scenario.engine(layout.engine_size, layout.engines)
    shared = scenario.shares_gpu(layout.colocated)
    held = {} if layout.ref else {"reference": scenario.reference_bytes(ranks)}
    beside_engine = 0.0  # what stays on the engine's devices while it samples
    if layout.colocated and scenario.engine_sleeps:
        beside_engine = sum(held.values()) + scenario.kept(ranks)
    elif layout.colocated:
        held["vLLM"] = engine.budget
        if shared:
            held["weights on their way"] = GPU_BYTES
    tokens = scenario.micro_batch_tokens(ranks)
    peak = scenario.trainer(ranks, tokens)
    roles = [Role("train", peak.parts | held, usable, peak.moment)]
    if layout.ref:
        parts = {"weights": scenario.reference_bytes(1)} | reference_activations(shape, tokens, device.kind)
        roles.append(Role("ref", parts, usable, "scoring"))
    # The cache has to hold one response of the greatest length, and is as large as the engine's budget allows.
    least = scenario.settings.inference_model.max_model_len * engine.kv_per_token
    parts = {"weights": engine.weights, "largest batch": engine.work, "KV cache": max(engine.cache, least)}
    roles.append(Role("inference", parts, min(engine.budget, usable - beside_engine), "sampling"))
    b, train_share, sharded = scenario.batches, scenario.train_share, scenario.shards(ranks) > 1
    seconds = {
        "sample": sample_s(shape, engine, b, scenario.sample_share, device, layout.engines, layout.engine_size),
        "score": score_s(shape, b, train_share, device, ranks, sharded),
        "train": train_s(shape, scenario.training, b, train_share, device, ranks, sharded),
        "sync": sync_s(shape, device, layout.total, shared),
    }
    return Plan(scenario, layout, held, tuple(roles), engine, seconds)


@functools.lru_cache(maxsize=4096)  # the search for a split asks again and again
def train_s(
    shape: Shape, training: Training, batches: BatchPlan, share: float, device: Device, ranks: int, sharded: bool
) -> float:
    """Seconds of all optimizer steps of a collection, at this share of the devices' rates.

    The rank with most groups is waited for. Gathering and reducing weights overlaps the computation: what takes
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
    are read on top of that, as attention's kernels do nothing else.
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
