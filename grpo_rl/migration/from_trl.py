"""The conversion of a GRPO config of TRL: the config that trains as it does, and every difference by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_rl.migration.converted import Converted
from grpo_rl.migration.trl_fields import (
    ACCURACY,
    ADVANTAGES,
    BOUNDS,
    CHOICES,
    CONVERTED,
    DATASETS,
    DEFAULTS,
    LISTS,
    LOSS_TYPES,
    MAPPINGS,
    NO_EFFECT,
    NUMBERS,
    RENAMED,
    REWARDS,
    SCHEDULES,
    UNNEEDED,
)
from grpo_rl.monitor.logger_names import BUILT_IN
from grpo_rl.settings.other_names import SAME


def convert(
    given: Mapping[str, Any],
    *,
    processes: int | None = None,
    rows: int | None = None,
    rewards: Sequence[str] = (),
) -> Converted:
    """The config here that trains as TRL would with these fields, and what differs.

    Args:
        processes: TRL's training processes; None: its ``num_processes`` field, else 1.
        rows: rows of the training data, for ``num_train_epochs``.
        rewards: names of rewards, or ``module:function``, instead of ``reward_funcs``, of which names alone are taken.

    Raises:
        ValueError: batch sizes that TRL refuses too, fp16, a loss that is not here, or a value of another type.

    >>> made = convert({"learning_rate": 2e-6, "max_steps": 10, "num_generations": 4, "repetition_penalty": 1.1})
    >>> made.config["optimizer"]["lr"], made.config["train"]["total_dialog_turns"], made.differences[0]
    (2e-06, 80, 'repetition_penalty=1.1: not taken over, see docs/from_trl.md')
    """
    made = Converted()
    # With warmup_ratio: 0.1 and warmup_steps: 0, a tenth of the steps warm up, whichever comes last.
    given = {name: _of_type(name, value) for name, value in given.items()}
    named = {name: value for name, value in given.items() if name not in RENAMED}
    named |= {RENAMED[name]: value for name, value in given.items() if name in RENAMED and not named.get(RENAMED[name])}
    fields = DEFAULTS | {name: value for name, value in named.items() if value is not None}
    known = [*SAME, *CONVERTED]
    for name, value in named.items():
        if name not in known and not name.startswith(UNNEEDED) and value not in (None, NO_EFFECT.get(name)):
            near = "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(name, known, 1, 0.9))
            made.differs(name, value, f"not taken over, see docs/from_trl.md{near}")
    nulls = {name: None for name in ("chat_template", "system_prompt") if name in named}  # which our tasks may have
    for name, value in (nulls | fields).items():
        if name in SAME:
            section, _, setting = SAME[name].rpartition(".")
            made.put(section, **{setting: value})
    _convert_loss(made, fields)
    _convert_batches(made, fields, processes, rows)
    _convert_optimizer(made, fields)
    _convert_model(made, fields)
    _convert_run(made, fields)
    _convert_task(made, fields, rewards)
    return made


def _of_type(name: str, value: Any) -> Any:
    """The value as Python makes TRL's type of it: YAML reads 1e-6, which has no point, as a text."""
    field = RENAMED.get(name, name)
    if value is None:
        return None
    try:
        if field in LISTS:
            return [LISTS[field](item) for item in ([value] if isinstance(value, str) else value)]
        if field in MAPPINGS:
            return dict(value)
        if field not in NUMBERS and type(DEFAULTS.get(field)) not in (int, float):
            return value
        number = value if isinstance(value, int) else float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r:.80}: {error}") from None
    # Beyond 1e15 a float can't hold every integer.
    if not abs(number) < 10**15 and not (field in BOUNDS and number == math.inf):
        raise ValueError(f"{name} is {number!r:.20}; it must be a number below 1e15")
    return number


