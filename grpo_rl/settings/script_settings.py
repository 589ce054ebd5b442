"""Settings of a script that Hydra runs: checked for it and this machine, and without secrets in Hydra's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from grpo_rl.by_name import is_name
from grpo_rl.settings.compose import FOLDER
from grpo_rl.settings.machine import check_machine
from grpo_rl.settings.own_files import check_own_files, own_files
from grpo_rl.settings.relations import SCRIPTS
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.tasks import TASKS
from grpo_rl.storage.masking import mask_files


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
    dataset = OmegaConf.select(cfg, "env.dataset", throw_on_missing=False)
    known = isinstance(dataset, str) and (dataset in TASKS or is_name(dataset))
    check_own_files(own_files(HydraConfig.get(), FOLDER), dataset if known else None)
    settings = Settings.read(cfg)
    check_machine(settings, mode)
    return settings


class NotedSweep(Callback):
    """Hydra's callback (see ``config/grpo.yaml``) that notes where a sweep writes its settings."""

    folder: Path | None = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        NotedSweep.folder = Path(config.hydra.sweep.dir)


def mask_refused_sweep() -> None:
    """Masks secrets in the settings of a sweep that Hydra refuses, none of whose jobs could do so."""
    if NotedSweep.folder:
        mask_files(NotedSweep.folder.glob("multirun.yaml"))


def mask_hydras_files() -> None:
    """Masks secrets in what Hydra has written of the config and the command line, before anyone could refuse them."""
    hydra_cfg = HydraConfig.get()
    subdir = hydra_cfg.output_subdir  # None: it has written none of the job
    files = [*(Path(hydra_cfg.runtime.output_dir) / subdir).glob("*.yaml")] if subdir else []
    if hydra_cfg.mode == RunMode.MULTIRUN:
        files += Path(hydra_cfg.sweep.dir).glob("multirun.yaml")
    mask_files(files)
