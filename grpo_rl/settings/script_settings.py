"""Settings of a script that Hydra runs, checked for it and this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from grpo_rl.settings.compose import FOLDER
from grpo_rl.settings.machine import check_machine
from grpo_rl.settings.relations import SCRIPTS
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.task_settings import settings_of_eval_tasks, settings_of_mixture
from grpo_rl.storage.masking import masked, masked_override
from grpo_rl.storage.whole_file import write_whole


def fixed_folder() -> str | None:
    """The run's folder if every start of the same command gets the same one; None if its name contains the time."""
    hydra_cfg = HydraConfig.instance().cfg
    assert hydra_cfg is not None
    key = "sweep" if HydraConfig.get().mode == RunMode.MULTIRUN else "run"
    as_written = OmegaConf.to_container(hydra_cfg.hydra, resolve=False)[key]["dir"]  # pyrefly: ignore[missing-attribute]
    return None if "${now" in as_written else HydraConfig.get().runtime.output_dir


def script_settings(cfg: DictConfig, mode: str) -> Settings:
    """The settings of a script that runs this mode, checked for it and for this machine."""
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
        raise ValueError(_with_file(str(error), HydraConfig.get())) from error
    check_machine(settings, mode)
    return settings


def _with_file(message: str, hydra: DictConfig) -> str:
    """An error about a setting, with the user's own file that has it."""
    key = re.match(r"(?:unknown config key )?([\w.]+)", message)
    if not key or any(word.lstrip("+").startswith(f"{key[1]}=") for word in hydra.overrides.task):
        return message
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    for group, name in {"": hydra.job.config_name, **hydra.runtime.choices}.items():
        path = next((path for folder in folders if (path := folder / group / f"{name}.yaml").is_file()), None)
        if path and not path.is_relative_to(FOLDER) and f"{key[1].rpartition('.')[2]}:" in path.read_text("utf-8"):
            return f"{path}, {message}"  # a colon behind a name such as key.yaml would mask the next word
    return message


class MaskedSweep(Callback):
    """Masks the secrets in a sweep's multirun.yaml once its first job starts (see ``config/grpo.yaml``).

    The config itself stays as it is: the sweeper takes the jobs' overrides from it.
    """

    file: Path | None = None

    @override
    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        MaskedSweep.file = Path(config.hydra.sweep.dir).resolve() / "multirun.yaml"  # jobs may change the folder

    @override
    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        mask_sweep()


def mask_sweep() -> None:
    """Masks the secrets in multirun.yaml, if this process has started a sweep that wrote one."""
    if MaskedSweep.file is None or not MaskedSweep.file.is_file():
        return
    values = yaml.safe_load(MaskedSweep.file.read_text(encoding="utf-8"))
    given = values["hydra"]["overrides"]
    given.update({name: [masked_override(word) for word in words] for name, words in given.items()})
    values["hydra"]["job"]["override_dirname"] = ""  # all overrides as one text
    write_whole(MaskedSweep.file, yaml.safe_dump(masked(values), sort_keys=False, allow_unicode=True))
