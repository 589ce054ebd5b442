"""One line for a config that can't be composed: the library's own message, or the nearest name that exists."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from grpo_rl.storage.masking import MASK, is_secret, masked_text

KINDS = {"": "config", "env": "task", "experiment": "recipe"}
"""The word for a member of each config group, where it is not the group's name; ``""``: files of the folder itself."""
OWN = "own"
"""The config of ``env`` behind ``env.task=module:Class``, which is never chosen by its name."""
OF_COMPOSING = (HydraException, OmegaConfBaseException, yaml.YAMLError)
"""The errors of the libraries that read and compose configs."""
AT_KEY = re.compile(r"\s+full_key: (\S*)(?:\s+object_type=\w+)?")
"""The end of OmegaConf's message."""


def explained(error: Exception, folders: Iterable[Path] = ()) -> str:
    """An error of :data:`OF_COMPOSING` as one line without secrets.

    Args:
        folders: the folders with configs, whose names are offered for an unknown ``--config-name``.
    """
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        known = error.options or sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
        return unknown(KINDS.get(group, group), name, [member for member in known if (group, member) != ("env", OWN)])
    messages = [error.override] if isinstance(error, OverrideParseException) else []
    if messages and is_secret(key := messages[0].partition("=")[0]):  # Hydra quotes a part of the value
        return f"{key}={MASK} is no override of Hydra's; put its value into quotes"
    messages += [AT_KEY.sub(r" (\1)", str(found)) for found in (error, error.__cause__) if found]
    return masked_text(": ".join(dict.fromkeys(" ".join(text.split()) for text in messages if text)))


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The line about a name that does not exist.

    >>> unknown("loss", "drgrpo", ["dapo", "dr_grpo"])
    "unknown loss 'drgrpo'; did you mean dr_grpo? (all: dapo, dr_grpo)"
    >>> unknown("recipe", "x", [])
    "unknown recipe 'x'; there is none"
    """
    known = list(known)
    if not known:
        return f"unknown {kind} {name!r}; there is none"
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean {close[0]}? (all: {', '.join(known)})" if close else f"choose one of {', '.join(known)}"
    return f"unknown {kind} {name!r}; {guess}"
