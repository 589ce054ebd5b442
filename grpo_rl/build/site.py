"""Settings to the parts of an asynchronous run, whose engines have processes of their own."""

from __future__ import annotations

import grpo_rl.cluster.token  # noqa: F401, before torchrl, which imports ray

# isort: split
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from grpo_rl.build import parts as build
from grpo_rl.cluster.engine_actors import launch
from grpo_rl.cluster.fleet import Fleet
from grpo_rl.cluster.fleet_engine import FleetEngine, FleetMember, LoopThread
from grpo_rl.cluster.nodes import Place, check_nodes, cluster, nodes, places, this_address
from grpo_rl.cluster.trainer_actors import Meeting, run_trainers
from grpo_rl.collectors.asynchronous import OverlappedCollector
from grpo_rl.collectors.broadcast import Collector, Led, NoEngine, SharedCollector
from grpo_rl.distributed.ranks import Ranks
from grpo_rl.engines.base import AsyncEngine
from grpo_rl.envs.base import LLMEnv
from grpo_rl.policies.lora import skeleton, target_names
from grpo_rl.policies.policy import check_model
from grpo_rl.settings.config import RunIsOver
from grpo_rl.settings.devices import Devices, allocate
from grpo_rl.settings.schema import Settings
from grpo_rl.weights.shared_memory import SharedMemoryTransport
from grpo_rl.weights.transport import Controlled, NativeTransport

START_S = 1800
"""Longest that an engine may take to start: a large model is read from a slow disk, and its kernels are compiled."""


@dataclass(frozen=True)
class Site:
    """Where a run in async mode is: its devices, and the places of its actors.

    Args:
        devices: of each role, counted over the whole cluster.
        place: a bundle for each trainer that is an actor, and then one for each engine.
        trainers: how many are actors; 0: this process trains, alone or started by torchrun with others.
        engine_cpus: that each engine computes with.
        meeting: where the trainers meet that are actors.
    """

    devices: Devices
    place: Place | None
    trainers: int
    engine_cpus: int
    meeting: Meeting | None = None

    def run(self, train: Callable[[Settings, str, Site], dict], cfg: Settings, folder: str) -> dict:
        """What ``train`` returns: of this process, or of the first of the trainers on the cluster."""
        if not self.trainers:
            return train(cfg, folder, self)
        assert self.place is not None
        work = functools.partial(_train_there, train, cfg, str(Path(folder).resolve()), self, os.getcwd())
        gpus = int(self.devices.train[0].type == "cuda")
        return run_trainers(work, self.trainers, self.place, num_cpus=1, num_gpus=gpus)


def _train_there(
    train: Callable, cfg: Settings, folder: str, site: Site, working_directory: str, meeting: Meeting
) -> dict:
    try:
        os.chdir(working_directory)  # which relative paths of the config are meant from
    except OSError as error:
        raise ValueError(
            f"{this_address()} can't go to {working_directory}, where the script was started: {error.strerror}. Start "
            "it on a file system that all nodes share"
        ) from error
    transformers_logging.disable_progress_bar()  # as in the process that was started by hand
    tqdm.set_lock(threading.RLock())  # its own is one between processes too, which a killed actor would leave behind
    devices = site.devices
    if devices.train[0].type == "cuda":
        own = torch.device("cuda", 0)  # of all GPUs Ray lets an actor see those of its bundle
        devices = replace(devices, train=(own,) * site.trainers, ref=(own,) * bool(devices.ref))
    try:
        return train(cfg, folder, replace(site, devices=devices, meeting=meeting))
    except RunIsOver:
        return {}


