"""The import rule: imports point one way, by folder and by file, and each outside library stays in its folder."""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A folder under grpo_rl, or a module of its root, may import its own layer and those below it, in no circle.
LAYERS = [
    {"by_name", "config", "data", "intervals", "loopback", "losses", "section", "storage", "waits"},
    {"engines", "envs", "loggers", "perf", "policies"},
    {"agents", "cluster", "collectors", "diagnosis", "distributed", "monitor", "settings", "training", "weights"},
    {"report"},
    {"run"},
    {"assembly"},
    {"evaluation", "planner", "replay", "serving"},
    {"checks"},
    {"migration"},
    {"api", "cli", "sota", "testing"},
]
LEVEL = {folder: level for level, folders in enumerate(LAYERS) for folder in folders}
# Folders that may import less than their layer would allow, by the beginnings of modules.
ONLY_MODULES = {
    "envs": ("data", "by_name", "section", "storage.cache", "storage.hub", "storage.masking", "waits"),
    "losses": ("data.keys", "by_name", "section"),
    "waits": ("storage.whole_file",),
}
ONLY_LIBRARIES = {"losses": {"torch", "tensordict", "torchrl", "jaxtyping", "pydantic"}}
# Folders that only these may import.
COMMANDS = {"checks", "evaluation", "migration", "replay", "serving"}
ONLY_FOR = {folder: {"cli"} for folder in COMMANDS} | {
    "planner": {"checks", "cli"},
    "settings": COMMANDS | {"api", "assembly", "planner", "run", "cli", "sota"},
    "testing": set(),
}
# Libraries that only files or folders with these beginnings may import.
ONLY_IN = {
    "ray": ("grpo_rl/cluster/",),
    "aiohttp": ("grpo_rl/agents/",),
    "openai": (),
    "vllm": ("grpo_rl/engines/vllm/",),
    "hydra": ("sota/", "grpo_rl/cli.py", "grpo_rl/settings/"),
    "omegaconf": ("grpo_rl/api.py", "sota/", "grpo_rl/assembly/", "grpo_rl/settings/"),
    "peft": ("grpo_rl/policies/lora.py",),
    "bitsandbytes": ("grpo_rl/policies/lora.py",),
    "websockets": ("envs/openenv.py",),
    "verifiers": ("envs/verifiers.py",),
    **{path.stem: (f"grpo_rl/loggers/{path.name}",) for path in (ROOT / "grpo_rl/loggers").glob("*.py")},
}
WHOLE_CONFIG = {
    "cfg": {"sota", "assembly", "settings"},
    "settings": ONLY_FOR["settings"] - {"migration", "run"} | {"settings"},
}
"""Folders where a parameter may be the whole config, as Hydra's or as the checked one."""
MAX_LINES, MAX_IMPORTED = 400, 12
"""Limits of a file: lines, and modules of ours that it imports; those of assembly/ may import more."""

MOST_FILES, MOST_LOADED_LINES = 165, 28_000
"""Limits of what ``sota/grpo.py`` loads, whatever its settings."""


def python_files(root: Path) -> list[Path]:
    """Every source file once: rglob does not follow the links grpo_rl/envs, grpo_rl/config and grpo_rl/sota."""
    folders = ("grpo_rl", "envs", "config", "sota")
    return [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]


def module_of(path: Path, root: Path) -> str:
    """The name of a file's module without ``grpo_rl``; of a package, that of its folder."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts[1:] if parts[0] == "grpo_rl" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    return module.partition(".")[0]


def imported(tree: ast.AST, module: str, is_package: bool) -> set[tuple[str, str]]:
    """(module, name) of all that is imported, at the top, inside functions and for type checkers; name may be empty."""
    package = ["grpo_rl", *module.split(".")]
    package = package if is_package else package[:-1]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (start, node.module) if part)
            names |= {(source, alias.name) for alias in node.names}
    return names


def config_parameter(tree: ast.AST) -> str | None:
    """The kind of a function's parameter that is the whole config, by its name or type: "cfg" or "settings"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            hint = ast.unparse(node.annotation) if node.annotation else ""
            if node.arg == "cfg" or "DictConfig" in hint:
                return "cfg"
            if hint.split(".")[-1].strip("'\"") == "Settings":
                return "settings"
    return None


