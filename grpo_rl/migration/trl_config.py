"""Reads a GRPO config of TRL: a YAML or JSON file as ``trl grpo --config`` and Open-R1 take, or a Python script.

A script is parsed and never run: values that are no literals are named and left out.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_rl.migration.trl_fields import DEFAULTS, RENAMED
from grpo_rl.storage.yaml_text import read_yaml

SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""A number that YAML 1.1 reads as text, as it has no point or no sign."""

COUNTS = {
    "generation_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations", "num_processes",
    "per_device_train_batch_size", "steps_per_generation", "vllm_tensor_parallel_size",
}  # fmt: skip
"""Fields whose numbers are 1 or more."""
BOUNDS = {"epsilon", "epsilon_high", "max_grad_norm", "vllm_importance_sampling_clip_max"}
"""Fields that may be infinite, which is no bound."""
NUMBERS = {
    *COUNTS, "epsilon_high", "eval_steps", "logging_steps", "lora_alpha", "lora_dropout", "lora_r",
    "max_completion_len", "max_prompt_length", "min_p", "ref_model_mixup_alpha", "ref_model_sync_steps",
    "save_total_limit", "soft_punish_cache", "vllm_importance_sampling_clip_min", "vllm_max_model_length",
}  # fmt: skip
"""Fields that take a number, beside those whose default is one."""
LISTS = {"reward_funcs": str, "reward_weights": (int, float), "dataset_configs": str, "report_to": str}
"""Fields that take a list, and the type of its items."""
MAPPINGS = {"lr_scheduler_kwargs", "model_init_kwargs"}
"""Fields that take a mapping."""


def read_trl(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The fields of a TRL config, and a line for each value that can't be known without running the script.

    Raises:
        ValueError: there is no such file, it can't be parsed, or holds no config.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} can't be read ({error}); give TRL's YAML or JSON config, or a Python script"
        ) from None
    if path.suffix == ".py":
        return _read_script(path, text)
    try:
        fields = json.loads(text) if path.suffix == ".json" else read_yaml(text)
        # JSON can name halves of characters, which no file holds, and YAML has keys that JSON has not, such as dates.
        json.dumps(fields, default=str, ensure_ascii=False).encode()
    except (ValueError, RecursionError, TypeError) as error:
        raise ValueError(f"{path} is no {path.suffix.lstrip('.') or 'YAML'}: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds {type(fields).__name__}, not fields with values such as `learning_rate: 1e-6`")
    return {str(name): _number(value) for name, value in fields.items()}, []


def check_types(given: Mapping[str, Any]) -> None:
    """Refuses values of another type than TRL takes, counts below 1, numbers of 1e15 and more, and NaN.

    Null is let through; a field's earlier name is checked as its present one.

    Raises:
        ValueError: names the field, and what is taken there.
    """
    for name, value in given.items():
        name_now = RENAMED.get(name, name)
        if value is None:
            continue
        if not _is_of_type(name_now, value):
            raise ValueError(f"{name} is {value!r}; it takes {_type_of(name_now)}")
        # Beyond that a float can't hold every integer.
        if _takes_number(name_now) and not abs(value) < 10**15 and not (name_now in BOUNDS and value == math.inf):
            raise ValueError(f"{name} has to be a number below 1e15")
        for key in ("min_lr_rate", "min_lr") if name == "lr_scheduler_kwargs" else ():
            if not isinstance(value.get(key) or 0, int | float):
                raise ValueError(f"{name} has {key}={value[key]!r}; it has to be a number")
        if name_now in COUNTS and value < 1:
            raise ValueError(f"{name} is {value}; it has to be at least 1")


def _is_of_type(name: str, value: Any) -> bool:
    if name in LISTS and not (name == "report_to" and isinstance(value, str)):
        return isinstance(value, list | tuple) and all(isinstance(item, LISTS[name]) for item in value)
    if name in MAPPINGS:
        return isinstance(value, Mapping)
    if name == "dataset_name":
        return isinstance(value, str)
    if _takes_number(name):
        return isinstance(value, int | float) and not isinstance(value, bool)
    default = DEFAULTS.get(name)
    return default is None or isinstance(value, (bool, str) if name == "scale_rewards" else type(default))


