"""The conversion of a GRPO config of TRL: the config that trains as it does, and every difference by name.

Source: TRL 1.16, ``trl/trainer/grpo_config.py`` and ``trl/trainer/model_config.py``, and the ``TrainingArguments`` of
transformers 5.19. docs/from_trl.md has what becomes of each field.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from grpo_rl.monitor.logger_names import BUILT_IN
from grpo_rl.settings.other_names import SAME
from grpo_rl.settings.sections import declarations
from grpo_rl.storage.masking import shown

DEFAULTS: Mapping[str, Any] = {
    "learning_rate": 1e-6,
    "num_generations": 8,
    "max_completion_length": 512,
    "vllm_gpu_memory_utilization": 0.3,
    "gradient_checkpointing": True,
    "log_completions": False,
    "seed": 42,
}
"""TRL's defaults of fields whose value is taken over, where ours is another."""
DIFFERENT = (
    "dataset_configs", "entropy_coef", "eval_strategy", "generation_batch_size",
    "steps_per_generation", "sync_ref_model", "use_peft", "vllm_importance_sampling_clip_min", "warmup_steps",
)  # fmt: skip
"""Fields that mean something else than their counterpart."""
UNNEEDED = (
    "accelerator_config", "attn_implementation", "auto_find_batch_size", "average_tokens_across_devices",
    "batch_eval_metrics", "bf16_full_eval", "cache_implementation", "cast_lm_head_to_fp32", "dataloader_", "ddp_",
    "disable_", "do_", "ds3_", "enable_jit_checkpoint", "eval_accumulation_steps", "eval_do_", "eval_on_start",
    "eval_use_", "fp16_full_eval", "gradient_checkpointing_kwargs", "hub_always_push", "hub_strategy",
    "ignore_data_skip", "include_", "label_", "length_column_name", "local_rank", "log_level", "log_on_each_node",
    "log_unique_prompts", "logging_", "num_completions_to_print", "num_generations_eval", "overwrite_output_dir",
    "pad_to_multiple_of", "per_device_eval_batch_size", "prediction_loss_only", "remove_unused_columns", "restore_",
    "save_on_each_node", "shuffle_dataset", "skip_memory_metrics", "torch_", "train_sampling_strategy",
    "transformers_", "use_cache", "use_cpu", "use_liger_loss", "use_transformers_", "vllm_device", "vllm_group_port",
    "vllm_model_impl", "vllm_server_",
)  # fmt: skip
"""Beginnings of fields that need no counterpart."""
NO_EFFECT = {"lora_task_type": "CAUSAL_LM", "model_revision": "main", "repetition_penalty": 1.0} | dict.fromkeys(
    ("greater_is_better", "hub_private_repo", "load_best_model_at_end", "load_in_8bit", "push_to_hub", "tf32",
     "trust_remote_code", "use_dora", "use_liger_kernel", "use_rslora"), False,
)  # fmt: skip
"""Values that ask for nothing, of fields without a counterpart; as null does of any field."""
RENAMED = {"torch_dtype": "dtype", "warmup_ratio": "warmup_steps", "wandb_project": "project"}
"""Names of earlier versions of TRL and transformers, and today's."""

LOSS_TYPES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"aggregate": "sequence_mean"},
    "dapo": {"aggregate": "token_mean"},
    "bnpo": {"aggregate": "token_mean"},
    "dr_grpo": {"aggregate": "constant"},
    "luspo": {"aggregate": "constant", "normalizer": 1.0},
    "cispo": {"surrogate": "cispo", "aggregate": "token_mean", "clip_low": 1.0},
    "sapo": {"surrogate": "sapo", "aggregate": "sequence_mean"},
}
ADVANTAGES = {"group": "zscore", "batch": "batch_std", "none": "no_std", "True": "zscore", "False": "no_std"}
AGGREGATIONS = {"sum_then_normalize": {}, "normalize_then_sum": {"advantage": "multi_reward"}}
SCHEDULES = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}
ACCURACY = ("accuracy", "accuracy_reward", "reasoning_accuracy_reward")
"""Rewards that compare a mathematical answer with the gold one: the task ``math`` here."""
REWARDS = ("format", "tag_count", "reasoning_steps", "length", "cosine", "repetition_penalty", "code_format")
"""Rewards of Open-R1 that ``env.rewards`` has under the same name."""


def one_line(text: str) -> str:
    """A text as one line, without secrets and escape sequences."""
    return " ".join(shown(text).split())


