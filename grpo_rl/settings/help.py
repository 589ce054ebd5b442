"""Help: what `--help` prints, from the declarations of settings and the first comment lines of config files."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_rl.settings.command_line import program
from grpo_rl.settings.compose import FOLDER, OWN
from grpo_rl.settings.declaration import REQUIRED, Setting, plain, unknown
from grpo_rl.settings.imitation import is_read
from grpo_rl.settings.schema import UNSET
from grpo_rl.settings.sections import Sections, declarations
from grpo_rl.storage.dotted import flat

FLAGS = ("--help", "-h")
FIRST = (
    "model.name",
    "env.dataset",
    "env.path",
    "env.eval_path",
    "env.num_envs",
    "env.repeats",
    "sampling.max_new_tokens",
    "train.total_dialog_turns",
    "train.optim_batch_size",
    "optimizer.lr",
    "policy.kl_coef",
    "evaluate.rows",
    "resume",
)
"""The settings that people change first; of SFT, those of them that it reads."""
FIRST_IN_SFT = {"train.total_dialog_turns": "train.epochs"}
"""SFT's own settings, in the place of some of them."""
EXAMPLES = {
    "+experiment=quickstart": "a small model learns in minutes, on a laptop too",
    "model.name=Qwen/Qwen2.5-0.5B-Instruct env.path=train.jsonl optimizer.lr=1e-6": "your model, your problems",
    "env.dataset=countdown loss=dr_grpo": "another task, another loss",
    "--config-dir configs --config-name mine": "configs/mine.yaml, which begins with `defaults: [grpo_gsm8k, _self_]`",
    "--multirun optimizer.lr=1e-6,1e-5": "a sweep",
    "resume=auto": "go on with the newest run of this config",
}
EXAMPLES_OF_SFT = {
    "+experiment=quickstart_sft": "a small model imitates the solutions of word problems in minutes, on a laptop too",
    "model.name=Qwen/Qwen2.5-0.5B env.path=train.jsonl optimizer.lr=1e-5 train.epochs=2": "your model, your solutions",
    "env.dataset=prompt_response env.path=chats.jsonl": "conversations, of which the last message is imitated",
    "--multirun optimizer.lr=1e-6,1e-5": "a sweep",
    "resume=auto": "go on with the newest run of this config",
}
MORE = {
    "--help optimizer": "the settings of a section, explained; --help optimizer.lr: one of them",
    "--cfg job": "the config of a command line, without running it; docs/settings.md explains all",
    "--hydra-help": "Hydra's own options, such as --multirun and --config-dir",
}
SECTIONS = {
    "env.reward": "A response earns the sum of its reward's parts, each times its weight; 0 leaves it out. Each "
    "step logs the weighted parts as reward/PART. The parts differ from task to task: env.dataset=math --help "
    "env.reward shows those of another. Functions of your own score the prompts of env.dataset=prompt_response; "
    "several are a list, each with weight 1, or a mapping of each to its weight, which in a shell needs a backslash: "
    "'env.reward={my_rewards\\:short: 1, my_rewards\\:polite: 0.5}'. env.rewards adds parts to any task.",
}
"""Explanations of sections that lie in others."""
LONGEST_DEFAULT = 24
"""Characters of a task's default that is shown; a longer one is left to the task's config file."""
_CLAUSES = re.compile(r"(.*\w\)?)[,;.]( |$)")
_LINK = re.compile(r"\s*\(https?://[^)]*\)|:\s*(https?://|github\.com/).*")


def topic(arguments: Sequence[str]) -> str | None:
    """The topic that a command line asks help on: a section, a key, or ``""`` for all; None: it asks for none.

    >>> topic(["--help", "optimizer"]), topic(["loss=dapo", "-h"]), topic(["loss=dapo"])
    ('optimizer', '', None)
    """
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if word in FLAGS:
            return "" if "=" in following or following.startswith(("-", "+", "~")) else following
    return None


def help_text(
    about: str,
    says: str,
    config_name: str,
    folders: Sequence[Path],
    dataset: str | None = None,
    mode: str = "sync",
) -> str:
    """The help on a section or key, or on the script itself.

    Args:
        about: what :func:`topic` gives.
        says: the script's docstring, whose first paragraph is shown.
        config_name: its default config.
        folders: the folders with configs: the project's, and the user's.
        dataset: the task whose settings are shown beside those of all tasks.
        mode: the script's.

    Raises:
        ValueError: there is no such section or key; with the nearest.
    """
    lines = _settings(about, dataset) if about else _overview(says, config_name, folders, mode)
    return "\n".join(lines)


