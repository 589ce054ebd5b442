"""The conversion of a GRPO config of TRL: the config that trains as it does, and every difference by name."""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from grpo_rl.loggers.base import BUILT_IN
from grpo_rl.migration import trl_fields as trl
from grpo_rl.settings.schema import SAME
from grpo_rl.storage.masking import shown


@dataclass
class Converted:
    """A config of ours, and how it differs from TRL's.

    Args:
        fields: TRL's, with its defaults; ``made[name]`` is one of them, or None.
        config: nested settings; only what is not left to the defaults of config/grpo.yaml.
        task: the value of ``env.dataset``.
        differences: a line each for what has no counterpart, or another meaning; begins with TRL's field.
        start: the command that trains with this config, without its options.
    """

    fields: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    task: str = "prompt_response"
    differences: list[str] = field(default_factory=list)
    start: str = "grpo-rl train"

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name)

    def get(self, name: str, default: Any) -> Any:
        return self.fields.get(name, default)

    @property
    def evaluates(self) -> bool:
        return self.get("eval_strategy", "no") != "no"

    def put(self, values: Mapping[str, Any]) -> None:
        """Gives settings, by their dotted names, these values."""
        for key, value in values.items():
            *sections, name = key.split(".")
            place = self.config
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value

    def differs(self, name: str, why: str, value: Any = ...) -> None:
        """Adds a difference: one line without secrets, and without escape sequences."""
        text = f"{self[name] if value is ... else value!r}"
        text = shown(f"{name}={text if len(text) <= 60 else text[:57] + '...'}")
        self.differences.append(" ".join(f"{text}: {shown(why)}".split()))

    def as_yaml(self, source: str) -> str:
        """The config as a file for ``--config-dir . --config-name NAME``, the differences as its first comment.

        Raises:
            ValueError: a text of it would be resolved by Hydra, or a value is none of YAML's.
        """
        parts = ({"defaults": ["grpo", {"env": self.task}, "_self_"]}, self.config)
        try:
            settings = "".join(yaml.safe_dump(part, sort_keys=False, allow_unicode=True, width=110) for part in parts)
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"{source}: {error}") from None
        if "${" in str(self.config):
            raise ValueError(f"{source} has ${{ in a text, which Hydra would resolve; take it out")
        lines = [f"Converted from TRL's {source} by grpo-rl from-trl. Differences:"]
        lines += [f"  {line}" for line in self.differences or ["none"]]
        # They quote untrusted text: a line break would end the comment.
        comment = "".join(f"# {''.join(c if c.isprintable() else ' ' for c in line)}\n" for line in lines)
        return comment + settings


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
    >>> made.config["optimizer"]["lr"], made.config["train"]["total_dialog_turns"], made.differences[0]
    (2e-06, 80, 'repetition_penalty=1.1: not taken over, see docs/from_trl.md')
    """
    # With warmup_ratio: 0.1 and warmup_steps: 0, a tenth of the steps warm up, whichever comes last.
    given = {name: _of_type(name, value) for name, value in given.items()}
    named = {name: value for name, value in given.items() if name not in trl.RENAMED}
    for name, today in trl.RENAMED.items():
        if name in given:
            named[today] = named.get(today) or given[name]
    made = Converted(trl.DEFAULTS | {name: value for name, value in named.items() if value is not None})
    known = [*SAME, *trl.CONVERTED]
    for name, value in named.items():
        if name not in known and not name.startswith(trl.UNNEEDED) and value not in (None, trl.NO_EFFECT.get(name)):
            near = "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(name, known, 1, 0.9))
            made.differs(name, f"not taken over, see docs/from_trl.md{near}", value)
    for name, values in trl.CHOICES.items():
        if str(value := made.fields[name]) not in values:
            raise ValueError(f"{name} is {value!r}; those with a counterpart are {', '.join(map(str, values))}")
    nulls = {name for name in ("chat_template", "system_prompt") if name in named}  # which our tasks may have
    made.put({setting: made[name] for name, setting in SAME.items() if name in {*nulls, *made.fields}})
    ranks, steps = _convert_batches(made, processes, rows)
    _convert_loss(made)
    _convert_steps(made, steps)
    _convert_model(made)
    _divide_devices(made, ranks)
    _convert_task(made, rewards)
    for name, why in trl.BY_HAND.items():
        if made[name]:
            made.differs(name, why)
    for name, taken in trl.MAPPINGS.items():
        for key, value in (made[name] or {}).items():
            if key not in taken:
                made.differs(name, f"{' and '.join(taken)} alone have a counterpart", {key: value})
    return made


def _of_type(name: str, value: Any) -> Any:
    """The value as Python makes TRL's type of it: YAML reads 1e-6, which has no point, as a text."""
    field = trl.RENAMED.get(name, name)
    if value is None or field in trl.NUMBERS:
        return _number(name, value)
    try:
        if field in trl.LISTS:
            return [trl.LISTS[field](item) for item in ([value] if isinstance(value, str) else value)]
        value = dict(value) if field in trl.MAPPINGS else value
        if field == "chat_template_kwargs" and isinstance(value, str):
            value = json.loads(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r:.80}: {error}") from None
    if field == "lr_scheduler_kwargs":
        numbers = trl.MAPPINGS[field]
        return {key: _number(f"{name}.{key}", each) if key in numbers else each for key, each in value.items()}
    return value


