"""Placement of an asynchronous run: devices, the Ray cluster, bundles for trainers and engines, shares of one GPU."""

from __future__ import annotations

import grpo_rl.cluster  # noqa: F401, before torchrl, which imports ray

# isort: split
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from grpo_rl.cluster.nodes import Place, check_nodes, cluster, nodes, places, this_address
from grpo_rl.cluster.trainer_actors import Rendezvous, run_trainers
from grpo_rl.policies.hub import resolve_model
from grpo_rl.policies.loading import check_model, skeleton
from grpo_rl.settings.compose import typed
from grpo_rl.settings.config import RunIsOver
from grpo_rl.settings.derived import adapters, dtype, loaded_references, pushes_adapters
from grpo_rl.settings.devices import Devices, allocate
from grpo_rl.settings.schema import Settings
from grpo_rl.waits import watching

log = logging.getLogger(__name__)

GIB = 1 << 30


@dataclass(frozen=True)
class Site:
    """Placement of an asynchronous run: its devices, and the bundles of its actors.

    Args:
        devices: the devices of each role, counted over the whole cluster.
        place: bundles: first one for each trainer actor, then one for each engine.
        trainers: number of trainer actors; 0: this process trains, alone or as one of torchrun's.
        engine_cpus: CPU cores of each engine.
    """

    devices: Devices
    place: Place | None
    trainers: int
    engine_cpus: int
    rendezvous: Rendezvous | None = None

    def run(self, train: Callable[[Settings, str, Site], dict], settings: Settings, folder: str) -> dict:
        """Trains here or in actors, and returns what ``train`` returns on rank zero."""
        if not self.trainers:
            return train(settings, folder, self)
        assert self.place is not None
        here = os.getcwd(), tuple(typed)
        work = functools.partial(_train_there, train, settings, str(Path(folder).resolve()), self, *here)
        gpus = int(self.devices.train[0].type == "cuda")
        restarts, elastic = settings.ray.max_restarts, settings.train.elastic
        return run_trainers(work, self.trainers, self.place, 1, gpus, restarts, elastic)


def _train_there(
    train: Callable,
    settings: Settings,
    folder: str,
    site: Site,
    working_directory: str,
    command: tuple[str, ...],
    rendezvous: Rendezvous,
) -> dict:
    typed[:] = command  # for the run's summary
    try:
        os.chdir(working_directory)  # relative paths in the config start there
    except OSError as error:
        raise ValueError(
            f"{this_address()} can't go to {working_directory}, where the script was started: {error.strerror}. Start "
            "it on a file system that all nodes share"
        ) from error
    transformers_logging.disable_progress_bar()  # as in the process that the user started
    tqdm.set_lock(threading.RLock())  # its own is shared between processes, and a killed actor would leave it behind
    devices = site.devices
    if devices.train[0].type == "cuda":
        own = torch.device("cuda", 0)  # Ray shows an actor the GPUs of its bundle only
        devices = replace(devices, train=(own,) * rendezvous.size, ref=(own,) * bool(devices.ref))
    try:
        with watching(settings.logger.wait_deadline_s):
            return train(settings, folder, replace(site, devices=devices, rendezvous=rendezvous))
    except RunIsOver:
        return {}


