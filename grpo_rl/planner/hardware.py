"""Clusters are made of devices known by name, of numbers of one's own, or of this machine as it is measured."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import psutil

if TYPE_CHECKING:
    from grpo_rl.perf.roofline import Rates

GIB = 2**30
TRAIN_SHARE = 0.4
"""Share of the rate in matrix products: 38 to 43 % were reached with Llama 3 405B on 8,192 and 16,384 H100 (table 4 of
https://arxiv.org/abs/2407.21783). A run of one process in mode=sync logs its own as ``limit_fraction/train``."""
SAMPLE_SHARE = 0.5
"""Share of both rates, an assumption; a run of one process in mode=sync logs its own as ``limit_fraction/sample``."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or the CPU.

    Args:
        tflops: 1e12 dense bf16 operations a second in matrix products.
        memory_gb_s: 1e9 bytes a second that it reads from its memory.
        link_gb_s: and sends to a device of the same node, one way.
        network_gb_s: and to another node, one way.
    """

    name: str
    memory_gib: float
    tflops: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float
    node: int = 8
    kind: Literal["cuda", "cpu"] = "cuda"

    @property
    def memory(self) -> float:
        """The memory in bytes."""
        return self.memory_gib * GIB

    def rates(self, share: float = 1.0) -> Rates:
        """The rates of the device where it reaches this share of its best."""
        from grpo_rl.perf.roofline import Rates  # imports torch, as does what measures: a cluster is read before

        return Rates(self.tflops * 1e12 * share, self.memory_gb_s * 1e9 * share)

    def link_bytes_per_s(self, devices: int) -> float:
        """The rate of sending from one of so many devices to the others, which the network between nodes limits."""
        return 1e9 * (self.link_gb_s if devices <= self.node else min(self.link_gb_s, self.network_gb_s))


NUMBERS = tuple(field.name for field in fields(Device) if field.name not in ("name", "kind"))

DEVICES = {
    device.name.lower(): device
    for device in (
        Device("A100-40GB", 40.0, 312, 1555, 300, 25),
        Device("A100-80GB", 80.0, 312, 2039, 300, 25),
        Device("H100", 79.6, 989, 3350, 450, 50),
        Device("H200", 140.4, 989, 4800, 450, 50),
        Device("B200", 179.0, 2250, 8000, 900, 50),
        Device("L40S", 45.0, 362, 864, 32, 12.5),
        Device("L4", 22.5, 121, 300, 32, 12.5),
        Device("RTX4090", 24.0, 165, 1008, 32, 3.1),
    )
}
"""Datasheets' figures of the SXM or, of the last three, PCIe cards: dense bf16, memory, half of the two-way NVLink or
PCIe 4.0 x16 rate. Networks differ from site to site: those of NVIDIA's DGX (200 or 400 Gb/s a GPU) and, of PCIe cards,
100 or 25 Gb/s; say ``network_gb_s`` where yours is another. Memory is what ``nvidia-smi`` shows.
Sources: https://www.nvidia.com/en-us/data-center/ (a100, h100, h200, l40s, l4, dgx-b200 and their datasheets),
https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf (RTX 4090); memory:
https://thundergolfer.com/blog/nvidia-gpu-memory-capacity."""


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind.

    >>> Cluster.parse("64xH100"), Cluster.parse("2xH100,tflops=600").device.tflops
    (Cluster(count=64, device=Device(name='H100', ...)), 600.0)
    """

    count: int
    device: Device

    @classmethod
    def parse(cls, text: str, dtype: str = "bfloat16") -> Cluster:
        """The cluster that a text such as ``64xH100`` or ``8xH100,tflops=600,node=4`` describes.

        ``here`` is this machine, measured. A device of another name needs all numbers but ``node``.

        Raises:
            ValueError: the text can't be read, or a number is missing, not finite, or not above 0.
        """
        name, *settings = text.split(",")
        [(count, device)] = re.findall(r"^(?:([1-9]\d*)x)?(.*)$", name)
        try:
            pairs = (setting.partition("=") for setting in settings)
            given: dict[str, Any] = {key: (int if key == "node" else float)(value) for key, _, value in pairs}
            if wrong := [number for number in given if not 0 < given[number] < math.inf]:
                raise ValueError(f"{wrong[0]} has to be finite and above 0")
            if unknown := given.keys() - {*NUMBERS}:
                raise ValueError(f"unknown number {unknown.pop()}; a device has {', '.join(NUMBERS)}")
            if name == "here":
                here = _here(dtype)
                return replace(here, device=replace(here.device, **given))
            known = DEVICES.get(device.lower())
            return cls(int(count or 1), replace(known, **given) if known else Device(device, **given))
        except TypeError:  # a number that no device has, or a device of one's own that lacks one
            known = ", ".join(device.name for device in DEVICES.values())
            numbers = f"another one needs all numbers but node: {', '.join(NUMBERS)}"
            raise ValueError(f"cluster={text}: known devices are {known}; {numbers}") from None
        except ValueError as error:
            raise ValueError(f"cluster={text}: {error}") from None

    def __str__(self) -> str:
        d = self.device
        return (
            f"{self.count} x {d.name}: {d.memory_gib:,.4g} GiB, {d.tflops:,.3g} TFLOP/s, memory {d.memory_gb_s:,.0f} "
            f"GB/s, link {d.link_gb_s:,.0f} GB/s in a node of {d.node}, {d.network_gb_s:,.4g} GB/s between nodes"
        )


def known_device(name: str) -> Device | None:
    """The device of :data:`DEVICES` that the driver's name of a GPU belongs to, without regard to its memory.

    >>> known_device("NVIDIA H100 80GB HBM3").name, known_device("NVIDIA GeForce GTX 970")
    ('H100', None)
    """
    return next((device for device in DEVICES.values() if device.name.split("-")[0].lower() in name.lower()), None)


def _here(dtype: str) -> Cluster:
    """This machine, its rates as they are measured."""
    import torch

    from grpo_rl.perf.roofline import machine_rates

    gpus = torch.cuda.device_count()
    kind: Literal["cuda", "cpu"] = "cuda" if gpus else "cpu"
    rates = machine_rates(getattr(torch, dtype), kind)
    tflops, memory_gb_s = rates.gemm_flops_per_s / 1e12, rates.bytes_per_s / 1e9
    if not gpus:
        memory_gib = psutil.virtual_memory().total / GIB
        return Cluster(1, Device("CPU", memory_gib, tflops, memory_gb_s, memory_gb_s, memory_gb_s, 1, kind))
    properties = torch.cuda.get_device_properties(0)
    known = known_device(properties.name)
    link, network = (known.link_gb_s, known.network_gb_s) if known else (32.0, 12.5)
    memory_gib = properties.total_memory / GIB
    return Cluster(gpus, Device(properties.name, memory_gib, tflops, memory_gb_s, link, network, gpus))
