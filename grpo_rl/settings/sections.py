"""Every setting that all tasks share, declared once; its meaning is the comment next to it in ``config/``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from grpo_rl.loggers.base import BUILT_IN
from grpo_rl.losses.factors import Loss, loss_section
from grpo_rl.section import REQUIRED, Section, declared, setting
from grpo_rl.settings.models import InferenceModel, Model, RefModel, SamplingSection, TrainModel
from grpo_rl.settings.tasks import TASKS, task_section


class Env(Section):
    """The task, and how its prompts are sampled and its responses scored."""

    dataset: str = setting(
        REQUIRED, "the task: " + " | ".join(TASKS) + " | package.module:Class, your own (docs/tasks.md)"
    )
    path: str | None = setting(
        None,
        "instead of the task's own data: a file, folder or pattern of JSONL, JSON, CSV, Parquet, or hf:owner/name "
        "(docs/data.md)",
    )
    subset: str | None = setting(None, "the hub's configuration of the data; null: the only one")
    split: str | None = setting(None, "split of the hub's data or a folder; null: train")
    revision: str | None = setting(None, "commit, tag or branch of the hub's data; null: the newest")
    columns: Mapping[str, str] = setting(
        {}, "the data's names of columns, by those that the task uses: {question: problem, answer: solution}"
    )
    eval_path: str | None = setting(
        None, "held-out data, as `path`; null: `eval_split` of `path`, without `path` the task's own held-out split"
    )
    eval_split: str | None = setting(None, "held-out split of the hub's data or a folder; null: test")
    num_envs: int = setting(4, "prompts per collection", ge=1)
    repeats: int = setting(8, "group size G: responses per prompt", ge=2)
    long_prompt: Literal["error", "skip"] = setting(
        "error", "a prompt that leaves no room in max_model_len: `error` names its row, `skip` counts it"
    )
    max_turns: int = setting(
        4, "the policy's turns in one conversation, for tasks that reply (calculator, search_qa)", ge=1
    )
    score_timeout_s: float = setting(
        60, "seconds for one call of the scorer, of a response or of a whole group, and for a tool's reply", gt=0
    )
    max_failed_fraction: float = setting(
        0.1, "share of all responses whose scorers may fail or hang; with more the run stops", ge=0, le=1
    )
    isolated: bool | None = setting(
        None,
        "true: score in processes of their own, which can be killed; false: reward functions given by name are called "
        "in this process; null: only they get a process. math's comparisons and gsm8k's patterns always do",
    )
    curriculum: Mapping[Any, Any] = setting(
        {},
        "only rows whose pass rate in this run is between low and high are drawn: {low: 0.1, high: 0.9} "
        "(docs/mixtures.md); empty: all",
    )
    rewards: Mapping[Any, Any] = setting(
        {}, "added to the task's own: a weight by name, or a mapping of weight and settings (docs/tasks.md)"
    )
    tool_parser: str | None = setting(
        None,
        "vLLM's parser of calls of tools: hermes | llama3_json | ..., or package.module:Class; null: by the chat "
        "template",
    )
    mcp: tuple[object, ...] = setting(
        (), "MCP servers whose tools the policy can call: commands, or URLs of this machine (docs/tools.md)"
    )
    transforms: tuple[str, ...] = setting(
        (), "TorchRL transforms around the environment: package.module:Class, made without arguments (docs/tasks.md)"
    )
    task: Mapping[str, Any] = Field(default_factory=dict)
    """The task's own settings, as plain values; as a mapping a section has them next to its own."""

    def __getitem__(self, key: str) -> Any:
        return self.task[key] if key in self.task else super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        return iter([*super().__iter__(), *self.task])


