"""How weights travel to engines in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_rl.cluster.fleet_engine import FleetMember
from grpo_rl.cluster.nodes import this_address
from grpo_rl.policies.loading import skeleton
from grpo_rl.settings.devices import Devices
from grpo_rl.settings.schema import Settings
from grpo_rl.weights.native import NativeTransport
from grpo_rl.weights.remote import RemoteTransport
from grpo_rl.weights.shared_memory import SharedMemoryTransport


def make_transport(
    settings: Settings, model_folder: Path, devices: Devices, engines: Sequence[FleetMember]
) -> RemoteTransport:
    """What brings weights to the engines: through shared memory on a CPU, over NCCL between GPUs."""
    model = settings.inference_model
    if check_transfer(settings, devices) == "shared_memory":
        return SharedMemoryTransport(engines, deadline_s=model.deadline_s)
    shapes = {name: weight.shape for name, weight in skeleton(model_folder).named_parameters()}
    return NativeTransport(
        engines, "nccl", shapes, model.deadline_s, devices.tensor_parallel_size, this_address(), devices.train[0]
    )


def check_transfer(settings: Settings, devices: Devices) -> str:
    """How weights travel.

    Raises:
        ValueError: NCCL can't carry what the settings would send.
    """
    on_gpu, lora = devices.inference[0].type == "cuda", settings.train_model.lora
    transfer = settings.inference_model.transfer or ("nccl" if on_gpu else "shared_memory")
    refused = {
        "train_model.lora.push=adapter": bool(lora.rank) and lora.push == "adapter",
        "train_model.cpu_offload=true": settings.train_model.cpu_offload,
    }
    if transfer == "nccl" and (not on_gpu or (chosen := [name for name, is_set in refused.items() if is_set])):
        what = f"{chosen[0]} with" if on_gpu else "no GPU is there for"
        raise ValueError(
            f"{what} inference_model.transfer={settings.inference_model.transfer}, which sends whole merged weights "
            "from GPU to GPU by nccl; use inference_model.transfer=shared_memory, or leave the setting out"
        )
    return transfer
