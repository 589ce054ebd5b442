"""The words of a command line, before Hydra reads them: options, their values, and overrides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

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
