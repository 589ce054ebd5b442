"""The words of a command line, before Hydra reads them: options, their values, and overrides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override

from grpo_rl.settings.composing_errors import unknown

OPTIONS = {
    "--help": "-h", "--hydra-help": "", "--version": "", "--cfg": "-c", "--resolve": "", "--package": "-p",
    "--run": "-r", "--multirun": "-m", "--shell-completion": "-sc", "--config-path": "-cp", "--config-name": "-cn",
    "--config-dir": "-cd", "--experimental-rerun": "", "--info": "-i",
}  # fmt: skip
"""Hydra's options, with their short names."""
TAKE_VALUES = {"--cfg", "--package", "--config-path", "--config-name", "--config-dir", "--experimental-rerun"}
MODES = {"--async": "grpo_async", "--sft": "sft"}
"""The script in sota/ of each option of `grpo-rl train`, and the function in it; without one it is ``grpo``."""
GRPO_RL = ("grpo-rl", "cli.py")
"""The names under which `grpo-rl` itself runs: installed, and as `python -m grpo_rl.cli`."""
LONGEST, DEEPEST = 131_072, 50
"""Characters of an override (Linux takes no longer word; Hydra's time for a megabyte is 20 s), and levels of its value:
Hydra's merging ends in Python's limit of recursion at 90."""
typed: list[str] = []
"""The command line of this process's run as typed, before tasks give way to their configs; empty outside of one."""


def program(mode: str) -> list[str]:
    """The words before the overrides of this command line: a script's, or those of `grpo-rl`."""
    name = Path(sys.argv[0]).name
    if name in GRPO_RL:
        return ["grpo-rl", "train", *([] if mode == "sync" else [f"--{mode}"])]
    return ["python", sys.argv[0]] if name.endswith(".py") else [name]


def arranged(arguments: Sequence[str]) -> list[str]:
    """The arguments with options first: argparse takes overrides from one place only.

    Raises:
        ValueError: an option is unknown; with the nearest, or how a value that begins with a dash is written.

    >>> arranged(["loss=dapo", "--multirun", "optimizer.lr=1e-6,1e-5", "--config-name", "mine"])
    ['--multirun', '--config-name', 'mine', 'loss=dapo', 'optimizer.lr=1e-6,1e-5']
    """
    takes = TAKE_VALUES | {OPTIONS[name] for name in TAKE_VALUES} - {""}
    options, overrides = [], []
    for before, word in zip(["", *arguments], arguments, strict=False):
        if before in takes:
            options.append(word)
        elif word.startswith("-"):
            if word.partition("=")[0] not in {*OPTIONS, *OPTIONS.values()}:
                modes = MODES if Path(sys.argv[0]).name in GRPO_RL else {}
                raise ValueError(unknown("option", word.partition("=")[0], [*modes, *OPTIONS]))
            options.append(word)
        else:
            # What `--info` and `--help` take is optional; an override has an equals sign, or deletes.
            of_option = before in ("--info", "-i", "--help", "-h") and "=" not in word and not word.startswith("~")
            (options if of_option else overrides).append(word)
    return options + overrides


def option(arguments: Sequence[str], name: str) -> str | None:
    """The last value of an option; None if it is not given.

    >>> option(["--config-name", "mine"], "--config-name"), option(["-cn=yours"], "--config-name")
    ('mine', 'yours')
    """
    found = None
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        given, _, value = word.partition("=")
        if given in (name, OPTIONS[name]):
            found = value or following
    return found


def parsed(word: str) -> Override:
    """An override as Hydra reads it.

    Raises:
        HydraException: Hydra's grammar does not take it.
        ValueError: it is longer than 131,072 characters, an integer has more digits than Python reads, or a value more
            than 50 levels.
    """
    check_length(word)
    try:
        override = OverridesParser.create().parse_overrides([word])[0]
        too_deep = _levels(override.value()) > DEEPEST
    except ValueError as error:
        digits = f"{sys.get_int_max_str_digits():,}"
        raise ValueError(f"{_key(word)}: an integer has more than {digits} digits; write a shorter one") from error
    except RecursionError:
        too_deep = True
    if too_deep:
        raise ValueError(f"{_key(word)}: the value has more than {DEEPEST} levels of lists and mappings; flatten it")
    return override


def check_length(word: str) -> None:
    """Raises ValueError where Hydra would take long to read a word, or even to refuse it."""
    if len(word) > LONGEST:
        raise ValueError(
            f"{_key(word)}: an override of {len(word):,} characters is too long; give {LONGEST:,} at most, and more in "
            "a config file (--config-dir)"
        )


def _levels(value: Any) -> int:
    values = value.list if isinstance(value, ChoiceSweep) else value.values() if isinstance(value, dict) else value
    return 1 + max(map(_levels, values), default=0) if isinstance(value, ChoiceSweep | dict | list) else 0


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")[:80]