def _number(name: str, value: Any) -> float | None:
    try:
        number = value if value is None or isinstance(value, int) else float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r:.80}: {error}") from None
    # Beyond 1e15 a float can't hold every integer.
    if number is not None and not abs(number) < 10**15 and not (name in trl.BOUNDS and number == math.inf):
        raise ValueError(f"{name} is {number!r:.20}; it must be a number below 1e15")
    return number


def _convert_batches(made: Converted, processes: int | None, rows: int | None) -> tuple[int, int]:
    """Converts the sizes of batches; returns TRL's training processes and the steps of the run, 0 if not known."""
    for name in trl.COUNTS:
        if (value := made.get(name, 1)) < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    per_device, accumulated, group, iterations = (int(made[name]) for name in trl.COUNTS[:4])
    ranks = processes or int(made.get("num_processes", 1))
    batch = per_device * ranks * accumulated
    sampled = int(
        made["generation_batch_size"] or per_device * ranks * int(made["steps_per_generation"] or accumulated)
    )
    if sampled % group or batch % group:
        raise ValueError(
            f"a generation batch of {sampled} and an optimizer step of {batch} responses ({per_device} per device x "
            f"{ranks} processes x {accumulated} accumulated) don't divide into groups of {group}; give TRL's number of "
            "training processes as --processes N"
        )
    if sampled < batch:
        why = f"{sampled} responses are sampled at a time for steps of {batch}; here {batch} are"
        made.differs("steps_per_generation", why)
    made.put({"env.num_envs": max(sampled, batch) // group, "train.optim_batch_size": batch})
    if steps := max(int(made["max_steps"]), 0):
        made.put({"train.total_dialog_turns": steps * batch // iterations})
    elif rows:
        made.put({"train.total_dialog_turns": (responses := int(rows * group * made["num_train_epochs"]))})
        steps = responses * iterations // batch
    else:
        why = f"give --rows N, or set train.total_dialog_turns = rows x {group} x epochs; it is left at its default"
        made.differs("num_train_epochs", why)
    # TRL takes means over other tokens: here they are of the whole optimizer step.
    kind, passes = made["loss_type"], accumulated * ranks
    if kind == "bnpo" and passes > 1:
        made.differs("loss_type", f"TRL's mean is over each of {passes} passes' tokens, here over all of the step")
    if kind in ("dapo", "cispo") and sampled != batch:
        share = f"{batch / sampled:g} of the tokens of all {sampled} responses that it samples at a time"
        made.differs("loss_type", f"TRL divides by {share}, here by those of the step")
    whole = (
        passes == 1 and trl.LOSS_TYPES[kind]["aggregate"] == "token_mean" and made.get("top_entropy_quantile", 1) == 1
    )
    if (made["entropy_coef"] or made["use_adaptive_entropy"]) and not whole:
        why = "TRL's bonus is the mean over the tokens of a pass that have a policy gradient; here over all tokens"
        made.differs("entropy_coef", f"{why}, as loss.aggregate has it")
    return ranks, steps


def _convert_loss(made: Converted) -> None:
    several = made["multi_objective_aggregation"] == "normalize_then_sum"
    high = made.get("epsilon_high", made["epsilon"])
    made.put({f"loss.{name}": value for name, value in trl.LOSS_TYPES[made["loss_type"]].items()})
    made.put(
        {
            "loss.advantage": "multi_reward" if several else trl.ADVANTAGES[str(made["scale_rewards"])],
            "loss.kl": "k3_is" if made["use_bias_correction_kl"] else "k3",
            "loss.clip_high": high,
            "loss.correction": "none",
        }
    )
    if made["loss_type"] == "cispo":
        # TRL caps the ratio at epsilon_high itself, and has no lower bound.
        made.put({"loss.clip_low": 1.0, "loss.clip_high": max(high - 1, 0.0)})
        if high < 1:
            made.differs("epsilon_high", "TRL's cispo caps every ratio at it, below 1; the cap is 1 here", high)
    # TRL without vLLM samples with the trainer's own model; here a sampler always has log-probs of its own.
    if made["vllm_importance_sampling_correction"] and made["use_vllm"]:
        level, _, kind = made["vllm_importance_sampling_mode"].partition("_")
        low, most = made["vllm_importance_sampling_clip_min"] or 0.0, made["vllm_importance_sampling_clip_max"]
        made.put({"loss.correction": kind, "loss.correction_level": level})
        made.put({"loss.correction_low": low, "loss.correction_high": most})
        if kind == "truncate" and low:
            made.differs("vllm_importance_sampling_clip_min", "truncation has an upper bound alone here")
    if made["use_adaptive_entropy"]:
        made.put({"policy.target_entropy": made["entropy_target"]})
        made.put({f"policy.{name}": made[name] for name in ("entropy_coef_delta", "entropy_coef_max")})
        made.differs("use_adaptive_entropy", "TRL adapts after each optimizer step, here after each collection's")
        if made["entropy_coef_min"]:
            made.differs("entropy_coef_min", "the weight may fall to 0 here")
    if made["sync_ref_model"]:
        every = made.get("ref_model_sync_steps", 512)
        made.put({"ref_model.refresh": "steps", "ref_model.refresh_steps": every})
        if (alpha := made.get("ref_model_mixup_alpha", 0.6)) != 1:
            made.differs("ref_model_mixup_alpha", "the reference becomes a whole copy of the policy here", alpha)


def _convert_steps(made: Converted, steps: int) -> None:
    """Converts what follows the steps of the run: warm-up, decay, checkpoints and evaluations."""

    def every(name: str, number: float, unknown: int) -> int:
        """A number of steps; below 1 it is a share of all steps."""
        if 0 < number < 1 and not steps:
            made.differs(name, f"a share of steps whose number isn't known; {unknown} steps are used", number)
            return unknown
        return int(number) if number >= 1 or not number else max(math.ceil(number * steps), 1)

    if (warmup := made["warmup_steps"]) >= 1 or (warmup and steps):
        why = "TRL's warm-up begins at a learning rate of 0; here each of its steps has that of TRL's next step"
        made.differs("warmup_steps", why)
    schedule, least = str(made["lr_scheduler_type"]), made["lr_scheduler_kwargs"] or {}
    if schedule not in trl.SCHEDULES:
        made.differs("lr_scheduler_type", "constant is used; here are linear, cosine, constant")
    if share := least.get("min_lr_rate") or (least.get("min_lr") or 0) / (made["learning_rate"] or 1):
        made.put({"optimizer.min_lr_fraction": share})
    optimizer = str(made["optim"] or "adamw_torch")
    if optimizer != "sgd" and not optimizer.startswith("adamw_torch"):
        made.differs("optim", "AdamW with fp32 state is used")
    if not made["max_grad_norm"]:
        made.put({"optimizer.clip_grad_norm": 1e9})
        made.differs("max_grad_norm", "there is always a clip here; it is 1e9, which no gradient meets")
    made.put(
        {
            "optimizer.name": "sgd" if optimizer == "sgd" else "adamw",
            "optimizer.betas": [made["adam_beta1"], made["adam_beta2"]],
            "optimizer.schedule": trl.SCHEDULES.get(schedule, "constant"),
            "optimizer.warmup_steps": every("warmup_steps", warmup, 0),
            "train.keep_checkpoints": made["save_total_limit"] or 0,
        }
    )
    if made["save_strategy"] in ("steps", "no"):
        saves = made["save_strategy"] == "steps"
        made.put({"train.checkpoint_frequency": every("save_steps", made["save_steps"], 100) if saves else 0})
    else:
        made.differs("save_strategy", "set train.checkpoint_frequency, in steps")
    if made.evaluates:
        number = made["eval_steps"] or made.get("logging_steps", 10)  # as transformers and TRL have it
        made.put({"evaluate.frequency": every("eval_steps", number, 100)})
        made.differs("eval_strategy", "choose how many rows: evaluate.rows=200")
    loggers = made["report_to"] or ()
    made.put({"logger.backend": [name for name in loggers if name in BUILT_IN] or "none"})
    for other in sorted({*loggers} - {*BUILT_IN, "none"}):
        made.differs("report_to", f"loggers are {', '.join(BUILT_IN)}; metrics.jsonl is always written", other)


def _convert_model(made: Converted) -> None:
    given = made["model_init_kwargs"] or {}
    default = "float32" if made["bf16"] is False else "bfloat16"  # without autocast, TRL computes in float32
    dtype = str(given.get("dtype") or given.get("torch_dtype") or made["dtype"] or default).removeprefix("torch.")
    if made["fp16"] or dtype == "float16":
        raise ValueError("fp16 is not trained here: its gradients overflow without a loss scale; set bf16 in TRL's")
    if dtype not in ("bfloat16", "float32"):
        made.differs("dtype", f"{default} is used; train_model.dtype is bfloat16 or float32", dtype)
        dtype = default
    made.put({"train_model.dtype": dtype})
    if made["use_peft"]:
        targets = made["lora_target_modules"]
        lora = {name: made.get(f"lora_{field}", default) for name, (field, default) in trl.LORA.items()}
        lora |= {name: True for name in ("rslora", "dora") if made[f"use_{name}"]}
        made.put({"train_model.lora": lora | {"targets": targets or "all-linear"}})
        if not targets:
            why = "peft's own choice by the type of model, such as q_proj and v_proj; here all-linear"
            made.differs("lora_target_modules", why)
    if made["load_in_4bit"]:
        made.put({"train_model.quantization": made.get("bnb_4bit_quant_type", "nf4")})
    both = made.get("max_prompt_length", 512) + made["max_completion_length"]
    length = int(made["vllm_max_model_length"] or both)
    made.put({"sampling.top_k": max(int(made["top_k"]), 0)})  # -1: all, in vLLM
    # A micro-batch holds at least one response.
    made.put({"inference_model.max_model_len": length, "train.micro_batch_tokens": max(8192, length)})


def _divide_devices(made: Converted, ranks: int) -> None:
    """Gives processes and engines their devices; vLLM next to several trainers has some of its own (async mode)."""
    size = int(made.get("vllm_tensor_parallel_size", 1))
    served = made["use_vllm"] and made["vllm_mode"] == "server"
    if ranks == 1 and not served:
        return
    train = ranks if served else max(ranks // 2 // size * size, 1)
    inference = size if served else max((ranks - train) // size * size, size)
    made.put({"train_model.num_devices": train, "inference_model.num_devices": inference, "train.max_staleness": 0})
    made.start = "grpo-rl train --async"
    if train > 1:
        made.put({"train_model.parallel": "fsdp" if made["fsdp"] else "ddp"})
        made.start = f"torchrun --nproc-per-node {train} -m grpo_rl.sota.grpo_async"
    why = f"{train} devices train and {inference} sample (sota/grpo_async.py), in turns"
    made.differs("num_processes", f"{why}: train.max_staleness=1 or more lets them overlap", ranks)


def _convert_task(made: Converted, given: Sequence[str]) -> None:
    """Names rewards and data; functions that the config names, and not the command line, are imported by no one."""
    path, rewards = str(made["dataset_name"] or ""), [*given] or made["reward_funcs"] or []
    if path in trl.DATASETS and not rewards:
        made.task = trl.DATASETS[path]
        made.differs("dataset_name", f"the task {made.task} with its own rewards")
        return
    if path:
        made.put({"env.path": path})
    subset = made["dataset_config"] or next(iter(made["dataset_configs"] or ()), None)
    if len(made["dataset_configs"] or ()) > 1:
        made.differs("dataset_configs", f"one subset is read, {subset}")
    for key, value in (("subset", subset), ("split", made["dataset_train_split"])):
        if value not in (None, "", "default", "train"):
            made.put({f"env.{key}": value})
    if made.evaluates:
        made.put({"env.eval_split": made.get("dataset_test_split", "test")})
    weights = made["reward_weights"] or ()
    if rewards and weights and len(weights) != len(rewards):
        counts = f"reward_weights has {len(weights)} values, and rewards are {', '.join(rewards)}"
        raise ValueError(f"{counts}; give as many in --rewards")
    named: dict[str, Any] = {}
    functions: dict[str, float] = {}
    for name, weight in zip(rewards, weights or [1.0] * len(rewards), strict=False):
        if name in trl.ACCURACY:
            made.task = "math"
            made.put({"env.reward.correctness": weight, "env.reward.answer_format": 0.0})
            made.differs("reward_funcs", "the task math: math-verify on the last \\boxed{} of the response", name)
        elif name in trl.REWARDS:
            named[trl.REWARDS[name]] = weight
        elif name in given and ("." in name or ":" in name):
            functions[":".join(name.replace(":", ".").rsplit(".", 1))] = weight
        else:
            made.differs("reward_funcs", "not here; give a function of yours, --rewards module:function", name)
    if trl.OVERLONG in named:
        longest = made.get("max_completion_len", made["max_completion_length"])
        cache = made.get("soft_punish_cache", 256)
        named[trl.OVERLONG] = {"weight": named[trl.OVERLONG], "max_len": longest, "cache": cache}
    if named:
        made.put({"env.rewards": named})
    column = made["dataset_prompt_column"]
    if made.task == "math":
        if column:
            made.put({"env.columns": {"problem": column}})
        if functions:
            why = "the task math takes rewards by name; use prompt_response for these"
            made.differs("reward_funcs", why, [*functions])
        return
    if column:
        made.put({"env.prompt_column": column})
    made.put({"env.reward": functions or (None if named else "???")})
    if not functions and not named:
        made.differs("reward_funcs", "none is known; give --rewards module:function", rewards or None)
