"""The words of a command line, before Hydra reads them: options, their values, and overrides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

MODES = {"--async": "grpo_async", "--sft": "sft"}
"""The script in sota/ of each option of `grpo-rl train`, and the function in it; without one it is ``grpo``."""
GRPO_RL = ("grpo-rl", "cli.py")
"""The names under which `grpo-rl` itself runs: installed, and as `python -m grpo_rl.cli`."""
TAKE_VALUES = ("--config-name", "--config-dir", "--config-path", "--package", "-cn", "-cd", "-cp", "-p")
"""Hydra's options whose value is the next word, whatever it looks like."""
typed: list[str] = []
"""The command line of this process's run as typed; of a job of a sweep, its own; empty outside of one."""


def program(mode: str) -> list[str]:
    """The words before the overrides of this command line: a script's, or those of `grpo-rl`."""
    name = Path(sys.argv[0]).name
    if name in GRPO_RL:
        return ["grpo-rl", "train", *([] if mode == "sync" else [f"--{mode}"])]
    return ["python", sys.argv[0]] if name.endswith(".py") else [name]


def overrides() -> list[str]:
    """The overrides of this process's run, as typed; without Hydra's own, such as the run's folder."""
    _, words = divided(typed[2 if typed[:1] == ["python"] else 1 :])
    return [word for word in words if not word.startswith("hydra")]


def divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options with their values, and the overrides.

    >>> divided(["loss=dapo", "--config-dir", "lr=1/conf", "-m", "~logger"])
    (['--config-dir', 'lr=1/conf', '-m'], ['loss=dapo', '~logger'])
    """
    options, rest = [], []
    for before, word in zip(["", *arguments], arguments, strict=False):
        is_override = before not in TAKE_VALUES and not word.startswith("-") and ("=" in word or word.startswith("~"))
        (rest if is_override else options).append(word)
    return options, rest


def arranged(arguments: Sequence[str]) -> list[str]:
    """The arguments with options first: argparse takes overrides from one place only.

    >>> arranged(["loss=dapo", "--multirun", "optimizer.lr=1e-6,1e-5", "--config-name", "mine"])
    ['--multirun', '--config-name', 'mine', 'loss=dapo', 'optimizer.lr=1e-6,1e-5']
    """
    options, rest = divided(arguments)
    return options + rest


def option(arguments: Sequence[str], name: str, short: str) -> str | None:
    """The last value of an option; None if it is not given.

    >>> option(["--config-name", "mine"], "--config-name", "-cn"), option(["-cn=yours"], "--config-name", "-cn")
    ('mine', 'yours')
    """
    found = None
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        given, _, value = word.partition("=")
        if given in (name, short):
            found = value or following
    return found