@contextmanager
def make_site(cfg: Settings, model_folder: Path) -> Iterator[Site]:
    """The Ray cluster of ``ray.address``, or one on this machine alone, with places for what the device plan asks.

    Every node has answered. On this machine the trainer is this process; on a cluster trainers are actors.

    Raises:
        ValueError: the model can't be trained; the plan does not fit; no cluster answers; nodes are missing or silent,
            by name.
    """
    check_model(model_folder, build.make_lora(cfg))
    heads = AutoConfig.from_pretrained(model_folder).get_text_config().num_attention_heads
    world, parallel = int(os.environ.get("WORLD_SIZE", 1)), cfg.train_model.parallel
    if world > 1 and (parallel is None or cfg.ray.address):
        raise ValueError(
            f"torchrun started {world} processes with train_model.parallel={parallel} ray.address={cfg.ray.address}; "
            "set train_model.parallel=fsdp (or ddp), or start the script by itself: on a cluster trainers are actors"
        )
    if (cfg.train_model.num_devices or 1) > 1 and parallel is None:
        raise ValueError(
            f"train_model.num_devices={cfg.train_model.num_devices} with train_model.parallel=null; set it to fsdp, or "
            "to ddp"
        )
    if (address := cfg.ray.address) is None:
        first = int(os.environ.get("RANK", 0)) == 0
        devices = allocate(cfg, "async", num_attention_heads=heads, cores=len(os.sched_getaffinity(0)), world=world)
        if parallel and world != len(devices.train):
            raise ValueError(
                f"{len(devices.train)} devices train with train_model.parallel={parallel}, in {world} process; start "
                f"torchrun --nproc-per-node {len(devices.train)} sota/grpo_async.py, or set ray.address"
            )
        check_transfer(cfg, devices)
        share = share_cores(devices, world) if devices.train[0].type == "cpu" else 1
        if not first:
            yield Site(devices, None, 0, share)
            return
        gpus = [device.index for device in devices.inference if device.type == "cuda"]
        bundles = [_bundle(devices, share)] * devices.replicas
        with cluster(gpus=gpus, num_cpus=share * devices.replicas), places(bundles) as place:
            yield Site(devices, place, 0, share)
        return
    if cfg.ref_model.num_devices is not None:
        raise ValueError(
            f"ref_model.num_devices={cfg.ref_model.num_devices} with ray.address: on a cluster each trainer scores the "
            "reference on its own device; leave it null"
        )
    with cluster(address):
        check_nodes(cfg.ray.nodes or 1)
        total = {name: sum(node.resources.get(name, 0) for node in nodes()) for name in ("CPU", "GPU")}
        devices = allocate(
            cfg,
            "async",
            visible=int(total["GPU"]),
            num_attention_heads=heads,
            cores=int(total["CPU"]),
            counts_only=True,
        )
        check_transfer(cfg, devices)
        trainers = len(devices.train)
        trainer = {"CPU": 1.0} | ({"GPU": 1.0} if devices.train[0].type == "cuda" else {})
        with places([trainer] * trainers + [_bundle(devices, 1)] * devices.replicas) as place:
            yield Site(devices, place, trainers, 1)


def _bundle(devices: Devices, cpus: int) -> dict[str, float]:
    gpus = devices.tensor_parallel_size if devices.inference[0].type == "cuda" else 0
    return {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})


