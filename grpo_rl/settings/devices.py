"""The device plan: which GPUs train, score the reference and sample, or an error with what does not fit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_rl.settings.divisibility import divisors
from grpo_rl.settings.sections import Sections

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

USABLE = 0.95
"""Share of a device's memory; the rest is CUDA's own, NCCL's buffers, and what lies between blocks."""
MOST_SHARED = 0.8
"""Largest ``inference_model.gpu_memory_utilization`` on a GPU that trains at the same time."""


@dataclass(frozen=True)
class Devices:
    """Devices of each role, in the order of ranks. Roles either share devices or have disjoint ones.

    Args:
        ref: empty when there is no reference.
        inference: each ``tensor_parallel_size`` of them in a row hold one copy of the model.
        reward: of ``env.rewards.model``, where it has one of its own.
        engine_share: the engine's share of the memory of a GPU that trains and samples at the same time; 0: none does.
    """

    train: tuple[torch.device, ...]
    ref: tuple[torch.device, ...]
    inference: tuple[torch.device, ...]
    tensor_parallel_size: int = 1
    engine_share: float = 0.0
    reward: tuple[torch.device, ...] = ()

    @property
    def replicas(self) -> int:
        """Copies of the model that sample side by side."""
        return len(self.inference) // self.tensor_parallel_size

    @property
    def colocated(self) -> bool:
        """True where the same devices train and sample, in turns or at the same time."""
        return not set(self.train).isdisjoint(self.inference)

    @property
    def training_share(self) -> float:
        """The trainer's share of the memory of a GPU that trains and samples at the same time."""
        return round(USABLE - self.engine_share, 4) if self.engine_share else USABLE

    def __str__(self) -> str:
        roles = {"train": self.train, "ref": self.ref, "inference": self.inference}
        plan = ", ".join(f"{role} {' '.join(map(str, devices)) or 'none'}" for role, devices in roles.items())
        plan += f", reward {self.reward[0]}" if self.reward else ""
        plan = f"{plan} ({self.replicas} x tensor_parallel_size {self.tensor_parallel_size})"
        if self.engine_share:
            plan += (
                f"; {self.train[0]} trains and samples at the same time: of its memory {self.engine_share:.0%} are "
                f"the engine's and {self.training_share:.0%} the trainer's"
            )
        return plan


def allocate(
    cfg: Sections,
    mode: str = "sync",
    visible: int | None = None,
    num_attention_heads: int | None = None,
    cores: int | None = None,
    world: int = 1,
    counts_only: bool = False,
) -> Devices:
    """The devices of training, reference and inference.

    Each of ``cfg.train_model``, ``cfg.ref_model`` and ``cfg.inference_model`` gives ``num_devices`` (recommended) or
    ``devices``, a list of indices. Lists are taken as they are; counts are then given out from the lowest free index,
    in the order train, ref, inference, so that the groups are disjoint. Left null:

    - train takes one device;
    - ref shares the training devices (and is there at all only with ``policy.kl_coef`` > 0);
    - inference shares the training devices in sync mode, and takes all that are left in async mode, where training
      and sampling run at the same time. On a machine with one GPU they share it in async mode, too.

    Where ``train_model.devices`` and ``inference_model.devices`` name the same single GPU, both share it. In async mode
    ``inference_model.gpu_memory_utilization`` then divides its memory, see :attr:`Devices.engine_share`.

    With no GPU every role shares the CPU, which is logged once. In async mode each engine, and each process that
    trains, is then a device with cores of its own; an engine is one such device.

    Args:
        visible: number of GPUs to plan for; by default those of this machine.
        num_attention_heads: the model's number of heads, if known; tensor parallelism must divide it.
        cores: number of CPU cores that async mode without GPUs divides among processes.
        world: number of training processes that are running already, in async mode without GPUs.
        counts_only: whether the GPUs are a cluster's, which lists of indices can't name.

    Raises:
        ValueError: the requested devices do not fit; the message has the numbers and the remedy.

    >>> from types import SimpleNamespace as Config
    >>> print(allocate(Config(
    ...     train_model=Config(num_devices=2, devices=None), ref_model=Config(num_devices=1, devices=None),
    ...     inference_model=Config(num_devices=4, devices=None, tensor_parallel_size=2),
    ...     policy=Config(kl_coef=0.1)), visible=8))
    train cuda:0 cuda:1, ref cuda:2, inference cuda:3 cuda:4 cuda:5 cuda:6 (2 x tensor_parallel_size 2)
    """
    if visible is None:
        import torch  # here, not above: this file is also imported to check a config, which does without

        visible = torch.cuda.device_count()
    roles = _roles(cfg, counts_only)
    alone = visible == 1 and not counts_only  # a cluster's trainers and engines have GPUs of their own
    plan = _give_out(roles, mode, visible, alone) if visible else _on_cpu(roles, mode, cores, world)
    asked = cfg.inference_model.tensor_parallel_size
    if asked is None and mode == "async":
        asked = 1
    if not visible and mode == "async" and asked != 1:
        raise ValueError(f"inference_model.tensor_parallel_size={asked}, but no GPU is visible; leave it null")
    tensor_parallel_size = _tensor_parallel_size(asked, len(plan["inference"]), num_attention_heads)
    shares = bool(visible) and mode == "async" and plan["inference"] == plan["train"]
    engine_share = _engine_share(cfg, plan["train"][0]) if shares else 0.0
    roles = plan["train"], plan.get("ref", ()), plan["inference"]
    return Devices(*roles, tensor_parallel_size, engine_share, plan.get("reward", ()))