def _takes_number(name: str) -> bool:
    default = DEFAULTS.get(name)
    return name in NUMBERS or (isinstance(default, int | float) and not isinstance(default, bool))


def _type_of(name: str) -> str:
    if name in LISTS:
        kind = "names" if LISTS[name] is str else "numbers"
        return f"a list of {kind}, or a name" if name == "report_to" else f"a list of {kind}"
    if name in MAPPINGS:
        return "a mapping"
    if name == "dataset_name":
        return "a name"
    return "a number" if _takes_number(name) else f"such as {DEFAULTS[name]!r}"


def _number(value: Any) -> Any:
    """Turns text such as 1e-6, which YAML takes for a string, into the number that TRL's parser makes of it.

    Those of a mapping, too.

    >>> _number("1e-6"), _number("20250101"), _number("adamw_torch")
    (1e-06, '20250101', 'adamw_torch')
    """
    if isinstance(value, Mapping):
        return {key: _number(inner) for key, inner in value.items()}
    return float(value) if isinstance(value, str) and SCIENTIFIC.fullmatch(value) else value


def _read_script(path: Path, text: str) -> tuple[dict[str, Any], list[str]]:
    try:
        return _read_calls(path, ast.parse(text))
    except (SyntaxError, RecursionError, MemoryError) as error:  # Python's own answer to what is nested too deep
        raise ValueError(f"{path} is no Python ({error or 'nested too deep'})") from None


def _read_calls(path: Path, tree: ast.Module) -> tuple[dict[str, Any], list[str]]:
    fields: dict[str, Any] = {}
    unknown: list[str] = []
    # The arguments of these calls, under TRL's names for them; None: the field's own name.
    renamed = {
        "GRPOConfig": None,
        "LoraConfig": {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
                       "target_modules": "lora_target_modules", "task_type": "lora_task_type"},
        "GRPOTrainer": {"model": "model_name_or_path"},
    }  # fmt: skip
    called = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "load_dataset":
            _read_data(node, fields, unknown)
        if name not in renamed:
            continue
        called.add(name)
        if node.args:
            unknown.append(f"{name}({ast.unparse(node.args[0])}, ...): arguments without a name are not read")
        names = renamed[name]
        for keyword in node.keywords:
            ours = keyword.arg if names is None else names.get(keyword.arg or "")
            if ours is None:
                if keyword.arg == "reward_funcs":
                    unknown.append(f"reward_funcs={ast.unparse(keyword.value)}: name them as --rewards module:function")
                elif name == "LoraConfig":
                    unknown.append(f"LoraConfig({ast.unparse(keyword)}): not taken over")
                continue
            try:
                fields[ours] = ast.literal_eval(keyword.value)
            except (ValueError, TypeError):  # a name; a list as a key
                unknown.append(f"{ours}={ast.unparse(keyword.value)}: no literal, so its value isn't known; left out")
    if "GRPOConfig" not in called:
        raise ValueError(f"{path} has no call of GRPOConfig; give the file that makes the config")
    if "LoraConfig" in called:
        # peft's defaults, which are others than those of TRL's command line
        fields = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0} | fields
    return fields, unknown


def _read_data(call: ast.Call, fields: dict[str, Any], unknown: list[str]) -> None:
    """Takes name, subset and split of the first call of load_dataset."""
    given = dict(zip(("dataset_name", "dataset_config"), call.args, strict=False))
    ours = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
    for keyword in call.keywords:
        if keyword.arg in ours:
            given[ours[keyword.arg]] = keyword.value
        else:
            unknown.append(f"load_dataset({ast.unparse(keyword)}): not taken over")
    if "dataset_name" in fields:
        unknown.append(f"{ast.unparse(call)}: a second data set; the first is taken")
        return
    for name, node in given.items():
        if isinstance(node, ast.Constant):
            fields[name] = node.value
        else:
            unknown.append(f"{name}={ast.unparse(node)}: no literal, so its value isn't known; left out")
