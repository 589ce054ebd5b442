"""Plan: what a scenario needs before anything is loaded, as memory by role and device and seconds by phase.

Seconds are those of `grpo_rl.perf.roofline` at the rates that a device reaches. What travels between devices is
counted in addition: a sharded model's weights and gradients in each micro-batch, and the weights that are pushed. What
the ranks of one engine exchange is taken to be in the share.

This module also divides the devices among the roles, and finds remedies for what does not fit, each of which was
planned itself.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from grpo_rl.perf.roofline import ModelSizes
from grpo_rl.planner.batches import BatchPlan, equal_micro_batches
from grpo_rl.planner.hardware import GIB, Device
from grpo_rl.planner.memory import EngineMemory, Shape, reference_activations
from grpo_rl.planner.scenario import Layout, Scenario
from grpo_rl.settings.derived import needs_old_log_probs
from grpo_rl.settings.devices import USABLE, allocate, asked_devices
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
    passes = bool(scenario.settings.policy.kl_coef) + needs_old_log_probs(scenario.settings)
    score = passes * max(groups * forward_s, travel_s(travels))

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


BEST_UTILIZATION = 0.9
"""``inference_model.gpu_memory_utilization`` of devices that sample alone."""


def best_overlapped(scenario: Scenario) -> Plan | None:
    """The plan with the shortest step where sampling and training go on at the same time; None: none fits.

    Of those that are about as short, it is the one whose phases sum up to least: its waiting side has most to spare.
    """
    fitting = [plan for plan in _overlapped(scenario) if plan.fits]
    shortest = min((plan.step_s for plan in fitting), default=0.0)
    about = [plan for plan in fitting if plan.step_s <= 1.01 * shortest]
    return min(about, key=lambda plan: (sum(plan.seconds.values()), plan.layout.engine_size), default=None)


def with_devices(scenario: Scenario) -> tuple[Scenario, str]:
    """The scenario with devices given to each role, and the overrides that do it.

    Nothing is changed where the config divides the devices itself, there is one, or sampling and training take turns.
    An engine on devices of its own may take :data:`BEST_UTILIZATION` of them; the config's share is for one that has
    to leave room for a trainer.

    Raises:
        ValueError: the devices are too few.
    """
    settings, count = scenario.settings, scenario.cluster.count
    divided = any(asked_devices(settings, role) is not None for role in ("train", "inference"))
    if count == 1 or divided or not scenario.overlaps:
        return scenario, ""
    alone = scenario.with_overrides({"inference_model.gpu_memory_utilization": BEST_UTILIZATION})
    longest = settings.inference_model.max_model_len
    if not (plans := list(_overlapped(alone))):
        raise ValueError(f"{count} devices are too few to train, to sample and for ref_model; leave ref_model null")
    # Where nothing fits, at least an engine that does: it is the smaller of both.
    plan = best_overlapped(alone) or min(plans, key=lambda p: (p.engine.tokens < longest, max(p.missing.values())))
    overrides = plan.overrides
    if plan.layout.train != 1 and settings.train_model.parallel is None:
        overrides["train_model.parallel"] = "fsdp"
    return scenario.with_overrides(overrides), written(overrides)


def _overlapped(scenario: Scenario) -> Iterator[Plan]:
    """Plans of every split of all devices; a reference shares the trainers', or has one next to a single trainer."""
    count, ref = scenario.cluster.count, asked_devices(scenario.settings, "ref") or 0
    scenario = scenario if scenario.overlaps else scenario.with_overrides({"mode": "async"})
    for size in scenario.engine_sizes(2 ** int(math.log2(max(1, count - 1)))):
        for ranks in range(1, min(count - ref, (1 if ref else scenario.most_ranks) + 1)):
            inference = count - ref - ranks
            if inference % size == 0:
                yield plan_layout(scenario, Layout(ranks, ref, inference, size))


def remedies(plan: Plan) -> dict[str, list[str]]:
    """Overrides that make a role fit that does not, by role: one setting each, or else pairs of them, or else none.

    Each was planned: with it that role fits, and no other lacks more than before.
    """
    found = {}
    for role in plan.missing:
        candidates = list(_candidates(plan, role))
        tried = ([_first(plan, role, keys) for keys in itertools.combinations(candidates, size)] for size in (1, 2))
        found[role] = next((fitting for all_of in tried if (fitting := [text for text in all_of if text])), [])
    return found


def _candidates(plan: Plan, role: str) -> Iterator[tuple[str, Sequence[object]]]:
    """Keys that may help, and their values, the least change first; those that don't help are left out once planned."""
    scenario, layout, settings = plan.scenario, plan.layout, plan.scenario.settings
    inference, utilization = settings.inference_model, settings.inference_model.gpu_memory_utilization
    longest = settings.sampling.max_new_tokens
    shares = [round(0.05 * i, 2) for i in range(2, 19)]
    lower = [share for share in shares[::-1] if share < utilization]
    if role == "train":
        yield "train_model.gradient_checkpointing", [True]
        yield "train.micro_batch_tokens", [plan.largest_tokens]
        if layout.colocated and not scenario.engine_sleeps:
            yield "inference_model.gpu_memory_utilization", lower
            yield "inference_model.sleep", [True]
        if scenario.visible and not settings.train_model.devices:
            most = layout.train + scenario.cluster.count - layout.total
            yield "train_model.num_devices", range(layout.train + 1, most + 1)
        fitting = (plan.largest_tokens - (inference.max_model_len - longest)) // scenario.batches.group_size
        if 64 <= fitting < longest:
            yield "sampling.max_new_tokens", [fitting // 64 * 64]
        yield "train_model.lora.rank", [16]
    if role == "inference":
        if not layout.colocated or plan.shared:
            yield "inference_model.gpu_memory_utilization", [share for share in shares if share > utilization]
        elif scenario.engine_sleeps:
            yield "inference_model.gpu_memory_utilization", lower
        sizes = scenario.engine_sizes(layout.inference)
        yield "inference_model.tensor_parallel_size", [size for size in sizes if size > layout.engine_size]
        if (length := plan.largest_len // 64 * 64) > longest:
            yield "inference_model.max_model_len", [length]


def _first(plan: Plan, role: str, candidates: Iterable[tuple[str, Sequence[object]]]) -> str:
    """The keys with the first of their values with which the role fits; empty: there are none."""
    keys, values = zip(*candidates, strict=True)
    for chosen in itertools.product(*values):
        overrides = dict(zip(keys, chosen, strict=True))
        try:
            other = make_plan(plan.scenario.with_overrides(overrides))
        except ValueError:
            continue  # a value that this config can't have
        if all(name != role and gib <= plan.missing.get(name, 0.0) for name, gib in other.missing.items()):
            return written(overrides)
    return ""


def written(overrides: Mapping[str, object]) -> str:
    """Overrides as they are written on a command line.

    >>> written({"train_model.gradient_checkpointing": True, "train.micro_batch_tokens": 512})
    'train_model.gradient_checkpointing=true train.micro_batch_tokens=512'
    """
    texts = {key: str(value).lower() if isinstance(value, bool) else value for key, value in overrides.items()}
    return " ".join(f"{key}={value}" for key, value in texts.items())
