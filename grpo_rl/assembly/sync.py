"""Builds the in-process engine, the agents and the collector."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from grpo_rl.collectors.base import Collector
from grpo_rl.collectors.engine_policy import EnginePolicy
from grpo_rl.collectors.groups import has_zero_variance
from grpo_rl.collectors.sync import SyncCollector
from grpo_rl.data.group import Group
from grpo_rl.engines.base import Engine, Sampler, Sampling
from grpo_rl.engines.sampling import sequences
from grpo_rl.envs.base import LLMEnv
from grpo_rl.policies.loading import target_names
from grpo_rl.settings.derived import adapters, dtype, pushes_adapters, responses_at_once
from grpo_rl.settings.devices import Devices
from grpo_rl.settings.schema import Settings
from grpo_rl.weights.push import WeightSync

if TYPE_CHECKING:
    from grpo_rl.assembly.agents import Agents


def make_engine(settings: Settings, model_folder: Path, devices: Devices) -> Engine:
    """Starts the engine of ``inference_model.engine``."""
    model = settings.inference_model
    if model.engine == "transformers":
        from grpo_rl.engines.transformers import TransformersEngine

        return TransformersEngine(model_folder, model.max_model_len, dtype=dtype(settings), device=devices.inference[0])
    # What vLLM imports keeps the frames that it was imported from, and frames keep their callers with all variables:
    # this run's model would outlive the run. A thread's stack has nothing to keep.
    with ThreadPoolExecutor(max_workers=1) as thread:
        module = thread.submit(importlib.import_module, "grpo_rl.engines.vllm.engine").result()
    options = vllm_options(settings, model_folder, devices) | {"can_sleep": model.sleep}
    return module.VLLMEngine(model_folder, model.max_model_len, seed=settings.train.seed, **options)


def vllm_options(settings: Settings, model_folder: Path, devices: Devices) -> dict[str, Any]:
    """Arguments of vLLM's engines in both modes."""
    model, lora, separate = settings.inference_model, adapters(settings), pushes_adapters(settings)
    return {
        "tensor_parallel_size": devices.tensor_parallel_size,
        "gpu_memory_utilization": model.gpu_memory_utilization,
        "enforce_eager": model.enforce_eager,
        "dtype": dtype(settings),
        "max_num_seqs": model.max_num_seqs or _sequences(settings, model_folder, devices),
        "adapter_rank": lora.rank if separate else 0,
        "adapter_targets": target_names(model_folder, lora) if separate else (),
        "router_replay": settings.policy.router_replay,
        "speculative": model.speculative,
        "draft_tokens": model.draft_tokens,
        "sampling": _started_for(settings),
    }


def _started_for(settings: Settings) -> Sampling:
    """The sampling that an engine is started for: an agent's requests may have stop strings, which need a tokenizer."""
    sampling = Sampling(**settings.sampling)
    if settings.env.dataset != "agent" or sampling.stop or sampling.min_new_tokens:
        return sampling
    return replace(sampling, stop=("any",))


def _sequences(settings: Settings, model_folder: Path, devices: Devices) -> int:
    """Responses that an engine computes at the same time; its GPU is taken to be of this process's kind."""
    vocab, memory = AutoConfig.from_pretrained(model_folder).get_text_config().vocab_size, None
    if devices.inference[0].type == "cuda" and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(devices.train[0]).total_memory
        memory = settings.inference_model.gpu_memory_utilization * total
    return sequences(responses_at_once(settings, devices.replicas), vocab, memory)


def make_agents(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> Agents | None:
    """The agents of a run; None where ``env.dataset`` is another task, which loads nothing of theirs."""
    if settings.env.dataset != "agent":
        return None
    return importlib.import_module("grpo_rl.assembly.agents").Agents(settings, tokenizer)


def make_collector(
    settings: Settings, env: LLMEnv, engine: Sampler, weights: WeightSync, collected: int, agents: Agents | None
) -> Collector:
    """The collector of a run that has ``collected`` responses already."""
    sampling, train, has_no_signal = Sampling(**settings.sampling), settings.train, make_has_no_signal(settings)
    played = agents.stepped_groups(env, engine) if agents else None
    policy = EnginePolicy(engine, sampling)
    limits = train.total_dialog_turns, collected, train.max_resamples
    return SyncCollector(env, policy, *limits, has_no_signal, played, weights)


def make_has_no_signal(settings: Settings) -> Callable[[Group], bool]:
    """The test for zero-variance groups, on rewards as they enter the advantages."""
    clip = math.inf if settings.train.reward_clip is None else settings.train.reward_clip
    return functools.partial(has_zero_variance, clip=clip, by_part=settings.loss.advantage == "multi_reward")
