"""The words of a command line, before Hydra reads them: options, their values, and overrides."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser

MODES = {"--async": "grpo_async", "--sft": "sft"}
"""The script in sota/ of each option of `grpo-rl train`, and the function in it; without one it is ``grpo``."""
typed: list[str] = []
"""The command line of this process's run as typed; of a job of a sweep, its own; empty outside of one."""


def program(mode: str) -> list[str]:
    """The words before the overrides of this command line: a script's, or those of `grpo-rl`."""
    name = Path(sys.argv[0]).name
    if name in ("grpo-rl", "cli.py"):  # installed, and as `python -m grpo_rl.cli`
        return ["grpo-rl", "train", *([] if mode == "sync" else [f"--{mode}"])]
    return ["python", sys.argv[0]] if name.endswith(".py") else [name]


def overrides() -> list[str]:
    """The overrides of this process's run, as typed; without Hydra's own, such as the run's folder."""
    _, words = divided([word for word in typed[2 if typed[:1] == ["python"] else 1 :] if word not in MODES])
    return [word for word in words if not word.startswith("hydra")]


def divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options with their values, and the overrides.

    >>> divided(["loss=dapo", "--config-dir", "lr=1/conf", "-m", "~logger"])
    (['--config-dir', 'lr=1/conf', '-m'], ['loss=dapo', '~logger'])
    """
    overrides = [word for word in hydra_options(arguments).overrides if "=" in word or word.startswith("~")]
    options = list(arguments)
    for word in overrides:
        options.remove(word)
    return options, overrides


def arranged(arguments: Sequence[str]) -> list[str]:
    """The arguments with options first: Hydra takes overrides from one place only.

    >>> arranged(["loss=dapo", "--multirun", "optimizer.lr=1e-6,1e-5", "--config-name", "mine"])
    ['--multirun', '--config-name', 'mine', 'loss=dapo', 'optimizer.lr=1e-6,1e-5']
    """
    options, overrides = divided(arguments)
    return options + overrides


def hydra_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The words as Hydra's own parser reads them: ``config_name``, ``config_dir``, ``overrides`` and so on."""
    return get_args_parser().parse_known_intermixed_args(list(arguments))[0]
