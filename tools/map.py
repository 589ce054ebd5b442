"""Writes docs/map.md, from the sentences in the folders' `__init__.py`, and llms.txt, the docs' list of pages.

`python tools/map.py` writes both; the form of the latter is https://llmstxt.org's.
"""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Map

Each folder has one sentence, in its `__init__.py`, that decides what lives there; the names behind it are its modules.
Imports point one way (`tests/test_layers.py` has the order). `python tools/map.py` writes this page.
"""
ORDER = [
    *(
        "cli",
        "settings",
        "assembly",
        "run",
        "collectors",
        "agents",
        "training",
        "losses",
        "policies",
        "engines",
        "weights",
        "data",
    ),
    *("distributed", "cluster", "monitor", "loggers", "report", "diagnosis", "perf", "storage", "waits"),
    *("by_name", "section", "intervals", "loopback"),
    *("planner", "checks", "evaluation", "serving", "replay", "migration", "testing"),
]
MOUNTED = ("envs", "config", "sota")
"""Folders next to grpo_rl that are imported as its own, through links."""
BESIDE = {
    "benchmarks/": "One script for each claim, with its figures.",
    "tests/": "Tests, in folders that mirror the ones above.",
    "tools/": "Set-up, the curves of runs, and what writes this page and [model classes](model_classes.md).",
    "docs/": "A page for each question; `docs/log.md` lists what was tried, with results.",
}


def sentence(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text, f"{path} says nothing"
    return " ".join(text.split("\n\n")[0].split())


def rows(folder: Path, shown: str) -> list[str]:
    """A folder's row and those of its packages."""
    files = sorted(folder.glob("*.py"))
    names = ", ".join(f"`{path.stem}`" for path in files if path.stem != "__init__")
    table = [f"| `{shown}` | {sentence(folder / '__init__.py')} | {names} |"]
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        table += rows(package, f"{shown}{package.name}/")
    return table


def page() -> str:
    """The map as Markdown."""
    package = ROOT / "grpo_rl"
    lines = [HEAD, "| `grpo_rl` | what it is | modules |", "| --- | --- | --- |"]
    folders = {path.parent.name for path in package.glob("*/__init__.py") if not path.parent.is_symlink()}
    assert folders == {name for name in ORDER if (package / name).is_dir()}, "a folder is missing in ORDER"
    for name in ORDER:
        folder = package / name
        if folder.is_dir():
            lines += rows(folder, f"{name}/")
        else:
            lines.append(f"| `{name}.py` | {sentence(folder.with_suffix('.py'))} | |")
    lines += ["", "| next to it | what it is | modules |", "| --- | --- | --- |"]
    lines += [row for name in MOUNTED for row in rows(ROOT / name, f"{name}/")]
    lines += [f"| `{name}` | {text} | |" for name, text in BESIDE.items()]
    imported = "`envs/`, `config/` and `sota/` are imported as `grpo_rl.envs`, `grpo_rl.config` and `grpo_rl.sota`."
    return "\n".join([*lines, "", imported, ""])


def llms() -> str:
    """The docs' pages by section, each with its first sentence, as mkdocs.yml lists them."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    elsewhere = {page: source for source, page in runpy.run_path(str(ROOT / "tools" / "site.py"))["ELSEWHERE"].items()}
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    lines.append("- [README](README.md)\n- [AGENTS](AGENTS.md): commands and rules for an assistant in this repository")
    for section, pages in (item for entry in config["nav"] for item in entry.items()):
        if isinstance(pages, str):
            continue  # the home page
        lines += ["", f"## {section}", ""]
        for name in pages:
            source = elsewhere.get(name, f"docs/{name}")
            title, *rest = re.split(r"\n+", (ROOT / source).read_text().strip(), maxsplit=1)
            begins = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join("".join(rest).split("\n\n")[0].split()))
            first = re.match(r"(?!```)[A-Z`].*?\.(?= |$)", begins)
            lines.append(f"- [{title.removeprefix('# ')}]({source})" + (f": {first[0]}" if first else ""))
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    (ROOT / "llms.txt").write_text(llms())
    (ROOT / "docs" / "map.md").write_text(page())
