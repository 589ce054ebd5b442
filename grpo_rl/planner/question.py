"""What is to be planned: a config on a cluster, and what of both memory and time depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import AutoConfig, PreTrainedModel

from grpo_rl.planner.batches import BatchPlan, plan_batches
from grpo_rl.planner.hardware import Cluster
from grpo_rl.planner.memory import (
    QUANTIZED_BYTES,
    EngineMemory,
    Footprint,
    Shape,
    Training,
    engine_memory,
    kept_state,
    training_moments,
)
from grpo_rl.planner.time import SAMPLE_SHARE, TRAIN_SHARE, Work, sample_s, score_s, sync_s, train_s
from grpo_rl.policies.compiled import can_compile
from grpo_rl.policies.hub import DEFAULT_MODEL, resolve_model
from grpo_rl.settings.derived import adapters
from grpo_rl.settings.schema import Settings


@dataclass(frozen=True)
class Question:
    """What is to be planned.

    Args:
        cfg: the run's settings.
        model: a skeleton of its model.
        cluster: that it is to run on.
        mode: ``sync``: sampling and training take turns; ``async``: at the same time, on devices of their own.
        prompt_tokens: assumed of every prompt, see `grpo_rl.planner.batches.plan_batches`.
        answer_tokens: and of every answer; memory is planned for the longest.
        train_share: of the rates that training reaches.
        sample_share: and that sampling reaches.
    """

    cfg: Settings
    model: PreTrainedModel
    cluster: Cluster
    mode: str
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    train_share: float = TRAIN_SHARE
    sample_share: float = SAMPLE_SHARE

    def having(self, settings: Mapping[str, object]) -> Question:
        """The same with other values of some keys, of which ``cluster`` is the number of its devices."""
        keys, cluster = dict(settings), self.cluster
        if (count := keys.pop("cluster", None)) is not None:
            cluster = Cluster(int(str(count)), cluster.device)
        cfg = self.cfg.with_values(keys)
        shares = (self.train_share, self.sample_share)
        return Question(cfg, self.model, cluster, self.mode, self.prompt_tokens, self.answer_tokens, *shares)

    @property
    def visible(self) -> int:
        """GPUs."""
        return self.cluster.count if self.cluster.device.kind == "cuda" else 0

    @cached_property
    def shape(self) -> Shape:
        """Of the model, with the config's adapters."""
        return Shape.of(self.model, adapters(self.cfg))

    @cached_property
    def batches(self) -> BatchPlan:
        """Numbers of its batches."""
        return plan_batches(self.cfg, self.prompt_tokens, self.answer_tokens, self.visible)

    @cached_property
    def work(self) -> Work:
        """Of a step."""
        return Work(self.batches, self.train_share, self.sample_share)

    @cached_property
    def training(self) -> Training:
        """What the trainer's memory depends on."""
        train, compiles = self.cfg.train_model, self.cluster.device.kind == "cuda" or can_compile("cpu")
        return Training(
            masters=self.cfg.train.mixed_precision and train.dtype != "float32",
            moments=2 if self.cfg.optimizer.name == "adamw" else 0,
            checkpointing=train.gradient_checkpointing,
            fused=compiles and not train.quantization if train.compile is None else train.compile,
            frozen_bytes=QUANTIZED_BYTES.get(train.quantization, self.shape.itemsize),
        )

    @property
    def answer(self) -> int:
        """Tokens of the longest answer."""
        return self.cfg.sampling.max_new_tokens

    @property
    def longest_group(self) -> int:
        """Tokens of a group whose prompt and answers are as long as they can be: it is never split."""
        return self.cfg.inference_model.max_model_len - self.answer + self.batches.largest * self.answer

    @property
    def most_ranks(self) -> int:
        """Devices that can train: one more would have no group of an optimizer step."""
        return max(1, self.batches.batch_groups)

    def sharded(self, ranks: int) -> bool:
        """Whether so many training devices hold a part of the weights each."""
        return ranks > 1 and self.cfg.train_model.parallel != "ddp"

    def tokens(self, ranks: int) -> int:
        """Tokens of the largest micro-batch that a training device can get."""
        groups = max(1, math.ceil(self.batches.batch_groups / ranks))
        if count := self.batches.accumulation:
            return math.ceil(groups / min(count, groups)) * self.longest_group
        return min(groups * self.longest_group, max(self.cfg.train.micro_batch_tokens, self.longest_group))

    def trainer(self, ranks: int, tokens: int) -> Footprint:
        """The highest moment of a training device, with all of these tokens in a micro-batch."""
        over = ranks if self.sharded(ranks) else 1
        moments = training_moments(self.shape, self.training, over, tokens, self.cluster.device.kind)
        if self.cfg.train_model.cpu_offload:
            state = kept_state(self.shape, self.training, over)
            moments = [Footprint(m.moment, m.parts | dict.fromkeys(state, 0.0)) for m in moments]
        return max(moments, key=lambda moment: moment.total)

    def engine(self, size: int) -> EngineMemory:
        """Memory of a device of an engine of so many."""
        device, utilization = self.cluster.device, self.cfg.inference_model.gpu_memory_utilization
        return engine_memory(self.shape, size, device.memory, utilization, device.kind)

    def kept(self, ranks: int) -> float:
        """Bytes that a training device keeps between steps."""
        state = kept_state(self.shape, self.training, ranks if self.sharded(ranks) else 1)
        return 0.0 if self.cfg.train_model.cpu_offload else sum(state.values())

    @property
    def sleeps(self) -> bool:
        """Whether an engine on the trainer's devices frees their memory while it trains."""
        return self.mode == "sync" and self.cfg.inference_model.sleep and self.cluster.device.kind == "cuda"

    @property
    def reference_apart(self) -> bool:
        """Whether the reference has weights of its own: a policy with adapters is its own without them."""
        return bool(self.cfg.policy.kl_coef) and not self.shape.adapters

    def seconds(self, ranks: int, ref_ranks: int, replicas: int, size: int, colocated: bool) -> dict[str, float]:
        """Of each phase."""
        shape, work, device = self.shape, self.work, self.cluster.device
        sharded = self.sharded(ranks)
        return {
            "sample": sample_s(shape, self.engine(size), work, device, replicas, size),
            "score": score_s(shape, work, device, ranks, max(1, ref_ranks), sharded),
            "train": train_s(shape, self.training, work, device, ranks, sharded),
            "sync": sync_s(shape, device, ranks, 0 if colocated else replicas * size),
        }


def tensor_parallel_sizes(question: Question, devices: int) -> list[int]:
    """Sizes of engines that so many devices and the model's heads can be divided into, within a node."""
    shape, node = question.shape, question.cluster.device.node
    return [
        size
        for size in range(1, min(devices, node) + 1)
        if devices % size == 0
        and shape.heads % size == 0
        and (shape.kv_heads % size == 0 or size % shape.kv_heads == 0)
        and size & (size - 1) == 0
    ]


def config_source(name: str) -> str:
    """Where a model's ``config.json`` is read from: a folder, which needs nothing else, or the hub.

    Raises:
        ValueError: it is not there, or can't be fetched.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"model {name!r}: {folder} has no config.json")
        return str(folder)
    for offline in (True, False):  # what is here is not asked of the network
        try:
            AutoConfig.from_pretrained(name, local_files_only=offline)
            return name
        except (OSError, ValueError):
            continue
    if name == DEFAULT_MODEL:
        return str(resolve_model(name))
    raise ValueError(
        f"unknown model {name!r}: there is no such folder, and its config.json could not be had from the hub; give a "
        "folder with that file, connect to the hub, or accept the model's licence there"
    )