def _convert_loss(made: Converted, fields: Mapping[str, Any]) -> None:
    for name, values in CHOICES.items():
        if str(fields[name]) not in values:
            raise ValueError(f"{name} is {fields[name]!r}; those with a counterpart are {', '.join(map(str, values))}")
    kind = fields["loss_type"]
    high = fields.get("epsilon_high", fields["epsilon"])
    several = fields["multi_objective_aggregation"] == "normalize_then_sum"
    made.put(
        "loss",
        **LOSS_TYPES[kind],
        ratio=fields["importance_sampling_level"],
        advantage="multi_reward" if several else ADVANTAGES[str(fields["scale_rewards"])],
        kl="k3_is" if fields["use_bias_correction_kl"] else "k3",
        clip_high=high,
    )
    if kind == "cispo":
        # TRL caps the ratio at epsilon_high itself, and has no lower bound.
        made.put("loss", clip_low=1.0, clip_high=max(high - 1, 0.0))
        if high < 1:
            made.differs("epsilon_high", high, "TRL's cispo caps every ratio at it, below 1; the cap is 1 here")
    level, _, how = fields["vllm_importance_sampling_mode"].partition("_")
    low, most = fields.get("vllm_importance_sampling_clip_min", 0.0), fields["vllm_importance_sampling_clip_max"]
    # TRL without vLLM samples with the trainer's own model; here a sampler always has log-probs of its own.
    if fields["vllm_importance_sampling_correction"] and fields["use_vllm"]:
        made.put("loss", correction=how, correction_level=level, correction_low=low, correction_high=most)
        if how == "truncate" and low:
            made.differs("vllm_importance_sampling_clip_min", low, "truncation has an upper bound alone here")
    else:
        made.put("loss", correction="none")
    if fields.get("sync_ref_model"):
        made.put("ref_model", refresh="steps", refresh_steps=fields.get("ref_model_sync_steps", 512))
        if (alpha := fields.get("ref_model_mixup_alpha", 0.6)) != 1:
            made.differs("ref_model_mixup_alpha", alpha, "the reference becomes a whole copy of the policy here")


