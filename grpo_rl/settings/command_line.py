"""The words of a command line, before Hydra reads them: options, their values, and overrides."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

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
LONGEST = 200_000
"""Characters of an override. Linux takes words of 131,071; Hydra's parser takes 20 s for a megabyte."""
DEEPEST = 50
"""Levels of an override, of its key and its value together: at 90, Hydra's merging ends in Python's limit."""
QUOTED = re.compile(r"'(?:\\.|[^'\\])*'?|\"(?:\\.|[^\"\\])*\"?|\\.", re.DOTALL)
"""Parts of an override whose brackets do not count: a text in quotes, and a character behind a backslash."""
INTERPOLATION = re.compile(r"\$\{|\}")
BRACKET = re.compile(r"[][(){}]")
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
        ValueError: see :func:`check_size`, or an integer has more digits than Python reads.
    """
    check_size(word)
    try:
        return OverridesParser.create().parse_overrides([word])[0]
    except ValueError as error:  # of int(), the one call of the parser that raises it
        digits = f"{sys.get_int_max_str_digits():,}"
        raise ValueError(f"{_key(word)}: an integer has more than {digits} digits; write a shorter one") from error


def check_size(word: str) -> None:
    """Raises ValueError where a word is so long or so nested that Hydra takes long for it, or ends in its recursion.

    >>> check_size("optimizer.lr=" + "[" * 60)
    Traceback (most recent call last):
    ValueError: optimizer.lr: its key and value have more than 50 levels together; flatten the value
    """
    if len(word) > LONGEST:
        most = f"{LONGEST:,} are the most; put longer values into a config file"
        raise ValueError(f"{_key(word)}: {len(word):,} characters are too many for an override, {most}")
    levels = [_levels(BRACKET.findall(QUOTED.sub("", word)))]
    levels += [_levels(INTERPOLATION.findall(quoted)) for quoted in QUOTED.findall(word)]
    if max(levels) + word.partition("=")[0].count(".") > DEEPEST:
        raise ValueError(f"{_key(word)}: its key and value have more than {DEEPEST} levels together; flatten the value")


def _levels(brackets: Iterable[str]) -> int:
    """How many of the brackets are open at once, at most."""
    opened = deepest = 0
    for bracket in brackets:
        opened = max(opened + (1 if bracket[-1] in "([{" else -1), 0)
        deepest = max(deepest, opened)
    return deepest


def _key(word: str) -> str:
    """The override's key, with which a message begins; a word without one is not shown, as it may be a secret."""
    key, equals, _ = word.partition("=")
    return key.lstrip("+~")[:80] if equals else "an override"