@dataclass
class Converted:
    """A config of ours that was made of TRL's.

    Args:
        settings: by dotted names; only what is not left to the defaults of config/grpo.yaml.
        task: the value of ``env.dataset``.
        differences: a line each for what has no counterpart, or another meaning; begins with TRL's field.
        start: the command that trains with this config, without its options.
    """

    settings: dict[str, Any]
    task: str = "prompt_response"
    differences: list[str] = field(default_factory=list)
    start: str = "grpo-rl train"

    def differs(self, name: str, value: Any, why: str = "another meaning here, see docs/from_trl.md") -> None:
        """Adds a difference, one line without secrets."""
        self.differences.append(f"{one_line(f'{name}={value!r}'):.99}: {one_line(why)}")

    def as_yaml(self, source: str) -> str:
        """The config as a file for ``--config-dir . --config-name NAME``, the differences as its first comment.

        Raises:
            ValueError: a setting has a value that no run takes, or the file would be read otherwise.
        """
        if "${" in str(self.settings):
            raise ValueError(f"{source} has ${{ in a text, which Hydra would resolve; take it out")
        config = OmegaConf.create({"defaults": ["grpo", {"env": self.task}, "_self_"]})
        known = declarations(None)
        for key, value in self.settings.items():
            if key in known:
                known[key].check(key, value)
            OmegaConf.update(config, key, value, force_add=True)
        lines = [f"Converted from TRL's {one_line(source)} by grpo-rl from-trl. Differences:"]
        lines += [f"  {line}" for line in self.differences or ["none"]]
        text = "".join(f"# {line}\n" for line in lines) + OmegaConf.to_yaml(config)
        if OmegaConf.create(text) != config:
            raise ValueError(f"{source} has a text that YAML does not give back; take it out")
        return text


def convert(
    given: Mapping[str, Any], *, processes: int | None = None, rows: int | None = None, rewards: Sequence[str] = ()
) -> Converted:
    """The config here that trains as TRL would with these fields, and what differs.

    Args:
        processes: TRL's training processes; None: its ``num_processes`` field, else 1.
        rows: rows of the training data, for ``num_train_epochs``.
        rewards: names of rewards, or ``module:function``, instead of ``reward_funcs``, of which names alone are taken.

    Raises:
        ValueError: batch sizes that TRL refuses too, fp16, a loss that is not here, or a value of another type.

    >>> made = convert({"learning_rate": 2e-6, "max_steps": 10, "num_generations": 4, "repetition_penalty": 1.1})
    >>> made.settings["optimizer.lr"], made.settings["train.total_dialog_turns"], made.differences[-1]
    (2e-06, 80, 'repetition_penalty=1.1: not taken over, see docs/from_trl.md')
    """
    named = {name: value for name, value in given.items() if name not in RENAMED}
    # With warmup_ratio: 0.1 and warmup_steps: 0, a tenth of the steps warm up, whichever comes last.
    named |= {new: named.get(new) or given[old] for old, new in RENAMED.items() if old in given}
    fields = {**DEFAULTS, **{name: value for name, value in named.items() if value is not None}}
    # A null of these two turns off what our tasks may have.
    taken = {*fields, *({"chat_template", "system_prompt"} & named.keys())}
    made = Converted({setting: fields.get(name) for name, setting in SAME.items() if name in taken})
    known = {*SAME}

    def get(name: str, default: Any = None) -> Any:
        known.add(name)
        return fields.get(name, default)

    processes = processes or get("num_processes", 1)
    try:
        _convert_run(made, get, processes, rows)
        _convert_loss(made, get)
        _convert_model(made, get, processes)
        _convert_task(made, get, rewards)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"a value is unknown, of another type or too large: {error}") from None
    for name, value in named.items():
        if name in DIFFERENT and value not in (None, False, 0, "no"):
            made.differs(name, value)
        if name not in known and not name.startswith(UNNEEDED) and value not in (None, NO_EFFECT.get(name)):
            near = "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(name, known, 1, 0.9))
            made.differs(name, value, f"not taken over, see docs/from_trl.md{near}")
    return made


