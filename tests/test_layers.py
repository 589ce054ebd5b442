"""The import rule: imports point one way, and each outside library stays in its room."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A room is a module or package directly under grpo_rl, or a file named here. It may import its own layer and those
# below it. The fingerprint is a pure function that both ends of a transfer compute, engines and weights.
LAYERS = [
    {"keys"},
    {"losses", "advantages", "rollout", "devices", "envs", "fingerprint", "allocator", "virtual_time"},
    {"policies", "engines", "buffer"},
    {"optimizer", "models", "rates", "limit", "parallel", "checkpoint_file", "parallel_checkpoint", "schedules"}
    | {"whole_file"},
    {"collectors", "weights", "evaluate", "checkpoint", "monitor", "run", "run_folder", "run_lock", "build", "testing"}
    | {"fleet", "batches", "replay", "replay_table", "twin", "together", "fleet_engine", "build_async"}
    | {"ray_cluster", "ray_doctor", "ray_engines", "ray_token", "ray_trainers"}
    | {"hardware", "plan", "plan_advice", "plan_memory", "plan_question", "plan_simulate", "plan_table", "plan_time"},
    {"sota", "cli", "config"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# Rooms that may import less than their layer would allow.
ONLY_ROOMS = {"envs": {"keys", "rollout"}, "losses": {"keys"}}
ONLY_LIBRARIES = {"losses": {"torch", "tensordict", "torchrl", "jaxtyping"}}
# Libraries that only files or folders with these beginnings may import.
ONLY_IN = {
    "ray": ("grpo_rl/ray_",),
    "vllm": ("grpo_rl/engines/vllm",),
    "hydra": ("sota/", "grpo_rl/cli.py", "config/"),
    "peft": ("grpo_rl/policies/lora.py",),
    "bitsandbytes": ("grpo_rl/policies/lora.py",),
}


def python_files(root: Path) -> list[Path]:
    """Every source file once: the links grpo_rl/envs and grpo_rl/config are not followed."""
    files = []
    for folder in ("grpo_rl", "envs", "config", "sota"):
        for path in sorted((root / folder).rglob("*.py")):
            if path.parent.resolve() == root.resolve() / path.parent.relative_to(root):
                files.append(path)
    return files


def room_of(path: Path, root: Path) -> str:
    """The room that a file belongs to.

    >>> room_of(Path("/r/grpo_rl/engines/vllm.py"), Path("/r")), room_of(Path("/r/envs/gsm8k.py"), Path("/r"))
    ('engines', 'envs')
    """
    parts = path.relative_to(root).with_suffix("").parts
    return room(".".join(parts[1:] if parts[0] == "grpo_rl" else parts))


def room(module: str) -> str:
    """The room that a module under grpo_rl belongs to.

    >>> room("weights.push"), room("fingerprint"), room("rollout")
    ('weights', 'fingerprint', 'rollout')
    """
    return module if module in LEVEL else module.partition(".")[0]


def imported(path: Path, root: Path) -> set[str]:
    """Full names of all modules that a file imports, at the top or inside functions."""
    package = ("grpo_rl", *path.relative_to(root).parts[:-1])
    if package[:2] == ("grpo_rl", "grpo_rl"):
        package = package[1:]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (start, node.module) if part)
            # `from grpo_rl import keys` imports a room, which the module's name alone does not tell.
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "grpo_rl" else {module}
    return names


def violations(root: Path) -> list[str]:
    """Every breach of the rule, as `file: what`."""
    found = []
    edges: dict[str, set[str]] = {}
    for path in python_files(root):
        own, where = room_of(path, root), path.relative_to(root).as_posix()
        if own not in LEVEL and own != "__init__":
            found.append(f"{where}: {own} has no layer; give it one in LAYERS")
            continue
        for name in sorted(imported(path, root)):
            library, _, rest = name.partition(".")
            if library in ("envs", "config", "sota"):
                found.append(f"{where}: imports {name}; it is grpo_rl.{name}, or not to be imported")
            elif library == "grpo_rl":
                other = room(rest)
                if other in ("", own) or other.startswith("__"):
                    continue
                edges.setdefault(own, set()).add(other)
                if other == "testing":
                    found.append(f"{where}: imports testing, which is for tests")
                elif own in ONLY_ROOMS:
                    if other not in ONLY_ROOMS[own]:
                        found.append(f"{where}: {own} imports {other}; it may only {sorted(ONLY_ROOMS[own])}")
                elif LEVEL.get(other, -1) > LEVEL.get(own, -1):
                    found.append(f"{where}: {own} imports {other}, which is above it")
            elif library not in sys.stdlib_module_names:
                allowed = ONLY_LIBRARIES.get(own)
                if allowed is not None and library not in allowed:
                    found.append(f"{where}: {own} imports {library}; it may only {sorted(allowed)}")
                if not where.startswith(ONLY_IN.get(library, "")):
                    found.append(f"{where}: imports {library}, which only {' '.join(ONLY_IN[library])} may")
    return found + [f"rooms import each other in a circle: {' -> '.join(circle)}" for circle in circles(edges)]


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """One circle for each room that can come back to itself; same-layer imports must not form any.

    >>> circles({"run": {"monitor"}, "monitor": {"run"}, "buffer": {"rollout"}})
    [['monitor', 'run', 'monitor'], ['run', 'monitor', 'run']]
    """
    found = []
    for start in sorted(edges):
        paths, seen = [[start]], set()
        while paths:
            path = paths.pop()
            for room in sorted(edges.get(path[-1], ())):
                if room == start:
                    found.append([*path, start])
                    paths = []
                    break
                if room not in seen:
                    seen.add(room)
                    paths.append([*path, room])
    return found


def test_imports_point_one_way():
    assert violations(ROOT) == []


def test_every_file_is_looked_at_once():
    files = [path.relative_to(ROOT).as_posix() for path in python_files(ROOT)]
    assert "envs/base.py" in files and "grpo_rl/keys.py" in files and "sota/grpo.py" in files
    assert not any(name.startswith(("grpo_rl/envs", "grpo_rl/config")) for name in files)


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("grpo_rl/rollout.py", "from grpo_rl.policies import head", "rollout imports policies, which is above it"),
        ("grpo_rl/buffer.py", "def f():\n    import grpo_rl.weights.push", "buffer imports weights, which is above it"),
        ("grpo_rl/keys.py", "from grpo_rl import advantages", "keys imports advantages, which is above it"),
        ("grpo_rl/engines/base.py", "from ..collectors.sync import X", "engines imports collectors, which is above it"),
        ("grpo_rl/monitor/report.py", "import grpo_rl.cli", "monitor imports cli, which is above it"),
        ("envs/gsm8k.py", "import grpo_rl.advantages", "envs imports advantages; it may only ['keys', 'rollout']"),
        ("grpo_rl/losses/kl.py", "from grpo_rl import rollout", "losses imports rollout; it may only ['keys']"),
        ("grpo_rl/losses/kl.py", "import transformers", "losses imports transformers; it may only"),
        ("grpo_rl/run.py", "from grpo_rl.testing import random_group", "imports testing, which is for tests"),
        ("sota/grpo.py", "from vllm import LLM", "imports vllm, which only grpo_rl/engines/vllm may"),
        ("grpo_rl/run.py", "import hydra.utils", "imports hydra, which only sota/ grpo_rl/cli.py config/ may"),
        ("grpo_rl/run.py", "import bitsandbytes", "imports bitsandbytes, which only grpo_rl/policies/lora.py may"),
        ("config/__init__.py", "from peft import LoraConfig", "imports peft, which only grpo_rl/policies/lora.py may"),
        ("sota/grpo.py", "from envs.gsm8k import GSM8K", "imports envs.gsm8k; it is grpo_rl.envs.gsm8k"),
        ("grpo_rl/utils.py", "", "utils has no layer"),
    ],
)  # fmt: skip
def test_a_planted_breach_is_caught(tmp_path, file, source, complaint):
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(source)
    assert len(found := violations(tmp_path)) == 1, found
    assert found[0].startswith(f"{file}: ") and complaint in found[0]


def test_a_circle_within_a_layer_is_caught(tmp_path):
    (tmp_path / "grpo_rl").mkdir()
    (tmp_path / "grpo_rl/run.py").write_text("import grpo_rl.checkpoint")
    (tmp_path / "grpo_rl/checkpoint.py").write_text("from grpo_rl.run import Run")
    assert violations(tmp_path)[0] == "rooms import each other in a circle: checkpoint -> run -> checkpoint"


def test_what_the_rule_allows_is_not_reported(tmp_path):
    for file, source in {
        "sota/grpo.py": "import hydra\nfrom grpo_rl.run import Run\nfrom grpo_rl.envs.gsm8k import GSM8KEnv",
        "grpo_rl/run.py": "import torch\nfrom grpo_rl import __version__, checkpoint\nfrom grpo_rl.keys import ROW",
        "grpo_rl/engines/vllm.py": "import vllm\nfrom . import base\nfrom grpo_rl.rollout import Group",
        "grpo_rl/losses/grpo.py": "import math\nimport torch\nfrom torchrl.objectives import LossModule",
        "envs/gsm8k.py": "import re\nimport datasets\nfrom grpo_rl.envs.base import Task\nfrom grpo_rl import keys",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    assert violations(tmp_path) == []