def _roles(cfg: Sections, counts_only: bool) -> list[_Role]:
    """The roles of the run; that of the reference only where one is loaded."""
    roles = [_Role.read(cfg, name) for name in ("train", "ref", "inference")]
    for role in roles:
        if counts_only and role.indices is not None:
            raise ValueError(
                f"{role.section}.devices={list(role.indices)}, but with ray.address Ray chooses among the GPUs of all "
                f"nodes; set {role.section}.num_devices={len(role.indices)} and leave the list null"
            )
    if not cfg.policy.kl_coef > 0:
        asked = roles.pop(1)
        if asked.count is not None:
            given = f"{asked.section} asks for {_devices(asked.count)}"
            raise ValueError(
                f"{given}, but with policy.kl_coef={cfg.policy.kl_coef} no reference is loaded; leave it null"
            )
    reward = _Role.of_reward(cfg)
    return [roles[0], *([reward] if reward.count else []), *roles[1:]]


def _engine_share(cfg: Sections, device: torch.device) -> float:
    """The engine's share of the memory of a GPU that trains at the same time."""
    share = cfg.inference_model.gpu_memory_utilization
    if share > MOST_SHARED:
        raise ValueError(
            f"inference_model.gpu_memory_utilization={share} on {device}, which trains at the same time, leaves "
            f"training {max(0.0, USABLE - share):.0%} of its memory; use at most {MOST_SHARED}, or mode=sync"
        )
    return share


@dataclass(frozen=True)
class _Role:
    """A role's requested devices; ``count`` and ``indices`` are None where the plan decides."""

    name: str
    count: int | None
    indices: tuple[int, ...] | None

    @property
    def section(self) -> str:
        return "env.rewards.model" if self.name == "reward" else f"{self.name}_model"

    @classmethod
    def of_reward(cls, cfg: Sections) -> _Role:
        """The role of ``env.rewards.model``; it shares the training device where it asks for none of its own."""
        env = getattr(cfg, "env", None)
        given = env.rewards.get("model") if env else None
        given = given if isinstance(given, Mapping) else {}
        indices = given.get("devices")
        return cls("reward", given.get("num_devices") or (indices and 1), tuple(indices) if indices else None)

    @classmethod
    def read(cls, cfg: Sections, name: str) -> _Role:
        section = getattr(cfg, f"{name}_model")
        count, indices = section.num_devices, section.devices
        if indices is None:
            return cls(name, count, None)
        if not indices or len(set(indices)) != len(indices):
            given = f"{name}_model.devices={list(indices)}"
            raise ValueError(f"{given}; it is a list of different GPUs such as [0, 1], or null")
        return cls(name, len(indices), tuple(indices))


def _devices(count: int) -> str:
    return f"{count} device" + ("s" if count > 1 else "")


def _on_cpu(roles: list[_Role], mode: str, cores: int | None, world: int) -> dict[str, tuple[torch.device, ...]]:
    """One device for all roles in sync mode; in async mode one for each process, all of which share the cores."""
    import torch

    for role in roles:
        given = f"{role.section}.num_devices={role.count}"
        given = given if role.indices is None else f"{role.section}.devices={list(role.indices)}"
        if role.indices is not None or (mode == "sync" and (role.count or 1) > 1):
            raise ValueError(f"{given}, but no GPU is visible; leave it null to use the CPU")
    if mode == "sync":
        _say_everything_shares_the_cpu()
        return {role.name: (torch.device("cpu"),) for role in roles}
    counts = {role.name: role.count or 1 for role in roles if role.name not in ("ref", "reward")}
    counts["train"] = max(counts["train"], world)
    total = sum(counts.values())
    if cores is not None and total > cores:
        key = "inference_model" if counts["inference"] > 1 else "train_model"
        fix = f"lower {key}.num_devices" if max(counts.values()) > 1 else "use mode=sync, where they take turns"
        raise ValueError(f"{_sum(counts, 'process', 'processes')}, {cores} CPU cores there; {fix}")
    return {role.name: (torch.device("cpu"),) * counts.get(role.name, 1) for role in roles}


