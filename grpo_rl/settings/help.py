"""Help: what `--help` prints, from the declarations of settings and the first comment lines of config files."""

import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_rl.losses.factors import Loss
from grpo_rl.section import REQUIRED, Setting, declared, is_section, plain, select, unknown
from grpo_rl.settings.compose import DEFAULT_CONFIG, OWN, compose_config, program
from grpo_rl.settings.relations import is_read
from grpo_rl.settings.schema import UNSET
from grpo_rl.settings.sections import Sections, declarations

FIRST = (
    "model.name", "env.dataset", "env.path", "env.eval_path", "env.num_envs", "env.repeats", "sampling.max_new_tokens",
    "train.steps", "train.total_dialog_turns", "train.epochs", "train.optim_batch_size", "optimizer.lr",
    "policy.kl_coef", "evaluate.rows", "resume",
)  # fmt: skip
"""The settings that people change first; of SFT, those of them that it reads."""
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


def topic(arguments: Sequence[str]) -> str | None:
    """The topic that a command line asks help on: a section, a key, or ``""`` for all; None: it asks for none.

    >>> topic(["--help", "optimizer"]), topic(["loss=dapo", "-h"]), topic(["loss=dapo"])
    ('optimizer', '', None)
    """
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if word in ("--help", "-h"):
            return "" if "=" in following or following.startswith(("-", "+", "~")) else following
    return None


def help_text(
    about: str, summary: str, config_name: str, folders: Sequence[Path], dataset: str | None = None, mode: str = "sync"
) -> str:
    """The help on a section or key, or on the script itself, by :func:`topic`; an unknown one is a ValueError.

    Args:
        summary: the first paragraph of the script's docstring.
        dataset: the task whose settings are shown next to those of all tasks.
    """
    lines = _settings(about, dataset) if about else _overview(summary, config_name, folders, mode)
    return "\n".join(lines)


def _overview(summary: str, config_name: str, folders: Sequence[Path], mode: str) -> Iterator[str]:
    command, sft = " ".join(program(mode)), mode == "sft"
    yield summary
    yield ""
    yield f"usage: {command} [KEY=VALUE ...] [+experiment=RECIPE] [--config-name NAME (now {config_name})]"
    first = [key for key in FIRST if not sft or is_read(key)]
    yield from _block("Settings that people change first, with their defaults:", _described(first, declared(Sections)))
    for title, group in {"Recipes, +experiment=NAME:": "experiment", "Tasks, env.dataset=NAME:": "env"}.items():
        yield from _block(title, _members(group, folders), 22)
    if not sft:
        yield from _block("Losses, loss=NAME:", _members("loss", folders), 22)
    examples = EXAMPLES_OF_SFT if sft else EXAMPLES
    yield from _block("Examples:", {f"{command} {words}": summary for words, summary in examples.items()}, 76)
    yield from _block("More:", MORE, 22)


def _settings(about: str, dataset: str | None) -> Iterator[str]:
    # The losses import torch, which takes seconds.
    known = declarations(dataset, None if about.startswith("loss") else Loss)
    keys = [key for key in known if key == about or key.startswith(f"{about}.")]
    if not keys:
        sections = list(dict.fromkeys(key.rpartition(".")[0] for key in known if "." in key))
        raise ValueError(unknown("section or setting", about, [*sections, *known] if "." in about else sections))
    section = getattr(Sections.model_fields.get(about), "annotation", None)
    if summary := SECTIONS.get(about) or (section.__doc__ if is_section(section) else None):
        yield textwrap.fill(f"{about}: {summary}", _width(), break_on_hyphens=False)
    values = compose_config(DEFAULT_CONFIG, [f"env.dataset={dataset}"]) if dataset else {}
    yield from _block("", _described(keys, known, OmegaConf.to_container(values) if dataset else {}))


def _described(keys: Iterable[str], known: Mapping[str, Setting], values: Any = None) -> dict[str, str]:
    """Each setting with its value, or its default, and what it means with its range."""
    found = {}
    for key in keys:
        setting, value = known[key], select(values or {}, key, known[key].default)
        text = value if isinstance(value, str) else json.dumps(plain(value), default=str)
        shown = value not in (REQUIRED, UNSET) and len(text) <= 40  # a longer one is left to the config file
        limits = f" ({setting.bounds})" if setting.bounds else ""
        free = "; a resumed run may change it" if setting.may_change else ""
        found[f"{key}={text}" if shown else key] = setting.comment + limits + free
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
