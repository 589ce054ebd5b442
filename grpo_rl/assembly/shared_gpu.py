"""Divides the memory of a GPU that trains and samples at the same time: the engine's share, and the trainer's limit."""

import logging
from pathlib import Path

import torch

from grpo_rl.policies.loading import skeleton
from grpo_rl.settings.derived import dtype
from grpo_rl.settings.devices import Devices
from grpo_rl.settings.schema import Settings

log = logging.getLogger(__name__)

GIB = 1 << 30


def divide_memory(settings: Settings, model_folder: Path, devices: Devices) -> None:
    """Checks that both sides' weights fit into their shares of the GPU, and keeps this process within the trainer's.

    The engine takes its share when it starts, and some of it anew in every step: a trainer that went beyond its own
    would end the engine, and not itself.
    """
    device = devices.train[0]
    check_shares(settings, model_folder, devices, torch.cuda.get_device_properties(device).total_memory)
    torch.cuda.set_per_process_memory_fraction(devices.training_share, device)
    log.info("%s", devices)


def check_shares(settings: Settings, model_folder: Path, devices: Devices, memory: float) -> None:
    """Refuses weights that do not fit into their shares of so many bytes; activations come on top of them."""
    share, parameters = devices.engine_share, sum(p.numel() for p in skeleton(model_folder).parameters())
    itemsize = getattr(torch, dtype(settings)).itemsize
    sides = {
        "the engine's weights": (itemsize * parameters, share, "raise"),
        "what training keeps between steps": (kept_bytes(settings, parameters), devices.training_share, "lower"),
    }
    for what, (needed, part, remedy) in sides.items():
        if needed > part * memory:
            raise ValueError(
                f"{what} are {needed / GIB:.1f} GiB, and of {devices.train[0]}, which trains and samples at the same "
                f"time, {part:.0%} are {part * memory / GIB:.1f} GiB; {remedy} inference_model.gpu_memory_utilization="
                f"{share}, or use mode=sync with inference_model.sleep=true (`grpo-rl plan mode=async` counts the rest)"
            )


def kept_bytes(settings: Settings, parameters: int) -> float:
    """The least that training keeps between steps: weights, masters, gradients, moments, a reference's weights.

    Adapters and quantised weights are left out; `grpo-rl plan` counts them.
    """
    train, itemsize = settings.train_model, getattr(torch, dtype(settings)).itemsize
    if train.cpu_offload or train.quantization:
        return 0.0
    if train.lora.rank:
        return itemsize * parameters
    masters = 4 if settings.train.mixed_precision and itemsize < 4 else 0
    stepped, weights = masters or itemsize, 0 if masters and train.parallel == "fsdp" else itemsize
    state = weights + masters + stepped + (2 * stepped if settings.optimizer.name == "adamw" else 0)
    return parameters * (state + (itemsize if settings.policy.kl_coef else 0))