@contextmanager
def make_site(settings: Settings) -> Iterator[Site]:
    """The Ray cluster of ``ray.address``, or a local one, with a bundle for each actor of the device plan.

    Every node has responded. On this machine the trainer is this process; on a cluster trainers are actors.

    Raises:
        ValueError: the model can't be trained, the plan does not fit, or nodes, which are named, are missing.
    """
    model_folder = resolve_model(settings.model.name)
    check_model(model_folder, adapters(settings), settings.policy.router_replay)
    heads = AutoConfig.from_pretrained(model_folder).get_text_config().num_attention_heads
    world, parallel = int(os.environ.get("WORLD_SIZE", 1)), settings.train_model.parallel
    if world > 1 and (parallel is None or settings.ray.address):
        both = f"train_model.parallel={parallel} and ray.address={settings.ray.address}"
        raise ValueError(f"torchrun started {world} processes with {both}; set fsdp (or ddp), or start without it")
    check_parallel(settings)
    if (address := settings.ray.address) is None:
        first = int(os.environ.get("RANK", 0)) == 0
        cores = len(os.sched_getaffinity(0))
        devices = allocate(settings, "async", num_attention_heads=heads, cores=cores, world=world)
        if parallel and world != len(devices.train) and not (settings.train.elastic and world < len(devices.train)):
            raise ValueError(
                f"{len(devices.train)} devices train with train_model.parallel={parallel}, in {world} process; start "
                f"torchrun --nproc-per-node {len(devices.train)} -m grpo_rl.sota.grpo_async, or set ray.address"
            )
        check_transfer(settings, devices)
        if devices.engine_share:
            divide_memory(settings, model_folder, devices)
        share = share_cores(devices, world) if devices.train[0].type == "cpu" else 1
        if not first:
            yield Site(devices, None, 0, share)
            return
        gpus = [device.index for device in devices.inference if device.type == "cuda"]
        bundles = [_bundle(devices, share)] * devices.replicas
        with cluster(gpus=gpus, num_cpus=share * devices.replicas), places(bundles) as place:
            yield Site(devices, place, 0, share)
        return
    if settings.ref_model.num_devices is not None:
        given = f"ref_model.num_devices={settings.ref_model.num_devices}"
        raise ValueError(f"{given}: on a cluster each trainer scores the reference on its own device; leave it null")
    with cluster(address):
        check_nodes(settings.ray.nodes or 1)
        found = nodes()
        gpus, cores = int(sum(node.gpus for node in found)), int(sum(node.cpus for node in found))
        devices = allocate(settings, "async", visible=gpus, num_attention_heads=heads, cores=cores, counts_only=True)
        check_transfer(settings, devices)
        trainers = len(devices.train)
        trainer = {"CPU": 1.0} | ({"GPU": 1.0} if devices.train[0].type == "cuda" else {})
        with places([trainer] * trainers + [_bundle(devices, 1)] * devices.replicas) as place:
            yield Site(devices, place, trainers, 1)


def check_parallel(settings: Settings) -> None:
    """Refuses several training devices without a way to share their work."""
    train = settings.train_model
    if (train.num_devices or 1) > 1 and train.parallel is None:
        raise ValueError(f"train_model.num_devices={train.num_devices} needs train_model.parallel=fsdp, or ddp")


def _bundle(devices: Devices, cpus: int) -> dict[str, float]:
    gpus = devices.tensor_parallel_size if devices.inference[0].type == "cuda" else 0
    return {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})


def share_cores(devices: Devices, world: int) -> int:
    """Cores of each engine when engines and trainers share this machine; limits the trainer's threads, too.

    Processes that each use all cores would mostly wait for each other's threads.
    """
    cores = len(os.sched_getaffinity(0))
    share = max(1, cores // (world + devices.replicas))
    torch.set_num_threads(max(1, (cores - share * devices.replicas) // world))
    return share


def check_transfer(settings: Settings, devices: Devices) -> str:
    """The transport of weights, ``shared_memory``, ``ipc`` or ``nccl``; refuses one that can't carry them there."""
    on_gpu, shares = devices.inference[0].type == "cuda", devices.engine_share > 0
    own = ("ipc" if shares else "nccl") if on_gpu else "shared_memory"
    transfer = settings.inference_model.transfer or own
    asked = f"inference_model.transfer={settings.inference_model.transfer}"
    if transfer == "ipc" and not shares:
        where = "engines have GPUs of their own" if on_gpu else "no GPU is there"
        raise ValueError(
            f"{where}, and {asked} reaches an engine on the trainer's own GPU only; leave the setting out for {own}"
        )
    if transfer == "nccl" and shares:
        raise ValueError(
            f"{asked} sends between GPUs, and {devices.train[0]} trains and samples; leave the setting out for ipc"
        )
    refused = {
        "train_model.lora.push=adapter": pushes_adapters(settings),
        "train_model.cpu_offload=true": settings.train_model.cpu_offload,
    }
    if transfer == "nccl" and (not on_gpu or (chosen := [name for name, is_set in refused.items() if is_set])):
        what = f"{chosen[0]} with" if on_gpu else "no GPU is there for"
        remedy = "use inference_model.transfer=shared_memory"
        raise ValueError(f"{what} {asked}, which sends whole merged weights from GPU to GPU by nccl; {remedy}")
    return transfer


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
    return parameters * (state + itemsize * loaded_references(settings))