def _overview(says: str, config_name: str, folders: Sequence[Path], mode: str) -> Iterator[str]:
    command, sft = " ".join(program(mode)), mode == "sft"
    first = [key for key in (FIRST_IN_SFT.get(key, key) if sft else key for key in FIRST) if not sft or is_read(key)]
    yield says
    yield ""
    yield f"usage: {command} [KEY=VALUE ...] [+experiment=RECIPE] [--config-name NAME (now {config_name})]"
    known = declarations(None)
    yield from _block("Settings that people change first, with their defaults:", _pairs(first, known, {}), 40)
    yield from _block("Recipes, +experiment=NAME:", _members("experiment", folders), shortened=True)
    tasks = [("package.module:Class" if name == OWN else name, says) for name, says in _members("env", folders)]
    yield from _block("Tasks, env.dataset=NAME:", tasks)
    if not sft:
        yield from _block("Losses, loss=NAME:", _members("loss", folders))
    examples = EXAMPLES_OF_SFT if sft else EXAMPLES
    yield from _block("Examples:", [(f"{command} {words}", says) for words, says in examples.items()], 76)
    yield from _block("More:", MORE.items())


def _settings(about: str, dataset: str | None) -> Iterator[str]:
    known = declarations(dataset)
    keys = [key for key in known if key == about or key.startswith(f"{about}.")]
    if not keys:
        sections = list(dict.fromkeys(key.rpartition(".")[0] for key in known if "." in key))
        raise ValueError(unknown("section or setting", about, [*sections, *known] if "." in about else sections))
    if section := Sections.__dataclass_fields__.get(about):
        makes = section.default_factory
        yield f"{about}: {makes.__doc__}" if isinstance(makes, type) else about
    elif about in SECTIONS:
        width = min(shutil.get_terminal_size((120, 24)).columns, 120)
        yield from textwrap.wrap(f"{about}: {SECTIONS[about]}", width, break_on_hyphens=False)
    yield from _block("", _pairs(keys, known, _of_task(dataset)), 40)


def _of_task(dataset: str | None) -> dict[str, Any]:
    """The defaults in the config of one of the project's tasks, by dotted name, without those too long for a line."""
    path = FOLDER / "env" / f"{dataset}.yaml"
    values = flat({"env": OmegaConf.to_container(OmegaConf.load(path))}) if path.is_file() else {}
    return {key: value for key, value in values.items() if value != UNSET and len(str(value)) <= LONGEST_DEFAULT}


def _pairs(keys: Iterable[str], known: dict[str, Setting], of_task: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each setting with its default, and what it means with its range."""
    pairs = []
    for key in keys:
        setting = known[key]
        if setting.default is REQUIRED and key not in of_task:
            pairs.append((key, setting.comment))
            continue
        default = of_task[key] if setting.default is REQUIRED else setting.default
        default = default if isinstance(default, str) else json.dumps(plain(default), default=str, skipkeys=True)
        limits = f" ({setting.bounds})" if setting.bounds else ""
        pairs.append((f"{key}={default}", setting.comment + limits))
    return pairs


def _members(group: str, folders: Sequence[Path]) -> list[tuple[str, str]]:
    """Each config of a group with its first comment, without links."""
    files: dict[str, Path] = {}
    for path in (path for folder in folders for path in sorted((folder / group).glob("*.yaml"))):
        files.setdefault(path.stem, path)  # Hydra, too, reads the first of a name
    return [(name, _first_comment(path)) for name, path in files.items()]


def _first_comment(path: Path) -> str:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return _LINK.sub("", line.lstrip("# ")).rstrip(" :,")
    return ""


def _block(title: str, pairs: Iterable[tuple[str, str]], column: int = 22, shortened: bool = False) -> Iterator[str]:
    """A table of two columns under a title; a left side that is too long has a line of its own.

    With ``shortened`` a right side ends with the last of its clauses that its first line has room for.
    """
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    column = min(column, width // 2)
    if title:
        yield f"\n{title}"
    for left, right in pairs:
        start = f"  {left}".ljust(column)
        if len(start) > column:
            yield start
            start = " " * column
        text = textwrap.wrap(right, width - column - 1, break_long_words=False) or [""]
        if shortened and len(text) > 1 and (clauses := _CLAUSES.match(text[0])):
            text = [clauses[1]]
        yield f"{start} {text[0]}".rstrip()
        yield from (" " * (column + 1) + line for line in text[1:])