def violations(root: Path) -> list[str]:
    """Every breach of the rule, as `file: what`."""
    found = []
    files = {module_of(path, root): path for path in python_files(root)}
    folders: dict[str, set[str]] = {}
    modules: dict[str, set[str]] = {}
    for module, path in files.items():
        own, where, text = folder_of(module), path.relative_to(root).as_posix(), path.read_text()
        tree = ast.parse(text, where)
        if own not in LEVEL and module:
            found.append(f"{where}: {own} has no layer; a module belongs into a folder, and a folder into LAYERS")
            continue
        ours = set()
        for source, name in sorted(imported(tree, module, path.name == "__init__.py")):
            library, _, rest = source.partition(".")
            if library in ("envs", "config", "sota"):
                found.append(f"{where}: imports {source}; it is grpo_rl.{source}, or not to be imported")
            elif library == "grpo_rl":
                # `from grpo_rl.data import keys` imports a module, which the source's name alone does not tell.
                inner = f"{rest}.{name}".strip(".") if name else rest
                ours |= {inner if inner in files or not rest else rest} - {"", "__version__", module}
            elif library not in sys.stdlib_module_names:
                allowed = ONLY_LIBRARIES.get(own)
                if allowed is not None and library not in allowed:
                    found.append(f"{where}: {own} imports {library}; it may only {sorted(allowed)}")
                if not where.startswith(ONLY_IN.get(library, "")):
                    found.append(f"{where}: imports {library}, which only {' '.join(ONLY_IN[library])} may")
        modules[module] = ours
        found += [f"{where}: {what}" for other in sorted(ours) if (what := forbidden(own, other))]
        folders.setdefault(own, set()).update(folder_of(other) for other in ours if folder_of(other) != own)
        if len(ours) > MAX_IMPORTED and own != "assembly":
            found.append(f"{where}: imports more than {MAX_IMPORTED} modules of ours: {len(ours)}")
        if (lines := len(text.splitlines())) > MAX_LINES:
            found.append(f"{where}: has more than {MAX_LINES} lines: {lines}")
        if (whole := config_parameter(tree)) and own not in WHOLE_CONFIG[whole]:
            found.append(f"{where}: takes the whole config as {whole}")
        first = (ast.get_docstring(tree) or "").partition("\n\n")[0]
        if path.name == "__init__.py" and (not first.endswith(".") or ". " in first):
            found.append(f"{where}: does not begin with the folder's one sentence")
    for kind, edges in (("folders", folders), ("files", modules)):
        try:
            TopologicalSorter(edges).prepare()
        except CycleError as error:
            found.append(f"{kind} import each other in a circle: {' <- '.join(error.args[1])}")
    return list(dict.fromkeys(found))


def forbidden(own: str, other: str) -> str | None:
    """The fault of a folder that imports this module; None where nothing is."""
    folder = folder_of(other)
    if folder == own or (own, folder) == ("", "api"):  # `grpo_rl.train`, imported when it is first asked for
        return None
    if own in ONLY_MODULES and not f"{other}.".startswith(tuple(f"{name}." for name in ONLY_MODULES[own])):
        return f"{own} imports {other}; it may only {' '.join(ONLY_MODULES[own])}"
    if LEVEL.get(folder, -1) > LEVEL.get(own, -1):
        return f"{own} imports {folder}, which is above it"
    if folder in ONLY_FOR and own not in ONLY_FOR[folder]:
        return f"{own} imports {folder}, which only {' '.join(sorted(ONLY_FOR[folder])) or 'tests'} may"
    return None


def loaded(root: Path, script: str) -> set[Path]:
    """Our files that a script loads: by its imports, local ones included, and without those for type checkers."""
    files = {module_of(path, root): path for path in python_files(root)}
    todo, seen = [script], set()
    while todo:
        module = todo.pop()
        if module in seen or module not in files:
            continue
        seen.add(module)
        tree = ast.parse(files[module].read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                node.body = [ast.Pass()]
        for source, name in imported(tree, module, files[module].name == "__init__.py"):
            if source.partition(".")[0] == "grpo_rl":
                parts = [*source.split(".")[1:], name]
                todo += [".".join(parts[:length]) for length in range(len(parts) + 1)]
    return {files[module] for module in seen}


def test_imports_point_one_way():
    assert violations(ROOT) == []


def test_a_run_loads_few_files():
    files = loaded(ROOT, "sota.grpo")
    assert {ROOT / "grpo_rl/run/run.py", ROOT / "envs/base.py"} <= files and ROOT / "grpo_rl/cli.py" not in files
    assert len(files) <= MOST_FILES
    assert sum(len(path.read_text().splitlines()) for path in files) <= MOST_LOADED_LINES


def test_each_planted_breach_is_caught_and_so_is_a_circle_within_a_layer_or_a_folder(tmp_path):
    breaches = [
        ("grpo_rl/data/group.py", "from grpo_rl.policies import head", "data imports policies, which is above it"),
        ("grpo_rl/engines/base.py", "if TYPE_CHECKING:\n    from ..collectors.sync import X", "engines imports coll"),
        ("grpo_rl/losses/kl.py", "from grpo_rl.data.group import Group", "losses imports data.group; it may only data"),
        ("grpo_rl/losses/k3.py", "import transformers", "losses imports transformers; it may only"),
        ("sota/grpo.py", "from vllm import LLM", "imports vllm, which only grpo_rl/engines/vllm/ may"),
        ("grpo_rl/numbers.py", "", "numbers has no layer"),
        ("grpo_rl/run/run.py", "def start(cfg): ...", "takes the whole config as cfg"),
        ("grpo_rl/run/__init__.py", '"""A run. Its folder."""', "does not begin with the folder's one sentence"),
    ]
    circles = [
        ("grpo_rl/training/a.py", "import grpo_rl.monitor.b"),
        ("grpo_rl/monitor/b.py", "from grpo_rl.training.c import X"),
        ("grpo_rl/data/a.py", "from grpo_rl.data import b"),
        ("grpo_rl/data/b.py", "def f():\n    from .a import X"),
    ]
    for file, source, *_ in [*breaches, *circles]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    *found, folders, files = violations(tmp_path)
    assert len(found) == len(breaches), found
    for file, _, complaint in breaches:
        assert [line for line in found if line.startswith(f"{file}: ") and complaint in line], (complaint, found)
    assert {*folders.split()} >= {"folders", "monitor", "training"}
    assert {*files.split()} >= {"files", "data.a", "data.b"}
