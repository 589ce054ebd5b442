"""Scenario: a config on a cluster, and what both memory and time depend on."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from transformers import AutoConfig, PreTrainedModel

from grpo_rl.planner.batches import BatchPlan, plan_batches
from grpo_rl.planner.hardware import SAMPLE_SHARE, TRAIN_SHARE, Cluster
from grpo_rl.planner.memory import (
    QUANTIZED_BYTES,
    EngineMemory,
    Footprint,
    NotPlannedError,
    Shape,
    Training,
    engine_memory,
    kept_state,
    training_footprint,
)
from grpo_rl.policies.before_loading import local_folder
from grpo_rl.policies.compiler import has_compiler
from grpo_rl.policies.hub import DEFAULT_MODEL, check_class, resolve_model
from grpo_rl.settings.derived import adapters, compares_full_vocabulary, dtype, loaded_references, responses_at_once
from grpo_rl.settings.schema import Settings
from grpo_rl.storage.hub import why_no_hub


@dataclass(frozen=True)
class Layout:
    """The number of devices of each role.

    Args:
        ref: devices of the reference alone; 0: it shares the trainer's, or there is none.
        colocated: the devices that sample are those that train, in turns.
    """

    train: int
    ref: int
    inference: int
    engine_size: int
    colocated: bool = False

    @property
    def engines(self) -> int:
        return self.inference // self.engine_size

    @property
    def total(self) -> int:
        """The number of devices in use."""
        return self.train + self.ref + (0 if self.colocated else self.inference)


@dataclass(frozen=True)
class Scenario:
    """A config on a cluster, with assumed lengths and rates.

    Args:
        settings: the run's; by ``mode`` sampling and training take turns (``sync``) or overlap (``async``).
        prompt_tokens: assumed length of every prompt, see `grpo_rl.planner.batches.plan_batches`.
        response_tokens: assumed length of every response; memory is planned for the longest.
        train_share: share of the devices' rates that training and scoring reach, more than 0 and at most 1.
        sample_share: share of them that sampling reaches.
    """

    settings: Settings
    model: PreTrainedModel
    cluster: Cluster
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    train_share: float = TRAIN_SHARE
    sample_share: float = SAMPLE_SHARE

    def with_overrides(self, overrides: Mapping[str, object]) -> Scenario:
        """The scenario with other values of some settings."""
        return replace(self, settings=self.settings.with_values(overrides))

    @property
    def visible(self) -> int:
        """The number of GPUs."""
        return self.cluster.count if self.cluster.device.kind == "cuda" else 0

    @property
    def overlaps(self) -> bool:
        """True if sampling and training go on at the same time."""
        return self.settings.mode == "async"

    def shares_gpu(self, layout: Layout) -> bool:
        """True if a GPU trains and samples at the same time."""
        return layout.colocated and self.overlaps and self.visible > 0

    @cached_property
    def shape(self) -> Shape:
        """The model's shape, with the config's adapters.

        Raises:
            NotPlannedError: what the config trains is not planned.
        """
        if compares_full_vocabulary(self.settings):
            raise NotPlannedError(f"loss.kl={self.settings.loss.kl} holds whole distributions, which is not planned")
        return _shape(self.model, adapters(self.settings))

    @cached_property
    def batches(self) -> BatchPlan:
        return plan_batches(self.settings, self.prompt_tokens, self.response_tokens, self.visible)

    @cached_property
    def training(self) -> Training:
        train, compiles = self.settings.train_model, self.cluster.device.kind == "cuda" or has_compiler("cpu")
        return Training(
            masters=self.settings.train.mixed_precision and dtype(self.settings) != "float32",
            moments=2 if self.settings.optimizer.name == "adamw" else 0,
            checkpointing=train.gradient_checkpointing,
            fused=compiles and not train.quantization if train.compile is None else train.compile,
            frozen_bytes=QUANTIZED_BYTES.get(train.quantization, self.shape.itemsize),
            offloaded=train.cpu_offload,
        )

    @property
    def longest_group(self) -> int:
        """Tokens of a group, which is never split, whose prompt and responses are as long as they can be."""
        longest = self.settings.sampling.max_new_tokens
        return self.settings.inference_model.max_model_len + (self.batches.group_size - 1) * longest

    @property
    def most_ranks(self) -> int:
        """The number of devices that can train: each needs a group of every optimizer step."""
        return max(1, self.batches.batch_groups)

    @property
    def has_reference(self) -> bool:
        """True if a reference is loaded: a policy with adapters is its own without them, and some are served."""
        return loaded_references(self.settings) > 0

    @property
    def engine_sleeps(self) -> bool:
        """True if an engine on the trainer's devices frees their memory while it trains."""
        return not self.overlaps and self.settings.inference_model.sleep and self.cluster.device.kind == "cuda"

    def shards(self, ranks: int) -> int:
        """The number of parts that the weights are divided into on so many training devices."""
        return 1 if self.settings.train_model.parallel == "ddp" else ranks

    def micro_batch_tokens(self, ranks: int) -> int:
        """Tokens of the largest micro-batch that one of so many training devices can get."""
        groups = max(1, math.ceil(self.batches.batch_groups / ranks))
        if count := self.batches.accumulation:
            return math.ceil(groups / min(count, groups)) * self.longest_group
        return min(groups * self.longest_group, max(self.settings.train.micro_batch_tokens, self.longest_group))

    def trainer(self, ranks: int, tokens: int) -> Footprint:
        """The peak of one of so many training devices, with all of these tokens in a micro-batch."""
        return training_footprint(self.shape, self.training, self.shards(ranks), tokens, self.cluster.device.kind)

    def kept_state(self, ranks: int) -> dict[str, float]:
        """Bytes of the trainer's state between steps, for each of so many devices."""
        return kept_state(self.shape, self.training, self.shards(ranks))

    def reference_bytes(self, ranks: int) -> float:
        """Bytes on each of so many devices of the references' weights, each of the policy's size, and of averages."""
        averages = 4 * (self.settings.ref_model.refresh == "average")
        held = loaded_references(self.settings) * self.shape.parameters * (self.shape.itemsize + averages)
        return held / self.shards(ranks)

    def engine(self, size: int, engines: int = 1) -> EngineMemory:
        """Memory of each device of an engine that is spread over so many, one of so many engines."""
        device, model = self.cluster.device, self.settings.inference_model
        responses, share = responses_at_once(self.settings, engines), model.gpu_memory_utilization
        return engine_memory(self.shape, size, device.memory, share, device.kind, responses, model.max_num_seqs)

    def engine_sizes(self, devices: int) -> list[int]:
        """Tensor-parallel sizes that divide so many devices and the model's heads, within a node."""
        shape = self.shape
        return [
            size
            for size in (2**i for i in range(min(devices, self.cluster.device.node).bit_length()))
            if devices % size == 0 and shape.heads % size == 0 and shape.can_split_keys(size)
        ]


_shape = functools.lru_cache(maxsize=4)(Shape.of)  # scenarios differ in other settings by the hundred


def config_source(name: str) -> str:
    """The place that a model's ``config.json`` is read from: a folder, which needs nothing else, or the hub.

    Raises:
        ValueError: it is not there, or can't be fetched.
    """
    if folder := local_folder(name):
        if not (folder / "config.json").is_file():
            raise ValueError(f"model {name!r}: {folder} has no config.json")
        check_class(folder)
        return str(folder)
    for offline in (True, False):  # a local file needs no network
        with contextlib.suppress(OSError, ValueError):
            if offline or not why_no_hub():
                AutoConfig.from_pretrained(name, local_files_only=offline, trust_remote_code=False)
                return name
    if name == DEFAULT_MODEL:
        return str(resolve_model(name))
    why = f" ({reason})" if (reason := why_no_hub()) else ""
    text = f"unknown model {name!r}: no such folder, and its config.json could not be had from the hub{why}"
    raise ValueError(f"{text}; give a folder, or accept the model's licence on the hub")
