"""The docs: what they print and name is right, their scripts run, and the site is built without a warning."""

import json
import math
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from tiny_runs import run_script

from grpo_rl.cli import COMMANDS, main
from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.sandbox.jails import jails
from grpo_rl.loggers.base import check_loggers
from grpo_rl.monitor.loggers import open_loggers
from grpo_rl.monitor.metrics import MetricsLog, read_metrics
from grpo_rl.settings.compose import choosing_configs, compose_config
from grpo_rl.settings.schema import Settings
from grpo_rl.testing import save_tiny_model
from tests.collectors.test_torchrl_parts import OneTurn

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "sota/README.md")),
    *(page for page in sorted(DOCS.glob("*.md")) if page.name != "log.md"),  # which tells of what was there once
]
FILES, MISSING = (".py", ".md", ".json", ".jsonl", ".yaml", ".parquet"), object()
FREE = (
    *("logger.settings.", "env.reward.", "env.rewards.", "model.embed_tokens", "model.layers", "policy.model"),
    *("env.task", "env.one_word", "env.letters", "env.mixture.", "loss.softness"),
)
"""Names of rewards, weights, attributes and arguments of loggers; and those of a task or a loss of one's own."""
FOLDERS = "grpo_rl|envs|config|sota|docs|tests|tools|benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "columns", "title"),
    [("batches.md", "80", 0), pytest.param("plan.md", "130", 2, marks=pytest.mark.nightly)],
)
def test_commands_of_a_page_print_what_it_shows(page, columns, title, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.chdir(ROOT)
    found = re.findall(r"```\n\$ grpo-rl ((?:[^\n]*\\\n)*[^\n]*)\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    for (command, shown), code in zip(found, (0, 1), strict=True):
        assert main(command.replace("\\\n", " ").split()) == code
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        lines = shown.rstrip().splitlines()  # a page may leave out the end, and the lines of the title
        assert printed[title : title + len(lines)] == lines


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


def test_the_map_is_what_the_folders_say_and_the_list_for_language_models_what_the_pages_say():
    made = runpy.run_path(str(ROOT / "tools" / "map.py"))
    assert (DOCS / "map.md").read_text() == made["page"]()
    assert (ROOT / "llms.txt").read_text() == made["llms"]()


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
    keys = re.findall(rf"(?<![\w./@])((?:{sections})(?:\.[a-z_]+)+)(?![\w/(])", text)
    keys = [key for key in keys if not key.startswith(FREE) and not key.endswith(FILES)]
    missing += [key for key in keys if OmegaConf.select(cfg, key, default=MISSING) is MISSING]
    assert not missing


OWN_PAGES = [
    "tasks.md", "tools.md", "code.md", "environments.md", "agents.md", "losses.md", "data.md", "mixtures.md",
    "hooks.md",
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
def test_what_a_page_shows_trains_in_a_folder_with_its_files(page, command, tiny_run, tmp_path, monkeypatch, own_cache):
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
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_every_promise_of_the_page_on_security_names_a_test_that_exists():
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (DOCS / "security.md").read_text(encoding="utf-8")))
    assert len(named) >= 15
    assert not [name for file, name in named if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")]


def test_the_readme_is_short_and_its_table_names_every_loss():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 90
    blocks = [
        re.search(r"```python\n(.*?)```", page, re.DOTALL)[1] for page in (text, (DOCS / "from_python.md").read_text())
    ]
    assert blocks[0] == blocks[1], "the latter is run"
    assert {path.stem for path in (ROOT / "config" / "loss").glob("*.yaml")} <= set(re.findall(r"`([a-z_]+)`", text))


def script_of(name: str, most_lines: int) -> dict:
    """The names that the page's script defines."""
    page = DOCS / name
    (block,) = re.findall(r"<!-- script -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(block.splitlines()) <= most_lines
    names: dict = {}
    exec(compile(block, str(page), "exec"), names)  # our own page, not data
    return names


@pytest.mark.slow
def test_the_custom_script_runs(tmp_path, capsys):
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) + "\n" for i in range(4)))
    script_of("custom_script.md", 40)["train"](save_tiny_model(tmp_path / "model"), str(data))
    assert len(re.findall(r"^reward ", capsys.readouterr().out, re.MULTILINE)) == 2


@pytest.mark.slow
def test_torchrls_loop_runs_over_one_of_our_environments(tmp_path, tokenizer, capsys):
    env = LLMEnv(OneTurn(), tokenizer, num_envs=2, repeats=4)
    script_of("from_torchrl.md", 45)["train"](env, save_tiny_model(tmp_path / "model"))
    assert len(re.findall(r"^reward [1-9]", capsys.readouterr().out, re.MULTILINE)) == 2


LINE = re.compile(r"`([^`\n]+)`")


def commands() -> list[tuple[str, str]]:
    """(page, command) of each line that runs a script or grpo-rl, in blocks and tables; continued lines are joined."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", page.read_text())
        lines = [line for part in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) for line in part.splitlines()]
        for line in [*lines, *LINE.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))]:
            command = re.sub(r"\s+#.*$", "", line.strip().removeprefix("$ "))
            if re.match(r"(grpo-rl|python sota/(grpo\w*|sft)\.py|torchrun .*sota/(grpo|sft))( |$)", command):
                found.append((page.name, command))
    return found


PLACEHOLDERS = (
    "NAME", "experiment=mine", "config-name mine", "my_loss:", "my_sums:", "my_tasks:", "my_tools:", "csv_log:",
    "numbers_game:", "config-name judged", "my_penalty:", "my_env:",
)  # fmt: skip
"""Beginnings of lines that stand for many, or for files that the page gives: a test above runs those."""
SCRIPT = re.compile(r".*?(sota/(?:grpo\w*|sft)\.py|grpo-rl train)( |$)")
TRAINS = [(page, line) for page, line in commands() if SCRIPT.match(line) and not any(x in line for x in PLACEHOLDERS)]


@pytest.mark.slow
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
    assert not [name for name in missing if not re.fullmatch("reward_distribution/.*p[59]0", name)]  # p10 is named


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
