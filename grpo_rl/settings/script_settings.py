"""Settings of a script that Hydra runs, checked for it and this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from grpo_rl.settings.compose import FOLDER
from grpo_rl.settings.machine import check_machine
from grpo_rl.settings.relations import SCRIPTS
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.task_settings import settings_of_eval_tasks, settings_of_mixture
from grpo_rl.storage.masking import masked, masked_override


def fixed_folder() -> str | None:
    """The run's folder if every start of the same command gets the same one; None if its name contains the time."""
    hydra_cfg = HydraConfig.instance().cfg
    assert hydra_cfg is not None
    key = "sweep" if HydraConfig.get().mode == RunMode.MULTIRUN else "run"
    as_written = OmegaConf.to_container(hydra_cfg.hydra, resolve=False)[key]["dir"]  # pyrefly: ignore[missing-attribute]
    return None if "${now" in as_written else HydraConfig.get().runtime.output_dir


def script_settings(cfg: DictConfig, mode: str) -> Settings:
    """The settings of a script that runs this mode.

    Raises:
        ValueError: a setting is wrong, or this machine lacks what it asks for; with the remedy.
    """
    if cfg.mode is None:
        cfg.mode = mode
    if cfg.mode != mode:
        other = f"; run {SCRIPTS[cfg.mode]}" if cfg.mode in SCRIPTS else ""
        raise ValueError(f"this script is of mode={mode}{other}")
    if cfg.resume == "auto" and (folder := fixed_folder()):
        cfg.resume = folder
    try:
        settings = Settings.read(cfg)
        settings_of_mixture(settings)
        settings_of_eval_tasks(settings)
    except ValueError as error:
        raise ValueError(_with_place(str(error), HydraConfig.get())) from error
    check_machine(settings, mode)
    return settings


def _with_place(message: str, hydra: DictConfig) -> str:
    """An error about a setting, with the line of the user's own file that has it."""
    key = re.match(r"(?:unknown config key )?([\w.]+)", message)
    if not key or any(word.lstrip("+").startswith(f"{key[1]}=") for word in hydra.overrides.task):
        return message
    line = re.compile(rf"\b{key[1].rpartition('.')[2]}\s*:")
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    for group, name in {"": hydra.job.config_name, **hydra.runtime.choices}.items():
        path = next((path for folder in folders if (path := folder / group / f"{name}.yaml").is_file()), None)
        if path and not path.is_relative_to(FOLDER) and (found := line.search(text := path.read_text("utf-8"))):
            return f"{path}, line {text[: found.end()].count(chr(10)) + 1}: {message}"
    return message


class MaskedSweep(Callback):
    """Masks the secrets in the config that a sweep writes (see ``config/grpo.yaml``); its jobs compose their own."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Masks the config, which the sweeper stores as multirun.yaml."""
        values = OmegaConf.to_container(config, resolve=False)
        assert isinstance(values, dict)
        for name in values.keys() - {"hydra"}:
            OmegaConf.update(config, str(name), masked(values[name], str(name)), merge=False)
        config.hydra.overrides.task = [masked_override(word) for word in config.hydra.overrides.task]
        config.hydra.job.override_dirname = ""
