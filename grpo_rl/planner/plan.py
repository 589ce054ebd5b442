"""Plan: what a scenario needs before anything is loaded, as memory by role and device and seconds by phase.

Seconds are those of `grpo_rl.perf.roofline` at the rates that a device reaches. What travels between devices is
counted in addition: a sharded model's weights and gradients in each micro-batch, and the weights that are pushed. What
the ranks of one engine exchange is taken to be in the share.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from grpo_rl.perf.roofline import ModelSizes
from grpo_rl.planner.batches import BatchPlan, equal_micro_batches
from grpo_rl.planner.hardware import GIB, Device
from grpo_rl.planner.memory import EngineMemory, Shape, reference_activations
from grpo_rl.planner.scenario import Layout, Scenario
from grpo_rl.settings.devices import USABLE, allocate
from grpo_rl.weights.shared_memory import GPU_BYTES

TOKEN_STEP = 256
"""Micro-batches are planned in multiples of so many tokens."""
MOST_TOKENS = 1 << 22


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
        return self.scenario.shares_gpu(self.layout)

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
        one, counts = "with mode=sync one process trains with one engine", (self.layout.train, self.layout.engines)
        return f"{one}, and here are {counts[0]} and {counts[1]}; use mode=async" if counts != (1, 1) else ""

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
        fitting = f"use a divisor or a multiple of {shape.kv_heads}, the key-value heads"
        raise ValueError(f"inference_model.tensor_parallel_size={size}: {fitting}")
    ref = len(devices.ref) if scenario.has_reference and devices.ref != devices.train else 0
    if ref and ranks > 1:
        own = "ref_model has devices of its own next to one trainer alone"
        raise ValueError(f"{own}, and {ranks} train; leave ref_model.num_devices and ref_model.devices null")
    return plan_layout(scenario, Layout(ranks, ref, len(devices.inference), size, devices.colocated))


def plan_layout(scenario: Scenario, layout: Layout) -> Plan:
    """The plan of a scenario on this layout, whatever devices its config asks for."""
    shape, device, ranks = scenario.shape, scenario.cluster.device, layout.train
    usable, engine = USABLE * device.memory, scenario.engine(layout.engine_size, layout.engines)
    held = {} if layout.ref else {"reference": scenario.reference_bytes(ranks)}
    while_sampling = 0.0  # what stays on the engine's devices
    if layout.colocated and scenario.engine_sleeps:
        kept = 0.0 if scenario.training.offloaded else sum(scenario.kept_state(ranks).values())
        while_sampling = sum(held.values()) + kept
    elif layout.colocated:
        held["vLLM"] = engine.budget
        if scenario.shares_gpu(layout):
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
    roles.append(Role("inference", parts, min(engine.budget, usable - while_sampling), "sampling"))
    b, share = scenario.batches, scenario.sample_share
    sampling = sample_s(shape, engine, b, share, device, layout.engines, layout.engine_size)
    seconds = {"sample": sampling} | _seconds_of_training(scenario, layout)
    return Plan(scenario, layout, held, tuple(roles), engine, seconds)


def _seconds_of_training(scenario: Scenario, layout: Layout) -> dict[str, float]:
    """Seconds of a collection's forward passes before training, of all its optimizer steps, and of a push.

    The rank with most groups is waited for. Gathering and reducing weights overlaps the computation: what takes
    longer counts. Every number of the optimizer's state is read and written once a step.

    A push with its proof is passes over the weights at the memory's rate, or the way between devices: they are read and
    written, and read on either side for their fingerprints. On a device that trains and samples at the same time they
    are also written into memory that both sides share, and read from there.
    """
    shape, b, device, ranks = scenario.shape, scenario.batches, scenario.cluster.device, layout.train
    sizes, bytes_per_s, sharded = shape.sizes, device.rates().bytes_per_s, scenario.shards(ranks) > 1
    forward_s = _group_flops(sizes, b) / device.rates(scenario.train_share).gemm_flops_per_s
    gathered, trained = shape.itemsize * shape.parameters, shape.adapters or shape.parameters

    def travel_s(size: float) -> float:
        return size * (ranks - 1) / ranks / device.link_bytes_per_s(ranks)

    def micro_batches(groups: int, count: int | None) -> int:
        return len(equal_micro_batches(groups, b.group_tokens, b.max_tokens, count))

    groups = math.ceil(b.prompts / ranks)
    travels = micro_batches(groups, None) * gathered if sharded else 0
    score = (b.has_reference + b.needs_old_log_probs) * max(groups * forward_s, travel_s(travels))

    groups = math.ceil(b.batch_groups / ranks)
    # The backward pass takes twice the forward's operations, or once where weights are frozen.
    compute = groups * forward_s * (2 + sizes.trained + scenario.training.checkpointing)
    travels = 2 * 4 * trained
    if sharded:  # gathered for the forward pass and again for the backward pass; gradients are reduced in fp32
        travels = micro_batches(groups, b.accumulation) * (2 * gathered + 4 * trained)
    update = 2 * sum(scenario.kept_state(ranks).values()) / bytes_per_s
    train = b.batches * b.epochs * (max(compute, travel_s(travels)) + update)

    sync = sizes.pushed_bytes * (6 if scenario.shares_gpu(layout) else 4) / bytes_per_s
    if layout.total > 1:
        sync = max(sync, sizes.pushed_bytes / device.link_bytes_per_s(layout.total))
    return {"score": score, "train": train, "sync": sync}


def sample_s(
    shape: Shape, engine: EngineMemory, batches: BatchPlan, share: float, device: Device, engines: int, size: int
) -> float:
    """Seconds of sampling a collection on so many engines of ``size`` devices; infinite where none fits.

    An engine's responses run in waves of as many as its KV cache holds, and each wave reads the weights once for every
    token, of a mixture the experts that the wave's responses visit together if each chooses by itself. Keys and values
    are read on top of that, as attention's kernels do nothing else.
    """
    prompt, response, sizes = batches.prompt_tokens, batches.response_tokens, shape.sizes
    groups = math.ceil(batches.prompts / engines)
    responses = groups * batches.group_size
    at_once = min(responses, engine.sequences, engine.tokens // (prompt + response))
    if at_once < 1:
        return math.inf
    waves = math.ceil(responses / at_once)
    one = device.rates(share)
    flops_per_s, bytes_per_s = size * one.gemm_flops_per_s, size * one.bytes_per_s
    more = shape.experts.visited(at_once) - shape.experts.visited(1)  # than one response reads
    read = sizes.decode_bytes + round(more * shape.experts.parameters * shape.itemsize)
    in_wave = math.ceil(groups / waves)
    prefill = in_wave * sizes.forward_flops(0, prompt)
    decode = in_wave * _group_flops(sizes, batches) - prefill
    computed = waves * (prefill / flops_per_s + max(decode / flops_per_s, response * read / bytes_per_s))
    keys = responses * sizes.keys_seen(prompt, prompt + response)
    return computed + keys * engine.kv_per_token / shape.layers / one.bytes_per_s


def _group_flops(sizes: ModelSizes, batches: BatchPlan) -> int:
    """Operations of a forward pass over a group: its prompt once, then every response."""
    prompt, response = batches.prompt_tokens, batches.response_tokens
    of_response = sizes.forward_flops(prompt, prompt + response, response)
    return sizes.forward_flops(0, prompt) + batches.group_size * of_response