def _convert_run(made: Converted, get: Callable, processes: int, rows: int | None) -> None:
    """Converts the sizes of batches, and what is counted in steps: warm-up, checkpoints and evaluations."""
    group, iterations, epochs = get("num_generations"), get("num_iterations", 1), get("num_train_epochs", 3.0)
    forward, accumulated = get("per_device_train_batch_size", 8) * processes, get("gradient_accumulation_steps", 1)
    batch = forward * accumulated
    sampled = get("generation_batch_size", forward * get("steps_per_generation", accumulated))
    if sampled % group or batch % group:
        raise ValueError(
            f"a generation batch of {sampled} and an optimizer step of {batch} responses ({processes} processes) don't "
            f"divide into groups of {group}; give TRL's number of training processes as --processes N"
        )
    if (steps := get("max_steps", -1)) > 0:
        responses = steps * batch // iterations
    elif rows:
        responses = int(rows * group * epochs)
        steps = responses * iterations // batch
    else:
        raise ValueError("num_train_epochs counts rows; give their number in the training data as --rows N")

    def every(number: float) -> int:
        """A number of steps; below 1 it is a share of all steps."""
        return math.ceil(number * steps) if number < 1 else int(number)

    made.settings |= {
        "env.num_envs": max(sampled, batch) // group,
        "train.optim_batch_size": batch,
        "train.total_dialog_turns": responses,
        "train.keep_checkpoints": get("save_total_limit", 0),
        "optimizer.warmup_steps": every(get("warmup_steps", 0)),
    }
    if (strategy := get("save_strategy", "steps")) in ("steps", "no"):
        made.settings["train.checkpoint_frequency"] = every(get("save_steps", 500)) if strategy == "steps" else 0
    else:
        made.differs("save_strategy", strategy, "set train.checkpoint_frequency, in steps")
    if get("eval_strategy") not in (None, False, "no"):  # YAML's bare no is false
        made.settings["evaluate.frequency"] = every(get("eval_steps") or get("logging_steps", 10))  # as TRL has it
        made.settings["env.eval_split"] = get("dataset_test_split", "test")


def _convert_loss(made: Converted, get: Callable) -> None:
    """Converts the loss, its correction for the sampler's log-probs, the reference and the optimizer."""
    kind, high = get("loss_type", "dapo"), get("epsilon_high", get("epsilon", 0.2))
    if kind not in LOSS_TYPES:
        raise ValueError(f"loss_type is {kind!r}; those with a counterpart are {', '.join(LOSS_TYPES)}")
    loss = {
        "clip_high": high,
        "advantage": ADVANTAGES[str(get("scale_rewards", "group"))],
        "kl": "k3_is" if get("use_bias_correction_kl", True) else "k3",
        "correction": "none",
        **LOSS_TYPES[kind],
        **AGGREGATIONS[get("multi_objective_aggregation", "sum_then_normalize")],
    }
    if kind == "cispo":  # TRL caps the ratio at epsilon_high itself
        loss["clip_high"] = max(high - 1, 0.0)
    if kind in ("bnpo", "cispo"):
        made.differs("loss_type", kind)
    # TRL without vLLM samples with the trainer's own model; here a sampler always has log-probs of its own.
    if get("vllm_importance_sampling_correction", True) and get("use_vllm"):
        level, _, correction = get("vllm_importance_sampling_mode", "sequence_mask").partition("_")
        loss |= {"correction": correction, "correction_level": level}
        loss["correction_low"] = get("vllm_importance_sampling_clip_min", 0.0)
        loss["correction_high"] = get("vllm_importance_sampling_clip_max", 3.0)
    made.settings |= {f"loss.{name}": value for name, value in loss.items()}
    if get("sync_ref_model"):
        made.settings["ref_model.refresh"] = "steps"
        made.settings["ref_model.refresh_steps"] = get("ref_model_sync_steps", 512)
    optimizer, schedule = get("optim", "adamw_torch"), get("lr_scheduler_type", "linear")
    if optimizer != "sgd" and not optimizer.startswith("adamw_torch"):
        made.differs("optim", optimizer, "AdamW with fp32 state is used")
    least, lr = get("lr_scheduler_kwargs", {}), get("learning_rate")
    if least.keys() - {"min_lr", "min_lr_rate"}:
        made.differs("lr_scheduler_kwargs", least)
    made.settings |= {
        "optimizer.name": "sgd" if optimizer == "sgd" else "adamw",
        "optimizer.betas": [get("adam_beta1", 0.9), get("adam_beta2", 0.999)],
        "optimizer.schedule": SCHEDULES.get(schedule, schedule),
        "optimizer.min_lr_fraction": least["min_lr"] / lr if "min_lr" in least else least.get("min_lr_rate", 0.0),
        "optimizer.clip_grad_norm": get("max_grad_norm", 1.0) or 1e9,  # 0 is none: no gradient meets 1e9
    }