def share_cores(devices: Devices, world: int) -> int:
    """Cores of each engine, where engines and trainers have this machine's between them; takes the trainer's.

    Two that compute with all cores at once would wait for each other's threads most of the time.
    """
    cores = len(os.sched_getaffinity(0))
    share = max(1, cores // (world + devices.replicas))
    torch.set_num_threads(max(1, (cores - share * devices.replicas) // world))
    return share


def make_ranks(cfg: Settings, site: Site) -> Ranks | None:
    """The processes that train together, started by torchrun or as actors; None where one trains alone.

    Raises:
        ValueError: as :func:`grpo_rl.build.parts.make_ranks`.
    """
    train = cfg.train_model
    if site.meeting is None:
        return build.make_ranks(cfg, site.devices)
    if train.parallel is None:
        return None
    device = torch.device("cuda", 0) if site.devices.train[0].type == "cuda" else torch.device("cpu")
    meeting = site.meeting
    placement = {"fp32_masters": cfg.train.mixed_precision, "cpu_offload": train.cpu_offload}
    store, timeout_s = meeting.store(), train.timeout_s
    return Ranks.join(train.parallel, device, meeting.rank, meeting.size, store, timeout_s, **placement)


def make_engine(cfg: Settings, model_folder: Path, site: Site, ranks: Ranks | None = None) -> FleetEngine | NoEngine:
    """The engines of the plan, each in an actor of its own, as one.

    Args:
        ranks: of which only rank 0 has them.
    """
    lora, dtype = build.make_lora(cfg), cfg.train_model.dtype
    beside = bool(lora.rank) and lora.push == "adapter"
    if ranks and ranks.rank:
        return NoEngine(getattr(torch, dtype), takes_adapters=beside)
    model, on_gpu = cfg.inference_model, site.devices.inference[0].type == "cuda"
    settings = {
        "tensor_parallel_size": site.devices.tensor_parallel_size,
        "gpu_memory_utilization": model.gpu_memory_utilization,
        "enforce_eager": model.enforce_eager,
        "dtype": dtype,
        "adapter_rank": lora.rank if beside else 0,
        "adapter_targets": target_names(model_folder, lora) if beside else (),
        "deadline_s": model.deadline_s,
        "transfer": check_transfer(cfg, site.devices),
        "keep_cache": model.keep_cache,
    }

    # An actor has a working directory of its own; what is no folder here is fetched where the engine is.
    name_or_path = str(Path(cfg.model.name).resolve()) if Path(cfg.model.name).is_dir() else cfg.model.name

    async def start(number: int) -> FleetMember:
        name, seed = f"engine {number}", cfg.train.seed + number
        make = functools.partial(
            start_vllm,
            name_or_path,
            model.max_model_len,
            cpus=site.engine_cpus,
            on_loopback=cfg.ray.address is None,
            seed=seed,
            name=name,
            **settings,
        )
        gpus = site.devices.tensor_parallel_size if on_gpu else 0
        engine = await launch(
            name, make, site.place, site.trainers + number, site.engine_cpus, gpus, deadline_s=START_S
        )
        if settings["transfer"] == "shared_memory" and engine.node != this_address():
            await engine.close()
            raise ValueError(
                f"{engine.name} is not on this machine ({this_address()}), which is as far as "
                "inference_model.transfer=shared_memory reaches; use nccl on GPUs, or engines on the trainer's node"
            )
        return engine

    loop = LoopThread()
    fleet = Fleet(start, site.devices.replicas, model.max_restarts)
    try:
        loop.run(fleet.start())
        return FleetEngine(fleet, loop, functools.partial(make_transport, cfg, model_folder, site.devices))
    except BaseException:
        loop.run(fleet.close())
        loop.close()
        raise


def start_vllm(model: str, max_model_len: int, cpus: int, on_loopback: bool, **settings: Any) -> AsyncEngine:
    """vLLM in a process under this one; called in the engine's actor.

    Args:
        on_loopback: its processes listen for one another on the loopback interface alone.
    """
    from grpo_rl.policies.hub import resolve_model

    if on_loopback:
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise the one that the machine's name leads to
    # Read by vLLM and OpenMP when the process starts. vLLM's own choice of cores is all of them.
    os.environ["OMP_NUM_THREADS"] = str(cpus)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("TQDM_DISABLE", "1")
    module = importlib.import_module("grpo_rl.engines.vllm.asynchronous")
    return module.AsyncVLLMEngine(resolve_model(model), max_model_len, **settings)


def make_transport(cfg: Settings, model_folder: Path, devices: Devices, engines: Sequence[FleetMember]) -> Controlled:
    """What brings weights to the engines: through shared memory on a CPU, over NCCL between GPUs."""
    model = cfg.inference_model
    if check_transfer(cfg, devices) == "shared_memory":
        return SharedMemoryTransport(engines, deadline_s=model.deadline_s)
    shapes = {name: weight.shape for name, weight in skeleton(model_folder).named_parameters()}
    return NativeTransport(
        engines, "nccl", shapes, model.deadline_s, devices.tensor_parallel_size, this_address(), devices.train[0]
    )


def check_transfer(cfg: Settings, devices: Devices) -> str:
    """How weights travel.

    Raises:
        ValueError: NCCL can't carry what the settings would send.
    """
    on_gpu, lora = devices.inference[0].type == "cuda", cfg.train_model.lora
    transfer = cfg.inference_model.transfer or ("nccl" if on_gpu else "shared_memory")
    refused = {
        "train_model.lora.push=adapter": bool(lora.rank) and lora.push == "adapter",
        "train_model.cpu_offload=true": cfg.train_model.cpu_offload,
    }
    if transfer == "nccl" and (not on_gpu or (chosen := [name for name, is_set in refused.items() if is_set])):
        what = f"{chosen[0]} with" if on_gpu else "no GPU is there for"
        raise ValueError(
            f"{what} inference_model.transfer={cfg.inference_model.transfer}, which sends whole merged weights from "
            "GPU to GPU by nccl; use inference_model.transfer=shared_memory, or leave the setting out"
        )
    return transfer


def make_collector(
    cfg: Settings, env: LLMEnv, engine: FleetEngine | NoEngine, version: int, collected: int, led: Led
) -> Collector:
    """The collector of the run, which samples while others train.

    Args:
        version: of the weights that are trained first.
        collected: answers that the run has already.
        led: how other ranks wait for rank 0.
    """
    train, mine = cfg.train, None
    if isinstance(engine, FleetEngine):
        mine = OverlappedCollector(
            env,
            engine,
            build.make_sampling(cfg),
            train.total_dialog_turns,
            train.max_staleness,
            version,
            drops_alike=train.max_refills > 0,
            alike=build.make_alike(cfg),
        )
    return SharedCollector(mine, led, env.repeats, collected)
