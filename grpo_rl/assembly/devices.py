"""Plans the devices that train, score the reference and sample, and connects the processes that train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig

from grpo_rl.distributed.ranks import Ranks
from grpo_rl.policies.loading import check_model
from grpo_rl.settings.derived import adapters
from grpo_rl.settings.devices import Devices, allocate, check_engine
from grpo_rl.settings.schema import Settings

if TYPE_CHECKING:
    from grpo_rl.cluster.trainer_actors import Rendezvous  # Ray, which sync mode does without


def plan_devices(settings: Settings, model_folder: Path) -> Devices:
    """The device plan of a run in this process: with one engine, or none in mode=sft, and a model that can be trained.

    Raises:
        ValueError: the plan does not fit the machine, the model or the script.
    """
    check_engine(settings)
    heads = None  # mode=sft has no engine that would split them
    if settings.mode != "sft":
        heads = AutoConfig.from_pretrained(model_folder).get_text_config().num_attention_heads
    devices = allocate(settings, num_attention_heads=heads)
    check_devices(settings, devices)
    check_model(model_folder, adapters(settings), settings.policy.router_replay)
    return devices


def check_devices(settings: Settings, devices: Devices) -> None:
    """Refuses a plan that a run in this process can't follow, see :func:`plan_devices`."""
    if len(devices.train) > 1 and settings.train_model.parallel is None:
        raise ValueError(
            f"{len(devices.train)} training devices and one process; set train_model.parallel=fsdp (or ddp) and start "
            f"torchrun --nproc-per-node {len(devices.train)}, or train_model.num_devices=1"
        )
    if settings.mode == "sft":
        return
    if settings.train_model.parallel and settings.inference_model.engine == "vllm":
        raise ValueError(
            "vLLM would take the trainer's process group: set inference_model.engine=transformers, or train --async"
        )
    if devices.replicas > 1:
        raise ValueError(
            f"{len(devices.inference)} inference devices with tensor_parallel_size={devices.tensor_parallel_size} are "
            f"{devices.replicas} engines; this script runs one: leave tensor_parallel_size null or ask for fewer"
        )
    # vLLM in this process takes the first GPUs that are visible, whatever the plan.
    first = tuple(torch.device("cuda", i) for i in range(len(devices.inference)))
    if settings.inference_model.engine == "vllm" and devices.inference[0].type == "cuda" and devices.inference != first:
        raise ValueError(
            f"the plan is {devices}, but vLLM in the training process samples on the first GPUs; give it those: "
            f"'inference_model.devices={[d.index for d in first]}' 'train_model.devices=[{len(first)}]'"
        )


def make_ranks(settings: Settings, devices: Devices, rendezvous: Rendezvous | None = None) -> Ranks | None:
    """The ranks of processes that train together, actors at a rendezvous or torchrun's; None if one trains alone."""
    train = settings.train_model
    if train.parallel is None:
        return None
    placement = {"fp32_masters": settings.train.mixed_precision, "cpu_offload": train.cpu_offload}
    limits = {"timeout_s": train.timeout_s, "deadline_s": train.deadline_s}
    if rendezvous:
        ranks = rendezvous.rank, rendezvous.size, rendezvous.store()
        return Ranks.join(train.parallel, devices.train[0], *ranks, **limits, **placement)
    # Devices are those of this machine; other nodes have their own, and as many.
    started, on_gpu = int(os.environ.get("LOCAL_WORLD_SIZE", 0)), devices.train[0].type == "cuda"
    fits = started <= len(devices.train) if settings.train.elastic else started == len(devices.train)
    if on_gpu and started and not fits:
        counts = f"{started} processes were started on this node, and {len(devices.train)} of its devices train"
        raise ValueError(f"{counts}; set train_model.num_devices={started}")
    device = devices.train[int(os.environ.get("LOCAL_RANK", 0))] if on_gpu else devices.train[0]
    return Ranks.join(train.parallel, device, **limits, **placement)
