"""The docs show the output that commands print, and the names in them exist."""

from __future__ import annotations

import importlib
import math
import re
import runpy
import shlex
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from grpo_rl.cli import main
from grpo_rl.envs.sandbox.jails import jails
from grpo_rl.monitor.loggers import check_loggers, open_loggers
from grpo_rl.monitor.metrics import MetricsLog, read_metrics
from grpo_rl.testing import run_script

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "sota/README.md")),
    *(page for page in sorted(DOCS.glob("*.md")) if page.name != "log.md"),  # which tells of what was there once
]
FILES, MISSING = (".py", ".md", ".json", ".jsonl", ".yaml", ".parquet"), object()
FREE = (
    *("logger.settings.", "env.reward.", "env.rewards.", "model.embed_tokens", "model.layers", "policy.model"),
    *("env.task", "env.one_word", "env.letters", "env.mixture."),
)
"""Names of rewards, weights, attributes and arguments of loggers; and those that a task of one's own brings."""
FOLDERS = "grpo_rl|envs|config|sota|docs|tests|tools|benchmarks"


def texts(path):
    return [text.strip() for text in ET.parse(path).getroot().itertext() if text.strip()]


@pytest.mark.slow
def test_commands_of_the_page_on_batches_print_what_it_shows(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    blocks = re.findall(r"```\n\$ grpo-rl ([^\n]*)\n(.*?)```", (DOCS / "batches.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for command, shown in blocks:
        main(command.split())
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        lines = shown.rstrip().splitlines()  # the page leaves out the end
        assert printed[: len(lines)] == lines


def test_the_picture_is_what_its_command_draws(tmp_path, monkeypatch):
    (command,) = re.findall(r"`grpo-rl (batches .*--svg docs/batches\.svg)`", (DOCS / "batches.md").read_text())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    assert main(command.split()) == 0
    assert texts(tmp_path / "docs" / "batches.svg") == texts(DOCS / "batches.svg")


def test_the_logger_of_the_page_is_one_and_survives_a_resume(tmp_path, monkeypatch):
    (code,) = re.findall(r"<!-- script -->\n```python\n(.*?)```", (DOCS / "loggers.md").read_text(), re.DOTALL)
    (tmp_path / "csv_log.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    name, settings = "csv_log:CsvLog", {"CsvLog": {"metrics": ["reward/mean", "entropy"]}}
    check_loggers(name, settings)
    metrics = MetricsLog(tmp_path)
    for last_step, reward in ((-1, 0.25), (1, 0.75)):
        if last_step > 0:
            metrics.truncate(last_step)
        logger = {"backend": name, "project": "p", "name": None, "mode": "online", "settings": settings}
        loggers = open_loggers(logger, tmp_path, {}, print)
        for step in range(max(last_step + 1, 0), 3):
            metrics.log(step, row := {"reward/mean": reward, "entropy": 0.5} if step else {"eval/reward": 0.0})
            loggers.log(step, row)
        loggers.close()
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["1,0.25,0.5", "2,0.75,0.5"]


def test_the_map_is_what_the_folders_say():
    assert (DOCS / "map.md").read_text() == runpy.run_path(str(ROOT / "tools" / "map.py"))["page"]()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_that_a_page_names_are_there(page):
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    paths = re.findall(rf"(?<![\w/=.-])((?:{FOLDERS})/[\w./-]*\w/?)", text)
    assert not missing + [path for path in paths if not re.search("NAME|rhyme", path) and not (ROOT / path).exists()]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_classes_and_settings_that_a_page_names_exist(page):
    text = page.read_text()
    missing = [name for name in re.findall(r"\bgrpo_rl(?:\.\w+)+", text) if "NAME" not in name and not exists(name)]
    cfg = OmegaConf.load(ROOT / "config" / "grpo.yaml")
    cfg.loss = OmegaConf.load(ROOT / "config" / "loss" / "grpo.yaml")
    tasks = [OmegaConf.load(path) for path in (ROOT / "config" / "env").glob("*.yaml")]
    cfg.env = OmegaConf.merge(cfg.env, *({key: None for key in task} for task in tasks))
    sections = "|".join(str(key) for key in cfg if OmegaConf.is_config(cfg[key]) and key != "hydra")
    for key in re.findall(rf"(?<![\w./@])((?:{sections})(?:\.[a-z_]+)+)(?![\w/(])", text):
        if (
            not key.startswith(FREE)
            and not key.endswith(FILES)
            and OmegaConf.select(cfg, key, default=MISSING) is MISSING
        ):
            missing.append(key)
    assert not missing


OWN_PAGES = [
    "tasks.md", "tools.md", "code.md", "environments.md", "agents.md", "losses.md", "data.md", "mixtures.md",
]  # fmt: skip
OWN = [
    (page, command)
    for page in OWN_PAGES
    for command in re.findall(r"<!-- run -->\n```\ngrpo-rl train ([^\n]*)\n```", (DOCS / page).read_text())
]

MARKS = {
    "agents.md": pytest.mark.nightly,  # the endpoint and its agents have tests of their own in make test
    "code.md": pytest.mark.skipif(not jails(), reason="needs bubblewrap: apt-get install bubblewrap"),
}


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "command"),
    [pytest.param(*own, id=f"{own[0]}-{i}", marks=MARKS.get(own[0], ())) for i, own in enumerate(OWN)],
)
def test_what_a_page_shows_of_ones_own_trains_in_a_folder_with_the_files_that_it_shows(
    page, command, tiny_run, tmp_path, monkeypatch, own_cache
):
    shown = re.findall(r"`(\w+\.\w+)`:\n\n```\w+\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    for name, content in shown:
        (tmp_path / name).write_text(content)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)  # another test's of that name
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    of_task = ("env.path", "env.eval_path", "env.system_prompt", "env.reward", "train.total_dialog_turns")
    shortened = [word for word in tiny_run if not word.startswith(of_task)] + ["train.total_dialog_turns=16"]
    words = [*shortened, "inference_model.max_model_len=480", *shlex.split(command)]
    folder = run_script(ROOT / "sota" / "grpo.py", words, tmp_path / "run")
    (row,) = read_metrics(folder / "metrics.jsonl")
    assert math.isfinite(row["reward/mean"]) and row["grad_norm"] >= 0
    recorded = yaml.safe_load((folder / "config.yaml").read_text())
    for word in shlex.split(command):
        override = OverridesParser.create().parse_override(word.replace("env.task", "env.dataset"))
        assert OmegaConf.select(OmegaConf.create(recorded), override.key_or_group) == override.value()
    for name, _ in shown:
        sys.modules.pop(name.removesuffix(".py"), None)


def exists(name: str) -> bool:
    """True if a dotted name is a module, or something in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False
