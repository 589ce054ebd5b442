"""Builds an asynchronous run: engines in Ray actors, which sample during training."""

from __future__ import annotations

import grpo_rl.cluster  # noqa: F401, before torchrl, which imports ray

# isort: split
import importlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_rl.assembly.devices import make_ranks
from grpo_rl.assembly.run import build_run
from grpo_rl.assembly.site import Site, check_transfer
from grpo_rl.assembly.sync import make_has_no_signal, vllm_options
from grpo_rl.cluster.engine_actors import launch
from grpo_rl.cluster.fleet import Fleet, FleetEngine, FleetMember
from grpo_rl.cluster.nodes import this_address
from grpo_rl.collectors.asynchronous import AsyncCollector
from grpo_rl.collectors.base import Collector
from grpo_rl.engines.base import Sampling
from grpo_rl.engines.loop_thread import AsyncEngine, LoopThread
from grpo_rl.envs.base import LLMEnv
from grpo_rl.policies.hub import resolve_model
from grpo_rl.policies.loading import CheckpointNames, skeleton
from grpo_rl.policies.lora import saved_buffers
from grpo_rl.run.run import Run
from grpo_rl.settings.devices import Devices
from grpo_rl.settings.schema import Settings
from grpo_rl.weights.push import WeightSync
from grpo_rl.weights.remote import NativeTransport, RemoteTransport
from grpo_rl.weights.shared_memory import GPU_BYTES, SharedMemoryTransport

if TYPE_CHECKING:
    from grpo_rl.assembly.agents import Agents


def async_run(settings: Settings, folder: str | Path, site: Site) -> AbstractContextManager[Run]:
    """A run whose engines sample while it trains; see `grpo_rl.assembly.run.sync_run`."""
    model = resolve_model(settings.model.name)
    ranks = partial(make_ranks, settings, site.devices, site.rendezvous)
    engine = partial(make_engine, settings, model, site)
    return build_run(settings, folder, model, site.devices, ranks, engine, partial(make_collector, settings))


def make_engine(settings: Settings, model_folder: Path, site: Site) -> FleetEngine:
    """Starts the planned engines, each in its own actor, and returns them as one engine."""
    model, on_gpu = settings.inference_model, site.devices.inference[0].type == "cuda"
    options = vllm_options(settings, model_folder, site.devices) | {
        "deadline_s": model.deadline_s,
        "transfer": check_transfer(settings, site.devices),
        "keep_cache": model.keep_cache,
    }

    cache: dict[str, int] = {}
    """Size of the KV cache next to a trainer, once vLLM has measured it: it can't while the trainer takes memory."""

    # An actor has its own working directory; a name that is no folder here is downloaded where the engine runs.
    own = Path(settings.model.name)
    name_or_path = str(own.resolve()) if own.is_dir() else settings.model.name

    async def start(number: int) -> FleetMember:
        name, seed = f"engine {number}", settings.train.seed + number
        make = partial(
            start_vllm,
            name_or_path,
            model.max_model_len,
            cpus=site.engine_cpus,
            on_loopback=settings.ray.address is None,
            seed=seed,
            name=name,
            **options,
            **cache,
        )
        gpus = site.devices.tensor_parallel_size if on_gpu else 0
        engine = await launch(name, make, site.place, site.trainers + number, site.engine_cpus, gpus)
        if site.devices.engine_share and not cache:
            try:
                cache["cache_bytes"] = await engine.cache_bytes()
            except BaseException:
                await engine.close()
                raise
        return engine

    loop = LoopThread()
    fleet = Fleet(start, site.devices.replicas, model.max_restarts)
    try:
        loop.run(fleet.start())
        return FleetEngine(fleet, loop, partial(make_transport, settings, model_folder, site.devices))
    except BaseException:
        loop.run(fleet.close())
        loop.close()
        raise


def make_transport(
    settings: Settings, model_folder: Path, devices: Devices, engines: Sequence[FleetMember]
) -> RemoteTransport:
    """The transport of weights to the engines: memory of the host or of a GPU that both share, or NCCL."""
    model, transfer = settings.inference_model, check_transfer(settings, devices)
    if transfer == "ipc":
        return SharedMemoryTransport(engines, GPU_BYTES, model.deadline_s, devices.train[0])
    if transfer == "shared_memory":
        return SharedMemoryTransport(engines, deadline_s=model.deadline_s)
    plain = skeleton(model_folder)
    if buffers := list(saved_buffers(plain)):
        remedy = "set inference_model.transfer=shared_memory"
        raise ValueError(f"inference_model.transfer=nccl sends one dtype, and {buffers[0]} keeps its own; {remedy}")
    names = CheckpointNames(plain)
    shapes = {name: part.shape for named in plain.named_parameters() for name, part in names.views(*named)}
    return NativeTransport(
        engines, shapes, model.deadline_s, devices.tensor_parallel_size, this_address(), devices.train[0]
    )


def start_vllm(model: str, max_model_len: int, cpus: int, on_loopback: bool, **settings: Any) -> AsyncEngine:
    """Starts vLLM in a child process; called in the engine's actor."""
    if on_loopback:  # the engine's processes connect to one another on loopback only
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise the interface of the host name
    # Read by vLLM and OpenMP when the process starts. By default vLLM binds to all cores.
    os.environ["OMP_NUM_THREADS"] = str(cpus)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("TQDM_DISABLE", "1")
    module = importlib.import_module("grpo_rl.engines.vllm.asynchronous")
    return module.AsyncVLLMEngine(resolve_model(model), max_model_len, **settings)


def make_collector(
    settings: Settings, env: LLMEnv, engine: FleetEngine, weights: WeightSync, collected: int, agents: Agents | None
) -> Collector:
    """The collector of a run that has ``collected`` responses already; it samples during training."""
    train, sampling = settings.train, Sampling(**settings.sampling)
    return AsyncCollector(
        env,
        engine,
        sampling,
        train.total_dialog_turns,
        weights,
        train.max_staleness,
        collected,
        drops_zero_variance=train.max_resamples > 0,
        has_no_signal=make_has_no_signal(settings),
        agents=agents.groups(env) if agents else None,
    )
