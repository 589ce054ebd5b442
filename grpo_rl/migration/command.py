"""``grpo-rl from-trl``: reads a GRPO config of TRL, writes one that trains as it does, and names every difference.

TRL's file is YAML, JSON or a Python script. A script is parsed and never run: values that are no literals are named and
left out.
"""

import argparse
import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any

from grpo_rl.migration.from_trl import Converted, convert
from grpo_rl.storage.masking import shown
from grpo_rl.storage.yaml_text import read_yaml

# The arguments of these calls, under TRL's names for them; None: the field's own name.
CALLS: dict[str, dict[str, str] | None] = {
    "GRPOConfig": None,
    "LoraConfig": {name: f"lora_{name.removeprefix('lora_')}"
                   for name in ("r", "lora_alpha", "lora_dropout", "target_modules", "task_type")}
                  | {"use_rslora": "use_rslora", "use_dora": "use_dora"},
    "GRPOTrainer": {"model": "model_name_or_path", "reward_funcs": "reward_funcs"},
    "load_dataset": {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"},
}  # fmt: skip
READ_ELSEWHERE = ("args", "peft_config", "train_dataset")
"""Arguments of GRPOTrainer whose values come from the other calls."""


def read_trl(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The fields of a TRL config, and a line for each value that can't be known without running the script.

    Raises:
        ValueError: it can't be parsed, or holds no config.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            return _read_script(ast.parse(text), path.stem)
        fields = json.loads(text) if path.suffix == ".json" else read_yaml(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path} can't be read: {error or 'it is nested too deep'}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds {type(fields).__name__}, not fields such as `learning_rate: 1e-6`")
    return {str(name): value for name, value in fields.items()}, []


def _read_script(tree: ast.Module, module: str) -> tuple[dict[str, Any], list[str]]:
    # A constant of the script is a name that has a single value.
    nodes = list(ast.walk(tree))
    bound = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    bound.update(node.arg for node in nodes if isinstance(node, ast.arg))
    once = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant | ast.UnaryOp)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and bound[target.id] == 1
    }
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
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
            value = once.get(ast.unparse(keyword.value), keyword.value)
            if field == "reward_funcs":
                rewards = map(ast.unparse, getattr(value, "elts", [value]))
                named = ",".join(f"{module}:{each}" if each in functions else "module:function" for each in rewards)
                unknown.append(f"{text}: give them again, --rewards {named}; their module has to be importable here")
            elif field is not None:
                try:
                    fields[field] = ast.literal_eval(value)
                except (ValueError, TypeError):  # a name; a list as a key
                    instead = "; set model.name, or the default model trains" if name == "GRPOTrainer" else ""
                    unknown.append(f"{field}={ast.unparse(keyword.value)}: no literal; left out{instead}")
            elif name != "GRPOTrainer" or keyword.arg not in READ_ELSEWHERE:
                unknown.append(f"{name}({text}): not taken over")
    if "GRPOConfig" not in called:
        raise ValueError("it has no call of GRPOConfig; give the file that makes the config")
    if "LoraConfig" in called:
        # peft's defaults, which are others than those of TRL's command line
        fields = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0} | fields
    return fields, [" ".join(shown(line).split()) for line in unknown]


def add_from_trl(parser: argparse.ArgumentParser) -> None:
    """Converts a GRPO config of TRL (YAML, JSON, or a Python script, which is not run) into one for
    grpo-rl train --config-dir . --config-name NAME, and names every difference.
    """
    parser.add_argument("config", type=Path, metavar="FILE", help="TRL's config, or a script with GRPOConfig(...)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the YAML file to write (NAME_grpo_rl.yaml)")
    parser.add_argument("--processes", type=int, metavar="N", help="TRL's training processes (its num_processes, or 1)")
    parser.add_argument("--rows", type=int, metavar="N", help="rows of the training data, for num_train_epochs")
    parser.add_argument(
        "--rewards",
        default="",
        metavar="A,B",
        help="rewards by name, or module:function, instead of those that FILE names",
    )
    parser.set_defaults(run_command=_run)


def _run(options: argparse.Namespace) -> int:
    rewards = [name for name in options.rewards.split(",") if name]
    made, text = _converted(options, rewards)
    output = options.output or Path(f"{options.config.stem}_grpo_rl.yaml")
    # What was written before the rewards were named is written over, unless it was edited since.
    if output.exists() and output.read_bytes() not in (text.encode(), _converted(options, [])[1].encode()):
        raise ValueError(f"{output} exists; give another --output")
    output.write_text(text, encoding="utf-8")
    print(f"Differences ({len(made.differences)}):")
    for line in made.differences or ["none"]:
        print(f"  {line}")
    data = " env.path=FILE" if made.task == "prompt_response" and "path" not in made.config["env"] else ""
    print(f"Written: {output}. Next: {made.start} --config-dir {output.parent} --config-name {output.stem}{data}")
    return 0


def _converted(options: argparse.Namespace, rewards: list[str]) -> tuple[Converted, str]:
    """The config and the text of its file."""
    fields, unknown = read_trl(options.config)
    made = convert(fields, processes=options.processes, rows=options.rows, rewards=rewards)
    asks_for_rewards = [line for line in unknown if line.startswith("reward_funcs")]
    twice = asks_for_rewards if rewards else ["reward_funcs=None"] if asks_for_rewards else []
    made.differences[:0] = unknown
    made.differences = [line for line in made.differences if not line.startswith(tuple(twice))]
    return made, made.as_yaml(options.config.name)
