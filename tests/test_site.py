"""The docs as a site: built without a warning, every page in the navigation, blocks and commands that work."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_rl.cli import COMMANDS
from grpo_rl.settings.compose import choosing_configs, compose_config
from grpo_rl.settings.schema import Settings

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "sota" / "README.md", *sorted(DOCS.glob("*.md"))]
LINE = re.compile(r"`([^`\n]+)`")


def commands() -> list[tuple[str, str]]:
    """(page, command) of each line that runs a script or grpo-rl, in blocks and tables; continued lines are joined."""
    found = []
    for page in PAGES:
        if page.name == "log.md":  # which tells of what was there once
            continue
        text = re.sub(r"\\\n\s*", "", page.read_text())
        lines = [line for part in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) for line in part.splitlines()]
        for line in [*lines, *LINE.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))]:
            command = re.sub(r"\s+#.*$", "", line.strip().removeprefix("$ "))
            if re.match(r"(grpo-rl|python sota/(grpo\w*|sft)\.py|torchrun .*sota/(grpo|sft))( |$)", command):
                found.append((page.name, command))
    return found


PLACEHOLDERS = (
    "NAME",
    "experiment=mine",
    "config-name mine",
    "my_loss:",
    "my_tasks:",
    "my_tools:",
    "csv_log:",
    "numbers_game:",
    "config-name judged",
)
"""Beginnings of lines that stand for many, or for files that the page gives: test_docs.py runs those."""
SCRIPT = re.compile(r".*?(sota/(?:grpo\w*|sft)\.py|grpo-rl train)( |$)")
TRAINS = [(page, line) for page, line in commands() if SCRIPT.match(line) and not any(x in line for x in PLACEHOLDERS)]


@pytest.mark.parametrize(("page", "command"), TRAINS)
def test_a_command_of_the_docs_that_trains_has_settings_that_are_right(page, command, monkeypatch):
    for variable in re.findall(r"oc\.env:(\w+)", command):
        monkeypatch.setenv(variable, "any")
    script = SCRIPT.match(command)
    assert script
    words = shlex.split(command[script.end() :])
    if {"--cfg", "--help"} & set(words):
        return
    # Hydra's own options, and values of a sweep, of which the first counts.
    mode = next((mode for mode in ("async", "sft") if mode in script[1] or f"--{mode}" in words), "sync")
    name = words[words.index("--config-name") + 1] if "--config-name" in words else None
    overrides = [word for word in words if "=" in word and not word.startswith("hydra.")]
    if "--multirun" in words:  # spaces of a sweeper's own, such as tag(log, interval(1e-6, 1e-4)), are no overrides
        overrides = [word for word in overrides if "(" not in word and not word.startswith("hydra/")]
        overrides = [re.sub(r"=([^,\[\]]+),.*", r"=\1", word) for word in overrides]
    overrides += [f"mode={mode}"]
    name = name or ("sft" if mode == "sft" else "grpo_gsm8k")
    Settings.read(compose_config(name, choosing_configs(overrides)))


def test_commands_of_the_docs_exist():
    known = {command.split()[1] for _, command in commands() if command.startswith("grpo-rl ")}
    assert known and not known - {*COMMANDS, "train"}


def test_the_page_on_metrics_has_every_metric_of_a_run():
    text = (DOCS / "metrics.md").read_text()
    named = [re.sub(r"<\w+>", "[^`]+", name) for name in re.findall(r"`([\w/<>@]+)`", text)]
    families = re.compile("|".join(f"(?:{name})" for name in named))
    logged = json.loads((ROOT / "tests" / "report" / "metric_names.json").read_text())  # those of tests/run/test_run.py
    missing = {name for names in logged.values() for name in names if not families.fullmatch(name)}
    assert not missing - quantiles(missing)


def quantiles(names: set[str]) -> set[str]:
    """Those that the page has as `p10`, `p50`, `p90` behind one family."""
    return {name for name in names if name.startswith("reward_distribution/") and name.endswith(("p50", "p90"))}


@pytest.mark.nightly
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=700)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    home = (tmp_path / "site" / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="(?:https?:)?//(?!squidfunk)[^"]*\.(?:js|css)', home)  # nothing from a network
    assert (tmp_path / "site" / "recipes.html").exists() and (tmp_path / "site" / "api" / "losses.html").exists()
