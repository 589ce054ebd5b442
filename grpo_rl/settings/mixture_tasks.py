"""The settings of each task of a mixture, as a run of that task alone would have them."""

from __future__ import annotations

import re

from omegaconf import OmegaConf

from grpo_rl.settings.compose import DEFAULT_CONFIG, compose_config
from grpo_rl.settings.declaration import plain
from grpo_rl.settings.mixture import SHARED, entries
from grpo_rl.settings.schema import Settings


def settings_of_tasks(settings: Settings) -> dict[str, Settings]:
    """The settings of each task of ``env.mixture``: its own, and the mixture's where it gives none.

    Raises:
        ValueError: settings of a task are wrong, told under the names that they have in the mixture.
    """
    return {name: _of_task(settings, name) for name in entries(settings)}


def _of_task(settings: Settings, name: str) -> Settings:
    entry = entries(settings)[name]
    try:
        cfg = compose_config(DEFAULT_CONFIG, [f"env.dataset={entry.dataset}"])
        for section in ("sampling", "inference_model", "model"):
            OmegaConf.update(cfg, section, plain(settings[section]), merge=False)
        for key in SHARED:
            OmegaConf.update(cfg, f"env.{key}", plain(settings.env[key]), merge=False)
        # Those of an entry are its own, whole: merged, it would have the mixture's rewards beside them.
        for key in (key for key in SHARED if key in entry.env):
            OmegaConf.update(cfg, f"env.{key}", plain(entry.env[key]), merge=False)
        own = {key: value for key, value in entry.env.items() if key not in SHARED}
        OmegaConf.update(cfg, "env", plain(own), merge=True, force_add=True)
        for key, value in {"train.seed": settings.train.seed, "mode": settings.mode}.items():
            OmegaConf.update(cfg, key, value)
        OmegaConf.update(cfg, "evaluate.rows", settings.evaluate.rows)
        return Settings.read(cfg, divides=False)
    except ValueError as error:
        raise ValueError(named(name, error)) from error


def named(name: str, error: Exception) -> str:
    """The message of an error about a task of a mixture, with its settings under the names that they have there."""
    told = re.sub(r"(?<![\w.])env\.(?!mixture\b)", f"env.mixture.{name}.", str(error))
    return told if f"env.mixture.{name}" in told else f"env.mixture.{name}: {told}"
