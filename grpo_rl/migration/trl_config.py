"""Reads a GRPO config of TRL: a YAML or JSON file as ``trl grpo --config`` and Open-R1 take, or a Python script.

A script is parsed and never run: values that are no literals are named and left out.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from grpo_rl.storage.masking import shown
from grpo_rl.storage.yaml_text import read_yaml

# The arguments of these calls, under TRL's names for them; None: the field's own name.
CALLS: dict[str, dict[str, str] | None] = {
    "GRPOConfig": None,
    "LoraConfig": {name: f"lora_{name.removeprefix('lora_')}"
                   for name in ("r", "lora_alpha", "lora_dropout", "target_modules", "task_type")},
    "GRPOTrainer": {"model": "model_name_or_path", "reward_funcs": "reward_funcs"},
    "load_dataset": {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"},
}  # fmt: skip


def read_trl(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The fields of a TRL config, and a line for each value that can't be known without running the script.

    Raises:
        ValueError: it can't be parsed, or holds no config.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            return _read_script(ast.parse(text))
        fields = json.loads(text) if path.suffix == ".json" else read_yaml(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path} can't be read: {error or 'it is nested too deep'}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds {type(fields).__name__}, not fields such as `learning_rate: 1e-6`")
    return {str(name): value for name, value in fields.items()}, []


def _read_script(tree: ast.Module) -> tuple[dict[str, Any], list[str]]:
    fields: dict[str, Any] = {}
    unknown: list[str] = []
    called = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (name := ast.unparse(node.func).rpartition(".")[2]) not in CALLS:
            continue
        if name == "load_dataset" and name in called:
            unknown.append(f"{ast.unparse(node)}: a second data set; the first is taken")
            continue
        called.add(name)
        places = ("path", "name") if name == "load_dataset" else ()
        given = [*node.keywords, *map(ast.keyword, places, node.args)]
        if node.args and not places:
            unknown.append(f"{name}({ast.unparse(node.args[0])}, ...): arguments without a name are not read")
        for keyword in given:
            names, text = CALLS[name], ast.unparse(keyword)
            field = keyword.arg if names is None else names.get(keyword.arg or "")
            if field == "reward_funcs":
                unknown.append(f"{text}: name them as --rewards module:function")
            elif field is not None:
                try:
                    fields[field] = ast.literal_eval(keyword.value)
                except (ValueError, TypeError):  # a name; a list as a key
                    unknown.append(f"{field}={ast.unparse(keyword.value)}: no literal; left out")
            elif name != "GRPOTrainer":
                unknown.append(f"{name}({text}): not taken over")
    if "GRPOConfig" not in called:
        raise ValueError("it has no call of GRPOConfig; give the file that makes the config")
    if "LoraConfig" in called:
        # peft's defaults, which are others than those of TRL's command line
        fields = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0} | fields
    return fields, [" ".join(shown(line).split()) for line in unknown]
