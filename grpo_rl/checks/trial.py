"""A trial: a model's trainer and engine, as a run would build them, and a few responses."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from grpo_rl.assembly.devices import plan_devices
from grpo_rl.assembly.sync import make_engine
from grpo_rl.assembly.training import make_policy
from grpo_rl.checks.check import Finding, Unfit, unfit
from grpo_rl.collectors.groups import group_of_samples
from grpo_rl.data.group import Group
from grpo_rl.engines.base import Engine, Sampling
from grpo_rl.envs.base import Prompt
from grpo_rl.envs.chat import decode_responses, encode_prompts
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.settings.schema import Settings
from grpo_rl.weights.push import WeightSync

QUESTIONS = (
    "How much is 17 + 25?",
    "Name three colours.",
    "What is the capital of France?",
    "Write a sentence about the sea.",
)
RESPONSES, TOKENS = 4, 32
"""Responses to each question, and tokens of each, at most."""


@dataclass(frozen=True)
class Trial:
    """The trainer and the engine, which holds the trainer's weights."""

    policy: TrainPolicy
    engine: Engine
    weights: WeightSync
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling

    def groups(self) -> list[Group]:
        """Responses to each question, sampled as in training, but for their length."""
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        prompts = encode_prompts(self.tokenizer, chats)
        samples = self.engine.generate(prompts, RESPONSES, self.sampling)
        asked = [Prompt(i, i, "", torch.tensor(ids)) for i, ids in enumerate(prompts)]
        return [group_of_samples(prompt, sample) for prompt, sample in zip(asked, samples, strict=True)]

    def text(self, ids: torch.Tensor) -> str:
        """The text of ids."""
        return decode_responses(self.tokenizer, [ids])[0]


def in_one_process(settings: Settings, gpus: int) -> Settings:
    """The settings of a trial of a run that has several processes: one that trains, and its engine.

    Where a run in async mode has several of this machine's ``gpus``, the trial's engine has one of its own.

    Raises:
        Unfit: the model is divided among devices, and one process may not hold it; skipped.
    """
    train, engine = settings.train_model, settings.inference_model
    if train.parallel == "fsdp" or (settings.mode == "async" and (engine.tensor_parallel_size or 1) > 1):
        text = "several devices hold the model together, and a trial has one process; try a short run"
        raise Unfit(Finding("SKIP", "weights", text))
    if not train.parallel and settings.mode != "async":
        return settings
    values: dict[str, object] = {"mode": "sync", "train_model.parallel": None, "ray.address": None, "ray.nodes": None}
    values |= {"train_model.num_devices": None, "train_model.devices": train.devices and train.devices[:1]}
    values |= {"inference_model.tensor_parallel_size": None, "inference_model.transfer": None}
    if settings.mode == "async":
        values |= {f"{role}_model.{key}": None for role in ("ref", "inference") for key in ("num_devices", "devices")}
        values |= {"inference_model.devices": [0], "train_model.devices": [1]} if gpus > 1 else {}
    return settings.with_values(values)


@contextmanager
def trial(settings: Settings, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Trial]:
    """A context with the trial of a local folder's model. Nothing is compiled unless ``train_model.compile`` is true.

    Raises:
        Unfit: its weights are damaged, the engine does not start with it, or weights do not arrive there.
    """
    torch.manual_seed(settings.train.seed)
    chosen = settings.inference_model.engine
    sampling = Sampling(**settings.sampling)
    sampling = replace(sampling, max_new_tokens=min(TOKENS, sampling.max_new_tokens))
    # Compiling takes longer than all else here, and changes no more than rounding.
    settings = settings.with_values({"train_model.compile": bool(settings.train_model.compile)})
    devices = plan_devices(settings, folder)
    with unfit("weights"):
        policy = make_policy(settings, folder, devices)
    other = "; --engine transformers samples without vLLM, slowly" if chosen == "vllm" else ""
    with unfit(f"engine {chosen}", other):
        engine = make_engine(settings, folder, devices)
    try:
        with unfit("delivery", other):
            weights = WeightSync(policy.model, engine)
            weights.push()
        yield Trial(policy, engine, weights, tokenizer, sampling)
    finally:
        engine.close()
