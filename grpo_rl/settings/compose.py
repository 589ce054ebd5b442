"""Composes a config with Hydra from the project's files and a command line's overrides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

import grpo_rl.config
from grpo_rl.settings.declaration import plain, select
from grpo_rl.settings.schema import Settings, check_keys
from grpo_rl.settings.tasks import TASKS

FOLDER = Path(grpo_rl.config.__path__[0]).resolve()
DEFAULT_CONFIG = "grpo_gsm8k"
OF_A_LOSS = ("policy.kl_coef", "policy.entropy_coef")
"""Keys beside those of ``loss`` that a replay can change."""
GROUPS = ("env", "loss", "experiment")
"""Config groups: chosen by name (``loss=grpo``), not keys of their own."""


def check_overrides(arguments: Sequence[str], dataset: str | None = None) -> None:
    """Checks the command line's overrides by name, since Hydra's own message suggests no nearest key.

    Raises:
        ValueError: an unknown key.
    """
    names = []
    for word in arguments:
        if "=" not in word or word.startswith(("-", "~")):
            continue
        try:
            name = OverridesParser.create().parse_override(word).key_or_group
        except HydraException:
            continue  # Hydra explains these itself
        # A slash, or Hydra's own section, is a group: `hydra/launcher=...`.
        if "/" not in name and name.split(".")[0] != "hydra" and name not in GROUPS:
            names.append(name)
    check_keys(names, dataset)


def dataset_of(arguments: Sequence[str], config_name: str) -> str | None:
    """The task that a command line chooses, by its overrides or its config; None if they don't determine it.

    >>> dataset_of(["env=ifeval", "optimizer.lr=1"], "grpo_gsm8k"), dataset_of([], "grpo_gsm8k")
    ('ifeval', 'gsm8k')
    >>> dataset_of(["env=ifeval,gsm8k"], "grpo_gsm8k"), dataset_of(["--config-name", "mine"], "grpo_gsm8k")
    (None, None)
    >>> dataset_of(["--config-name=grpo_math"], "grpo_gsm8k"), dataset_of(["+experiment=mine"], "grpo_gsm8k")
    ('math', None)
    """
    name = config_name.removeprefix("grpo_")
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        option, _, value = word.partition("=")
        if option in ("--config-name", "-cn"):
            name = (value or following).removeprefix("grpo_")
        if option.lstrip("+") == "experiment":
            return None  # an experiment may choose a task
    for word in arguments:
        if word.startswith("env="):
            name = word.removeprefix("env=")
    return name if name in TASKS else None


def choosing_configs(arguments: Sequence[str]) -> list[str]:
    """The arguments with a task named by its config: it brings its own keys.

    >>> choosing_configs(["env.dataset=math", "optimizer.lr=1"])
    ['env=math', 'optimizer.lr=1']
    """
    return [re.sub(r"^\+{0,2}env\.dataset=", "env=", word) for word in arguments]


def compose_config(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """The config that a script would get from these arguments; not checked beyond the names of its keys.

    Raises:
        ValueError: an unknown key.
        HydraException: an unknown config, or an override that Hydra can't read.

    >>> compose_config("grpo_gsm8k", ["env.dataset=countdown", "env.repeats=16"]).env.repeats
    16
    """
    words = choosing_configs(overrides)
    check_overrides(words, dataset_of(words, config_name))
    # A script that Hydra runs has a loader already, of the same folder, and must keep it.
    running = GlobalHydra.instance().is_initialized()
    with nullcontext() if running else initialize_config_dir(str(FOLDER), version_base="1.3"):
        return compose(config_name, overrides=words)


def with_loss(settings: Settings, overrides: Sequence[str]) -> Settings:
    """A run's settings with another loss.

    Raises:
        ValueError: an override that has no part in a loss, or settings that don't go together.
        HydraException: an unknown preset, or an override that Hydra can't read.
    """
    keys = [word.lstrip("+").partition("=")[0] for word in overrides]
    if others := [key for key in keys if key != "loss" and not key.startswith("loss.") and key not in OF_A_LOSS]:
        raise ValueError(
            f"{others[0]} has no part in the loss of responses that are there already; a replay takes loss=NAME, "
            f"loss.KEY=VALUE, {' and '.join(OF_A_LOSS)}"
        )
    chosen = compose_config(DEFAULT_CONFIG, overrides)
    changed = OmegaConf.create({name: plain(settings[name]) for name in ("loss", "policy")})
    for key in sorted(keys, key=len):  # a preset first, and single settings over it
        OmegaConf.update(changed, key, OmegaConf.select(chosen, key), merge=False)
    # The loss alone, in a config in which all else is in order: the run's own may ask for what this machine lacks.
    checked = compose_config(DEFAULT_CONFIG, [])
    for key in ("loss", *OF_A_LOSS):
        OmegaConf.update(checked, key, OmegaConf.select(changed, key), merge=False)
    loss = Settings.read(checked)
    return settings.with_values({key: select(loss, key) for key in ("loss", *OF_A_LOSS)})