def _convert_batches(made: Converted, fields: Mapping[str, Any], processes: int | None, rows: int | None) -> None:
    ranks = processes or int(fields.get("num_processes", 1))
    counts = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations")
    optional = ("generation_batch_size", "num_processes", "steps_per_generation", "vllm_tensor_parallel_size")
    if low := [name for name in counts + optional if fields.get(name, 1) < 1]:
        raise ValueError(f"{low[0]} is {fields[low[0]]}; it must be at least 1")
    per_device, accumulated, group, iterations = (int(fields[name]) for name in counts)
    optim_batch = per_device * ranks * accumulated
    sampled = fields.get("generation_batch_size") or per_device * ranks * int(
        fields.get("steps_per_generation") or accumulated
    )
    collection = int(sampled)
    if collection % group or optim_batch % group:
        raise ValueError(
            f"a generation batch of {collection} and an optimizer step of {optim_batch} responses "
            f"({per_device} per device x {ranks} processes x {accumulated} accumulated) don't divide into "
            f"groups of {group}; give TRL's number of training processes as --processes N"
        )
    _name_means(made, fields, accumulated * ranks, collection, optim_batch)
    if collection < optim_batch:
        # There one optimizer step spans several generation batches; here a collection is at least one step.
        why = f"{collection} responses are sampled at a time for steps of {optim_batch}; here {optim_batch} are"
        made.differs("steps_per_generation", fields.get("steps_per_generation"), why)
    made.put("env", num_envs=max(collection, optim_batch) // group)
    made.put("train", optim_batch_size=optim_batch)
    _divide_devices(made, fields, ranks)
    steps = max(int(fields["max_steps"]), 0)
    if steps:
        made.put("train", total_dialog_turns=steps * optim_batch // iterations)
    elif rows:
        responses = int(rows * group * float(fields["num_train_epochs"]))
        made.put("train", total_dialog_turns=responses)
        steps = responses * iterations // optim_batch
    else:
        why = f"give --rows N, or set train.total_dialog_turns = rows x {group} x epochs; it is left at its default"
        made.differs("num_train_epochs", fields["num_train_epochs"], why)
    warmup = float(fields["warmup_steps"])
    if warmup >= 1 or (warmup and steps):
        why = "TRL's warm-up begins at a learning rate of 0; here each of its steps has that of TRL's next step"
        made.differs("warmup_steps", warmup, why)
    elif warmup:
        made.differs("warmup_steps", warmup, "a share of steps whose number isn't known; optimizer.warmup_steps is 0")
    made.put("optimizer", warmup_steps=math.ceil(warmup * steps) if warmup < 1 else int(warmup))
    if fields["save_strategy"] == "steps":
        made.put("train", checkpoint_frequency=_every(made, "save_steps", fields["save_steps"], steps))
    if fields.get("eval_strategy", "no") != "no":
        every = fields.get("eval_steps") or fields.get("logging_steps", 10)  # as transformers and TRL have it
        made.put("evaluate", frequency=_every(made, "eval_steps", every, steps))


def _name_means(made: Converted, fields: Mapping[str, Any], passes: int, collection: int, optim_batch: int) -> None:
    """Names the means that TRL takes over other tokens than we do: here they are of the whole optimizer step."""
    kind, coef = fields["loss_type"], fields["entropy_coef"]
    if kind == "bnpo" and passes > 1:
        why = f"TRL's mean is over each of {passes} passes' tokens, here over all of the step"
        made.differs("loss_type", kind, why)
    if kind in ("dapo", "cispo") and collection != optim_batch:
        share = f"{optim_batch / collection:g} of the tokens of all {collection} responses that it samples at a time"
        made.differs("loss_type", kind, f"TRL divides by {share}, here by those of the step")
    whole = passes == 1 and LOSS_TYPES[kind]["aggregate"] == "token_mean" and fields.get("top_entropy_quantile", 1) == 1
    if coef and not whole:
        why = "TRL's bonus is the mean over the tokens of a pass that have a policy gradient; here over all tokens"
        made.differs("entropy_coef", coef, f"{why}, as loss.aggregate has it")


def _every(made: Converted, name: str, every: float, steps: int) -> int:
    """Steps between two of something; below 1 it is a share of all steps."""
    if every >= 1 or not every:
        return int(every)
    if not steps:
        made.differs(name, every, "a share of steps whose number isn't known; 100 steps are used")
    return max(round(every * steps), 1) if steps else 100


def _divide_devices(made: Converted, fields: Mapping[str, Any], ranks: int) -> None:
    """Gives processes and engines their devices; vLLM beside several trainers has some of its own (async mode)."""
    size = int(fields.get("vllm_tensor_parallel_size") or 1)
    served = bool(fields["use_vllm"]) and fields["vllm_mode"] == "server"
    if ranks == 1 and not served:
        return
    train, inference = (ranks, size) if served else (max(ranks // 2 // size * size, 1), 0)
    inference = inference or max((ranks - train) // size * size, size)
    made.put("train_model", num_devices=train)
    made.put("inference_model", num_devices=inference)
    made.put("train", max_staleness=0)
    made.start = "grpo-rl train --async"
    if train > 1:
        made.put("train_model", parallel="fsdp" if fields.get("fsdp") else "ddp")
        made.start = f"torchrun --nproc-per-node {train} -m grpo_rl.sota.grpo_async"
    why = f"{train} devices train and {inference} sample (sota/grpo_async.py), in turns"
    made.differs("num_processes", ranks, f"{why}: train.max_staleness=1 or more lets them overlap")


def _convert_optimizer(made: Converted, fields: Mapping[str, Any]) -> None:
    name, schedule = str(fields.get("optim", "adamw_torch")), str(fields["lr_scheduler_type"])
    made.put(
        "optimizer",
        betas=[fields["adam_beta1"], fields["adam_beta2"]],
        name="sgd" if name == "sgd" else "adamw",
        schedule=SCHEDULES.get(schedule, "constant"),
    )
    if not fields["max_grad_norm"]:
        made.put("optimizer", clip_grad_norm=1e9)
        made.differs("max_grad_norm", 0, "there is always a clip here; it is 1e9, which no gradient meets")
    if name != "sgd" and not name.startswith("adamw_torch"):
        made.differs("optim", name, "AdamW with fp32 state is used")
    if schedule not in SCHEDULES:
        made.differs("lr_scheduler_type", schedule, "constant is used; here are linear, cosine, constant")
    given = fields.get("lr_scheduler_kwargs", {})
    least, share = (_of_type(f"lr_scheduler_kwargs.{name}", given.get(name) or 0) for name in ("min_lr", "min_lr_rate"))
    if share := share or least / (fields["learning_rate"] or 1):
        made.put("optimizer", min_lr_fraction=share)
    for name in sorted({*given} - {"min_lr_rate", "min_lr"}, key=str):
        made.differs("lr_scheduler_kwargs", {name: given[name]}, "schedules have optimizer.min_lr_fraction alone here")


def _convert_model(made: Converted, fields: Mapping[str, Any]) -> None:
    given = fields.get("model_init_kwargs", {})
    default = "float32" if fields.get("bf16") is False else "bfloat16"  # without autocast, TRL computes in float32
    dtype = str(given.get("dtype") or given.get("torch_dtype") or fields.get("dtype") or default).removeprefix("torch.")
    if fields.get("fp16") or dtype == "float16":
        raise ValueError("fp16 is not trained here: its gradients overflow without a loss scale; set bf16 in TRL's")
    known = dtype in ("bfloat16", "float32")
    made.put("train_model", dtype=dtype if known else default)
    if not known:
        made.differs("dtype", dtype, f"{default} is used; train_model.dtype is bfloat16 or float32")
    for name in sorted({*given} - {"dtype", "torch_dtype"}, key=str):
        made.differs("model_init_kwargs", {name: given[name]}, "models are loaded by model.name alone")
    if fields.get("use_peft"):
        made.put(
            "train_model.lora",
            rank=fields.get("lora_r", 16),
            alpha=fields.get("lora_alpha", 32),
            dropout=fields.get("lora_dropout", 0.05),
            targets=fields.get("lora_target_modules") or "all-linear",
        )
        if not fields.get("lora_target_modules"):
            why = "peft's own choice by the type of model, such as q_proj and v_proj; here all-linear"
            made.differs("lora_target_modules", None, why)
    if fields.get("load_in_4bit"):
        made.put("train_model", quantization=fields.get("bnb_4bit_quant_type", "nf4"))
    elif fields.get("load_in_8bit"):
        made.differs("load_in_8bit", True, "int8 is for CPUs here; load_in_4bit is train_model.quantization=nf4")
    if fields.get("use_liger_kernel"):
        made.differs("use_liger_kernel", True, "train_model.head=liger, with liger-kernel[cutedsl], on Hopper")
    made.put("sampling", top_k=max(int(fields["top_k"] or 0), 0))  # -1: all, in vLLM
    if fields.get("min_p"):
        made.put("sampling", min_p=fields["min_p"])
    both = fields.get("max_prompt_length", 512) + fields["max_completion_length"]
    length = int(fields.get("vllm_max_model_length") or both)
    made.put("inference_model", max_model_len=length)
    made.put("train", micro_batch_tokens=max(8192, length))  # a micro-batch holds at least one response


def _convert_run(made: Converted, fields: Mapping[str, Any]) -> None:
    if fields["save_strategy"] == "no":
        made.put("train", checkpoint_frequency=0)
    elif fields["save_strategy"] != "steps":
        made.differs("save_strategy", fields["save_strategy"], "set train.checkpoint_frequency, in steps")
    made.put("train", keep_checkpoints=fields.get("save_total_limit") or 0)
    if fields.get("eval_strategy", "no") != "no":
        made.differs("eval_strategy", fields["eval_strategy"], "choose how many rows: evaluate.rows=200")
    names = fields.get("report_to", [])
    made.put("logger", backend=[name for name in names if name in BUILT_IN] or "none")
    for other in sorted({*names} - {*BUILT_IN, "none"}):
        made.differs("report_to", other, f"loggers are {', '.join(BUILT_IN)}; metrics.jsonl is always written")
    if fields.get("load_best_model_at_end"):
        made.differs("load_best_model_at_end", True, "evaluate.keep_best=true, with evaluate.rows")
    if "project" in fields:
        made.put("logger", project=fields["project"])
    if path := fields.get("resume_from_checkpoint"):
        made.differs("resume_from_checkpoint", path, "TRL's can't be resumed; give its model folder as model.name")


def _convert_task(made: Converted, fields: Mapping[str, Any], given: Sequence[str]) -> None:
    """Names rewards and data; functions that the config names, and not the command line, are imported by no one."""
    path, rewards = str(fields.get("dataset_name") or ""), [*given] or fields.get("reward_funcs", [])
    weights = fields.get("reward_weights", [])
    weights = weights + [1.0] * (len(rewards) - len(weights))
    if path in DATASETS and not rewards:
        made.task = DATASETS[path]
        made.differs("dataset_name", path, f"the task {made.task} with its own rewards")
        return
    if path:
        made.put("env", path=path)
    subsets = fields.get("dataset_configs", [])
    subset = fields.get("dataset_config") or next(iter(subsets), None)
    if len(subsets) > 1:
        made.differs("dataset_configs", subsets, f"one subset is read, {subset}")
    for key, value in (("subset", subset), ("split", fields.get("dataset_train_split"))):
        if value not in (None, "default", "train"):
            made.put("env", **{key: value})
    if fields.get("eval_strategy", "no") != "no":
        made.put("env", eval_split=fields.get("dataset_test_split", "test"))
    named: dict[str, Any] = {}
    functions: dict[str, float] = {}
    for name, weight in zip(rewards, weights, strict=False):
        if name in ACCURACY:
            made.task = "math"
            made.put("env.reward", correctness=weight, answer_format=0.0)
            made.differs("reward_funcs", name, "the task math: math-verify on the last \\boxed{} of the response")
        elif name in REWARDS:
            named[REWARDS[name]] = weight
            if REWARDS[name] == "soft_overlong_punishment":
                named[REWARDS[name]] = {
                    "weight": weight,
                    "max_len": fields.get("max_completion_len", fields["max_completion_length"]),
                    "cache": fields.get("soft_punish_cache", 256),
                }
        elif name in given and ("." in name or ":" in name):
            module, _, function = name.replace(":", ".").rpartition(".")
            functions[f"{module}:{function}"] = weight
        else:
            made.differs("reward_funcs", name, "not here; give a function of yours, --rewards module:function")
    if named:
        made.put("env", rewards=named)
    if made.task == "math" and (column := fields.get("dataset_prompt_column")):
        made.put("env", columns={"problem": column})
    if made.task != "math":
        if column := fields.get("dataset_prompt_column"):
            made.put("env", prompt_column=column)
        made.put("env", reward=functions or None)
        if not functions and not named:
            made.put("env", reward="???")
            made.differs("reward_funcs", rewards or None, "none is known; give --rewards module:function")
    elif functions:
        made.differs("reward_funcs", [*functions], "the task math takes rewards by name; use prompt_response for these")