class Train(Section):
    """The run and its steps."""

    total_dialog_turns: int = setting(100_000, "responses sampled in the whole run", ge=1)
    steps: int | None = setting(
        None,
        "instead of total_dialog_turns: so many steps, each of a collection of env.num_envs x env.repeats responses",
        ge=1,
    )
    optim_batch_size: int = setting(
        32, "responses per optimizer step; prompts per optimizer step = optim_batch_size / env.repeats", ge=1
    )
    micro_batch_tokens: int = setting(8192, "tokens per forward/backward (prompts once + responses)", ge=1)
    gradient_accumulation_steps: int | None = setting(
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
    reward_clip: float | None = setting(
        None, "rewards are clipped to plus and minus this before they become advantages", gt=0
    )
    mixed_precision: bool = setting(True, "fp32 master weights under a bfloat16 model")
    checkpoint_frequency: int = setting(20, "steps between checkpoints; 0: only at the end", ge=0)
    keep_checkpoints: int = setting(2, "number of newest checkpoints that stay; 0 keeps all", ge=0)
    keep_final_checkpoint: bool = setting(
        True, "false: a finished run keeps model/ and no checkpoint, so that it can't be prolonged"
    )
    elastic: bool = setting(
        False, "true: a run of several processes goes on with as many as are there; false: with as many as before"
    )
    lineage: bool = setting(
        False, "store every token's history, for `grpo-rl replay`; 13 to 25 bytes a token (docs/lineage.md)"
    )
    max_bad_steps: int = setting(5, "non-finite steps in a row before the run stops with a diagnosis", ge=1)
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
    router_replay: bool = setting(
        False, "train a mixture with the experts that the sampler's routers chose (docs/models.md)"
    )


class MismatchSection(Section):
    """The sampler's log-probs against the trainer's, of every trained token (docs/troubleshooting.md)."""

    bound: float | None = setting(
        0.2,
        "mean |difference| on fresh weights, in nats, above which the run stops; null: no bound. 0.2 is where a "
        "typical token's ratio would reach the default clip range",
        gt=0,
    )


class Evaluate(Section):
    """Evaluation on held-out data."""

    rows: int = setting(0, "held-out rows evaluated before and after training, greedily; 0: none", ge=0)
    frequency: int = setting(0, "steps between evaluations during training; 0: only before and after", ge=0)
    samples: int = setting(
        0, "responses to each row next to the greedy one, for eval/pass@k and eval/maj@k; 0: none", ge=0
    )
    temperature: float = setting(1.0, "temperature of those responses", gt=0, le=2)
    tasks: tuple[Mapping[str, Any], ...] = setting(
        (),
        "other tasks, logged as eval/TASK/reward and so on: a list of {task: math, rows: 50}, with samples, path and "
        "env: {reward: {correctness: 1}}, the task's own settings, where wanted; of your own, package.module:Class, "
        "`path` has the rows",
    )
    keep_best: bool = setting(False, "keep the model of the best evaluation in best_model/")
    patience: int = setting(
        0,
        "evaluations in a row that are no better than the best one, after which the run stops (docs/evaluation.md); "
        "0: it does not",
        ge=0,
    )
    score: str = setting(
        "reward", "the score that keep_best and patience follow: reward | accuracy | pass@4 | math/accuracy | …"
    )


class Logger(Section):
    """The loggers that metrics go to; metrics.jsonl is always written."""

    backend: str | tuple[str, ...] = setting(
        "none",
        " | ".join(BUILT_IN)
        + " | package.module:Class, a class of one's own | none; or a list of them (docs/loggers.md)",
    )
    mode: Literal["online", "offline"] = setting("online", "mode of wandb and the like; offline: uploaded later")
    project: str = setting("grpo_rl", "the run's project, in mlflow its experiment")
    name: str | None = setting(None, "the run's name there; null: the run folder's, or one that wandb makes")
    settings: Mapping[str, Any] = setting(
        {}, "further arguments of a logger, by its name or its class's: +logger.settings.mlflow.tracking_uri=..."
    )
    completions: bool = setting(True, "write every response to completions.parquet")
    token_groups: int = setting(
        1,
        "groups of a step that are written to tokens.parquet token by token, with the log-probs of sampler and "
        "trainer; 0: none",
        ge=0,
    )
    wait_deadline_s: float = setting(
        1800,
        "seconds after which a wait without a deadline of its own is logged, with all waits in waits.txt; it "
        "ends nothing (docs/troubleshooting.md)",
        gt=0,
    )


class Ray(Section):
    """The cluster of mode=async."""

    address: str | None = setting(
        None, "`auto` where this machine is part of it, or host:port; null: this machine alone", mode="async"
    )
    nodes: int | None = setting(
        None, "number of nodes that must be present before anything starts; null: any", ge=1, mode="async"
    )
    max_restarts: int = setting(
        3, "how often all trainers are started again when one is lost; 0: the run stops", ge=0, mode="async"
    )


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
    hooks: tuple[str, ...] = setting(
        (), "callbacks of your own: package.module:Class, made without arguments (docs/hooks.md)"
    )
    resume: str | None = setting(
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
