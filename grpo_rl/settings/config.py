"""The decorator of a script's main function: Hydra's own, with settings that are checked before anything starts."""

from __future__ import annotations

import errno
import functools
import gc
import os
import sys
import threading
from collections.abc import Callable

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from grpo_rl.policies.allocator import give_back
from grpo_rl.settings.compose import FOLDER, check_overrides, choosing_configs, dataset_of
from grpo_rl.settings.schema import Settings


class RunIsOver(SystemExit):
    """Ends a script without an error: the run to resume has nothing left to do, which was reported."""


def _fixed_folder() -> str | None:
    """The run's folder if every start of the same command gets the same one; None if its name contains the time."""
    hydra_cfg = HydraConfig.instance().cfg
    assert hydra_cfg is not None
    key = "sweep" if HydraConfig.get().mode == RunMode.MULTIRUN else "run"
    as_written = OmegaConf.to_container(hydra_cfg.hydra, resolve=False)[key]["dir"]  # pyright: ignore
    return None if "${now" in as_written else HydraConfig.get().runtime.output_dir


def main(config_name: str, mode: str = "sync") -> Callable:
    """Decorator for a script's main function: Hydra's own, with our checks; wrong input is reported in one line.

    ``config_name`` is the default of ``--config-name``; ``mode`` is the only mode that a config may name.
    """

    def decorate(function: Callable[[Settings], object]) -> Callable[[], None]:
        @functools.wraps(function)
        def run(cfg: DictConfig) -> object:
            transformers_logging.disable_progress_bar()  # the live view replaces them
            tqdm.set_lock(threading.RLock())  # tqdm's own lock may stay in /dev/shm when the run is killed
            try:
                if cfg.mode is None:
                    cfg.mode = mode
                if cfg.mode != mode:
                    other = {
                        "sync": "; run sota/grpo.py",
                        "async": "; run sota/grpo_async.py",
                        "sft": "; run sota/sft.py",
                    }.get(cfg.mode, "")
                    raise ValueError(f"this script is of mode={mode}{other}")
                if cfg.resume == "auto" and (folder := _fixed_folder()):
                    cfg.resume = folder
                return function(Settings.read(cfg))
            except RunIsOver:
                return None  # exit code 0, as for a run that ends
            except ValueError as error:
                # A Run turns later failures into other errors, so this is a wrong setting, which needs no traceback.
                # In a sweep an exit would prevent the other jobs.
                if HydraConfig.get().mode == RunMode.MULTIRUN:
                    raise
                raise SystemExit(f"error: {error}") from error
            finally:
                gc.collect()  # models sit in reference cycles; the next job of a sweep wants their memory now
                give_back()

        def entry() -> None:
            sys.argv[1:] = choosing_configs(sys.argv[1:])
            try:
                check_overrides(sys.argv[1:], dataset_of(sys.argv[1:], config_name))
            except ValueError as error:
                raise SystemExit(f"error: {error}") from None
            # Otherwise Hydra shortens every traceback, even those of bugs.
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")
            try:
                hydra.main(version_base="1.3", config_path=str(FOLDER), config_name=config_name)(run)()
            except HydraException as error:
                raise SystemExit(f"error: {error}") from error
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT):
                    raise
                what = f"can't write to {error.filename or 'the disk'}: {os.strerror(error.errno)}"
                remedy = "free some space or set hydra.run.dir. Checkpoints that were written are whole"
                raise SystemExit(". ".join([f"error: {what}; {remedy}", *getattr(error, "__notes__", [])])) from error

        return entry

    return decorate