@functools.cache
def _say_everything_shares_the_cpu() -> None:
    log.warning("no GPU is visible: training and sampling share the CPU")


def _give_out(roles: list[_Role], mode: str, visible: int, alone: bool) -> dict[str, tuple[torch.device, ...]]:
    """Indices of each role on a machine with GPUs: the lists first, then counts from what is left.

    Args:
        alone: the machine has one GPU, which training and sampling share.
    """
    train, inference = roles[0], roles[-1]
    if inference.indices is not None and inference.indices == train.indices and inference.count == 1:
        roles, alone = [*roles[:-1], _Role("inference", None, None)], True
    owner: dict[int, _Role] = {}
    for role in roles:
        for index in role.indices or ():
            key = f"{role.section}.devices"
            if not 0 <= index < visible:
                raise ValueError(f"{key}={list(role.indices or ())}: there is no GPU {index}, {visible} visible")
            if index in owner:
                raise ValueError(
                    f"GPU {index} is in both {owner[index].section}.devices and {key}; leave {key} null to share"
                )
            owner[index] = role

    # Only training has a size of its own when it is left null; the others share it or take what is left.
    counts = {role.name: role.count or (1 if role.name == "train" else 0) for role in roles}
    total = sum(counts.values())
    if total > visible:
        raise ValueError(f"{_sum(counts)}, {visible} visible; {_remedy(roles, mode, alone)}")
    free = [index for index in range(visible) if index not in owner]
    plan: dict[str, tuple[int, ...]] = {}
    for role in roles:
        take = counts[role.name] if role.indices is None else 0
        plan[role.name] = role.indices or tuple(free[:take])
        free = free[take:]
    if "ref" in plan and not plan["ref"]:
        plan["ref"] = plan["train"]
    if not plan["inference"]:
        if mode == "sync" or alone:
            plan["inference"] = plan["train"]
        elif free:
            plan["inference"] = tuple(free)
        else:
            why = "none is left to sample; use sync mode, or give training fewer"
            raise ValueError(f"{_sum(counts)}, {visible} visible: {why}")
    return {name: tuple(_gpu(index) for index in indices) for name, indices in plan.items()}


@dataclass(frozen=True)
class FarDevice:
    """A GPU of a cluster, beyond those that torch can number: it counts the devices of one machine, in 8 bits."""

    index: int
    type: str = "cuda"

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


def _gpu(index: int) -> Any:
    import torch

    return torch.device("cuda", index) if index < 128 else FarDevice(index)


def _sum(counts: dict[str, int], unit: str = "GPU", units: str = "GPUs") -> str:
    """The devices of each role and their total, in words.

    >>> _sum({"train": 2, "ref": 1, "inference": 6}), _sum({"train": 1, "inference": 0})
    ('train 2 + ref 1 + inference 6 = 9 GPUs', 'train 1 GPU')
    """
    parts = {name: count for name, count in counts.items() if count}
    total = sum(parts.values())
    all_of_them = f"{total} {units if total > 1 else unit}"
    terms = " + ".join(f"{name} {count}" for name, count in parts.items())
    return f"{terms} = {all_of_them}" if len(parts) > 1 else f"{next(iter(parts))} {all_of_them}"


def _remedy(roles: list[_Role], mode: str, alone: bool) -> str:
    """The setting to change when the groups need more than there is: that of the largest, the last of equals."""
    role = max(reversed(roles), key=lambda role: role.count or 0)
    key = f"{role.section}.{'num_devices' if role.indices is None else 'devices'}"
    if (role.count or 0) > 1:
        return f"lower {key}"
    if role.name == "inference" and mode == "async" and not alone:
        return "use sync mode, where inference can share the training device"
    return f"leave {key} null to share the training device"


def _tensor_parallel_size(asked: int | None, devices: int, num_attention_heads: int | None) -> int:
    size = devices if asked is None else asked
    meaning = "null, all inference devices: " if asked is None else ""
    if devices % size:
        raise ValueError(
            f"inference_model.tensor_parallel_size={size} does not divide the {_devices(devices)} of inference; "
            f"use one of {divisors(devices)}"
        )
    if num_attention_heads is not None and num_attention_heads % size:
        fitting = [d for d in divisors(devices) if num_attention_heads % d == 0]
        raise ValueError(
            f"inference_model.tensor_parallel_size={size} ({meaning}{num_attention_heads} attention heads cannot be "
            f"split {size} ways); use one of {fitting}"
        )
    return size
