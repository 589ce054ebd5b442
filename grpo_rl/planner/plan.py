"""What a config needs of a cluster, before anything is loaded: memory by role and device, and seconds by phase.

Bytes are counted in `grpo_rl.planner.memory`, seconds in `grpo_rl.planner.time`; `grpo_rl.planner.advice` divides
devices and says what to change where something does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from grpo_rl.planner.hardware import GIB
from grpo_rl.planner.memory import EngineMemory, reference_footprint, reference_weights
from grpo_rl.planner.question import Question
from grpo_rl.settings.devices import Devices, allocate

USABLE = 0.95
"""Of a device's memory: the rest is CUDA's own, NCCL's buffers, and what lies between blocks."""
TOKEN_STEP = 256
"""Micro-batches are planned in multiples of so many tokens."""
MOST_TOKENS = 1 << 22


@dataclass(frozen=True)
class Role:
    """One device of a role.

    Args:
        name: train, ref or inference.
        devices: how many there are.
        parts: bytes, by what they are.
        usable: bytes that the device has for it.
        moment: at which it holds them.
    """

    name: str
    devices: int
    parts: Mapping[str, float]
    usable: float
    moment: str

    @property
    def needed(self) -> float:
        """Bytes."""
        return sum(self.parts.values())

    @property
    def missing_gib(self) -> float:
        """How much more it needs than there is; 0 where it fits."""
        return max(0.0, self.needed - self.usable) / GIB


@dataclass(frozen=True)
class Plan:
    """What comes of a question.

    Args:
        devices: of each role.
        roles: memory of each that has devices of its own; the others are in the parts of those whose they share.
        engine: the engine's memory.
        tokens: of the largest micro-batch.
        largest_tokens: that a micro-batch could have; 0: none.
        largest_len: prompt and answer that the engine could hold.
        seconds: of each phase.
    """

    question: Question
    devices: Devices
    roles: tuple[Role, ...]
    engine: EngineMemory
    tokens: int
    largest_tokens: int
    largest_len: int
    seconds: Mapping[str, float]

    @property
    def missing(self) -> dict[str, float]:
        """GiB that roles lack, by role."""
        return {role.name: role.missing_gib for role in self.roles if role.missing_gib > 0}

    @property
    def fits(self) -> bool:
        """Whether every role does."""
        return not self.missing

    @property
    def refused(self) -> str:
        """Why no script runs it, and what to do; empty where one does."""
        cfg = self.question.cfg
        if self.question.mode == "async" or cfg.inference_model.engine != "vllm":
            return ""
        if len(self.devices.train) > 1:
            return "with mode=sync vLLM is in the process of one trainer, and here are several; use mode=async"
        if self.devices.replicas > 1:
            return f"with mode=sync there is one engine, and here are {self.devices.replicas}; use mode=async"
        return ""

    @property
    def step_s(self) -> float:
        """Seconds of a step: phases in turns, or sampling beside all others."""
        sample, rest = self.seconds["sample"], sum(s for phase, s in self.seconds.items() if phase != "sample")
        return max(sample, rest) if self.question.mode == "async" else sample + rest


def make_plan(question: Question) -> Plan:
    """The plan of a config as it is, with the devices that it asks for.

    Raises:
        ValueError: the devices are not there, or can't be divided like that; several trainers, and a reference on a
            device of its own; the batches' lengths do not fit.
    """
    cfg, shape, device = question.cfg, question.shape, question.cluster.device
    devices = allocate(cfg, question.mode, question.visible, shape.heads)
    size, ranks = devices.tensor_parallel_size, len(devices.train)
    if shape.kv_heads % size and size % shape.kv_heads:
        raise ValueError(
            f"inference_model.tensor_parallel_size={size}: {shape.kv_heads} key-value heads can be neither split nor "
            f"repeated {size} ways; use a divisor or a multiple of {shape.kv_heads}"
        )
    usable, engine = USABLE * device.memory, question.engine(size)
    averages = cfg.ref_model.refresh == "average"
    ref_shares = question.reference_apart and devices.ref == devices.train
    if question.reference_apart and not ref_shares and ranks > 1:
        raise ValueError(
            f"ref_model asks for devices of its own beside {ranks} that train, each of which scores the reference "
            "itself; leave ref_model.num_devices and ref_model.devices null, or train on one"
        )
    over = ranks if question.sharded(ranks) else 1
    beside = {"reference": reference_weights(shape, over, averages)} if ref_shares else {}
    stays = 0.0  # beside an engine that samples
    if devices.colocated and question.sleeps:
        stays = sum(beside.values()) + question.kept(ranks)
    elif devices.colocated:
        beside["vLLM"] = engine.budget

    def trainer(tokens: int) -> Role:
        footprint = question.trainer(ranks, tokens)
        return Role("train", ranks, footprint.parts | beside, usable, footprint.moment)

    tokens = question.tokens(ranks)
    roles = [trainer(tokens)]
    if question.reference_apart and not ref_shares:
        footprint = reference_footprint(shape, 1, tokens, device.kind, averages)
        roles.append(Role("ref", len(devices.ref), footprint.parts, usable, footprint.moment))
    roles.append(_inference(question, devices, engine, usable - stays))
    return Plan(
        question,
        devices,
        tuple(roles),
        engine,
        tokens,
        _largest(lambda tokens: trainer(tokens).missing_gib == 0),
        min(engine.tokens, shape.positions),
        question.seconds(ranks, ranks if ref_shares else 1, devices.replicas, size, devices.colocated),
    )


def _inference(question: Question, devices: Devices, engine: EngineMemory, usable: float) -> Role:
    """The engine's device: its cache has to hold one answer of the greatest length, and is as large as its budget."""
    least = question.cfg.inference_model.max_model_len * engine.kv_per_token
    parts = {"weights": engine.weights, "largest batch": engine.work, "KV cache": max(engine.cache, least)}
    return Role("inference", len(devices.inference), parts, min(engine.budget, usable), "sampling")


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest multiple of :data:`TOKEN_STEP` that fits; 0: none does.

    >>> _largest(lambda tokens: tokens <= 1000), _largest(lambda tokens: False)
    (768, 0)
    """
    low, high = 0, MOST_TOKENS // TOKEN_STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * TOKEN_STEP) else (low, middle - 1)
    return low * TOKEN_STEP