def _convert_model(made: Converted, get: Callable, processes: int) -> None:
    """Converts the model's type, lengths and adapters, and gives processes and engines their devices."""
    default = "float32" if get("bf16") is False else "bfloat16"  # without autocast, TRL computes in float32
    dtype = get("dtype", "auto")
    if get("fp16") or dtype == "float16":
        raise ValueError("fp16 is not trained here: its gradients overflow without a loss scale; set bf16 in TRL's")
    length = get("vllm_max_model_length", get("max_prompt_length", 512) + get("max_completion_length"))
    made.settings |= {
        "train_model.dtype": default if dtype == "auto" else dtype,
        "sampling.top_k": max(get("top_k", 0), 0),  # -1: all, in vLLM
        "inference_model.max_model_len": length,
        "train.micro_batch_tokens": max(8192, length),  # a micro-batch holds at least one response
    }
    if get("use_peft"):
        lora = {"rank": get("lora_r", 16), "alpha": get("lora_alpha", 32), "dropout": get("lora_dropout", 0.05)}
        made.settings["train_model.lora"] = lora | {"targets": get("lora_target_modules", "all-linear")}
    if get("load_in_4bit"):
        made.settings["train_model.quantization"] = get("bnb_4bit_quant_type", "nf4")
    served, size = get("vllm_mode") == "server" and get("use_vllm"), get("vllm_tensor_parallel_size", 1)
    sharded = get("fsdp")
    if processes == 1 and not served:
        return
    # vLLM next to several trainers has devices of its own here: half of theirs.
    train = processes if served else max(processes // 2 // size * size, 1)
    inference = size if served else max((processes - train) // size * size, size)
    made.settings |= {"train_model.num_devices": train, "inference_model.num_devices": inference}
    made.settings["train.max_staleness"] = 0
    made.start = "grpo-rl train --async"
    if train > 1:
        made.settings["train_model.parallel"] = "fsdp" if sharded else "ddp"
        made.start = f"torchrun --nproc-per-node {train} -m grpo_rl.sota.grpo_async"
    why = f"{train} devices train and {inference} sample, in turns; train.max_staleness=1 or more lets them overlap"
    made.differs("num_processes", processes, why)


def _convert_task(made: Converted, get: Callable, given: Sequence[str]) -> None:
    """Names data, rewards and loggers. No function is imported that the config names, and not the command line."""

    def listed(name: str) -> list[Any]:
        return [value] if isinstance(value := get(name, []), str) else value

    loggers, rewards = listed("report_to"), given or listed("reward_funcs")
    if {*loggers} - {*BUILT_IN, "none"}:
        made.differs("report_to", loggers, f"loggers are {', '.join(BUILT_IN)}; metrics.jsonl is always written")
    made.settings["logger.backend"] = [name for name in loggers if name in BUILT_IN] or "none"
    subset = get("dataset_config", next(iter(listed("dataset_configs")), None))
    data = {"env.path": get("dataset_name"), "env.subset": subset, "env.split": get("dataset_train_split")}
    of_itself = {"env.subset": "default", "env.split": "train"}
    made.settings |= {key: value for key, value in data.items() if value and value != of_itself.get(key)}
    named: dict[str, Any] = {}
    functions: dict[str, float] = {}
    for name, weight in zip(rewards, [*map(float, get("reward_weights", ())), *[1.0] * len(rewards)], strict=False):
        if name in ACCURACY:
            made.task = "math"
            made.settings |= {"env.reward.correctness": weight, "env.reward.answer_format": 0.0}
            made.differs("reward_funcs", name, "the task math: math-verify on the last \\boxed{} of the response")
        elif name in REWARDS:
            named[name] = weight
        elif name in given and ":" in name:
            functions[name] = weight
        else:
            made.differs("reward_funcs", name, "left out; name it in env.rewards, or give --rewards module:function")
    if named:
        made.settings["env.rewards"] = named
    if made.task != "math":
        made.settings["env.reward"] = functions or (None if named else "???")
    elif functions:
        made.differs("reward_funcs", [*functions], "the task math takes rewards by name; use prompt_response for these")
    if not rewards:
        made.differs("reward_funcs", None, "none is known; give --rewards module:function")
