"""Help: what `--help` prints, from the declarations of settings and the first comment lines of config files."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_rl.settings.command_line import divided, hydra_options, program
from grpo_rl.settings.compose import OWN, compose_config
from grpo_rl.settings.declaration import REQUIRED, Setting, plain, select, unknown
from grpo_rl.settings.imitation import is_read
from grpo_rl.settings.schema import UNSET
from grpo_rl.settings.sections import Sections, declarations

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
    "train.epochs",
    "train.optim_batch_size",
    "optimizer.lr",
    "policy.kl_coef",
    "evaluate.rows",
    "resume",
)
"""The settings that people change first; of SFT, those of them that it reads."""
EXAMPLES = {
    "model.name=Qwen/Qwen2.5-0.5B-Instruct env.path=train.jsonl optimizer.lr=1e-6": "your model, your data",
    "--config-dir configs --config-name mine": "configs/mine.yaml, which begins with `defaults: [grpo_gsm8k, _self_]`",
    "--multirun optimizer.lr=1e-6,1e-5": "a sweep",
    "resume=auto": "go on with the newest run of this config",
}
MORE = {
    "--help optimizer": "the settings of a section, explained; --help optimizer.lr: one of them",
    "--cfg job": "the config of a command line, without running it; docs/settings.md explains all",
    "--hydra-help": "Hydra's own options, such as --multirun and --config-dir",
}


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
    about: str, summary: str, config_name: str, arguments: Sequence[str], folders: Sequence[Path], mode: str
) -> str:
    """The help on a section or setting, with the values of a command line; where ``about`` is empty, on the script.

    Raises:
        ValueError: there is no such section or setting; with the nearest; or the command line can't be read.
    """
    _, overrides = divided(arguments)
    chosen = hydra_options(arguments).config_name or config_name
    values = OmegaConf.to_container(compose_config(chosen if len(folders) == 1 else config_name, overrides))
    lines = _settings(about, values) if about else _overview(summary, config_name, values, folders, mode)
    return "\n".join(lines)


def _overview(summary: str, config_name: str, values: Any, folders: Sequence[Path], mode: str) -> Iterator[str]:
    command = " ".join(program(mode))
    yield f"{summary}\n\nusage: {command} [KEY=VALUE ...] [+experiment=RECIPE] [--config-name NAME (now {config_name})]"
    first = [key for key in FIRST if mode != "sft" or is_read(key)]
    yield from _block("Settings that people change first:", _described(first, declarations(None), values))
    groups = {"Recipes, +experiment=NAME:": "experiment", "Tasks, env.dataset=NAME:": "env"}
    for title, group in (groups if mode == "sft" else groups | {"Losses, loss=NAME:": "loss"}).items():
        yield from _block(title, _members(group, folders), 22)
    recipe = "+experiment=quickstart_sft" if mode == "sft" else "+experiment=quickstart"
    examples = {recipe: "a small model learns in minutes, on a laptop too", **EXAMPLES}
    yield from _block("Examples:", {f"{command} {words}": meaning for words, meaning in examples.items()}, 76)
    yield from _block("More:", MORE, 22)


def _settings(about: str, values: Any) -> Iterator[str]:
    dataset = select(values, "env.dataset")
    known = declarations(None if dataset == UNSET else dataset)
    keys = [key for key in known if key == about or key.startswith(f"{about}.")]
    if not keys:
        sections = list(dict.fromkeys(key.rpartition(".")[0] for key in known if "." in key))
        raise ValueError(unknown("section or setting", about, [*sections, *known] if "." in about else sections))
    makes = getattr(Sections.__dataclass_fields__.get(about), "default_factory", None)
    if isinstance(makes, type):
        yield textwrap.fill(f"{about}: {makes.__doc__}", _width(), break_on_hyphens=False)
    yield from _block("", _described(keys, known, values))


def _described(keys: Iterable[str], known: Mapping[str, Setting], values: Any) -> dict[str, str]:
    """Each setting with its value, unless that is long, and what it means with its range."""
    found = {}
    for key in keys:
        value = select(values, key, known[key].default)
        text = value if isinstance(value, str) else json.dumps(plain(value), default=str)
        shown = value not in (REQUIRED, UNSET) and len(text) <= 40
        limits = f" ({known[key].bounds})" if known[key].bounds else ""
        found[f"{key}={text}" if shown else key] = known[key].comment + limits
    return found


def _members(group: str, folders: Sequence[Path]) -> dict[str, str]:
    """Each config of a group with its first comment, cut to a line."""
    files: dict[str, Path] = {}
    for path in (path for folder in folders for path in sorted((folder / group).glob("*.yaml"))):
        files.setdefault("package.module:Class" if path.stem == OWN else path.stem, path)  # Hydra reads the first, too
    return {name: textwrap.shorten(_first_comment(path), _width() - 24) for name, path in files.items()}


def _first_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    summary = (line for line in lines if line.startswith("#") and not line.startswith("# @package"))
    return next(summary, "").lstrip("# ").rstrip(" :,")


def _width() -> int:
    return min(shutil.get_terminal_size((120, 24)).columns, 120)


def _block(title: str, pairs: Mapping[str, str], column: int = 40) -> Iterator[str]:
    """A table of two columns under a title; a left side that is too long has a line of its own."""
    if title:
        yield f"\n{title}"
    column = min(column, _width() // 2)
    for left, right in pairs.items():
        start = f"  {left}".ljust(column)
        if len(start) > column:
            yield start
            start = " " * column
        first, *rest = textwrap.wrap(right, _width() - column - 1, break_long_words=False) or [""]
        yield f"{start} {first}".rstrip()
        yield from (" " * (column + 1) + line for line in rest)
