"""The decorator of a script's main function: Hydra's own, with settings that are checked before anything starts.

What takes seconds to import, torch first of all, is imported by the function itself, after the check.
"""

import errno
import functools
import gc
import logging
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm
from typing_extensions import override

from grpo_rl.policies.before_loading import give_back
from grpo_rl.settings import compose
from grpo_rl.settings.compose import FOLDER
from grpo_rl.settings.devices import check_machine
from grpo_rl.settings.help import help_text, topic
from grpo_rl.settings.relations import SCRIPTS
from grpo_rl.settings.schema import Settings
from grpo_rl.storage.masking import masked, masked_override, replace_unwritable, shown
from grpo_rl.storage.whole_file import write_whole
from grpo_rl.waits import watching


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
        compose.settings_of_mixture(settings)
        compose.settings_of_eval_tasks(settings)
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
    """Masks the secrets in a sweep's multirun.yaml once its first job starts (see ``config/grpo.yaml``), and prints
    the command that compares its runs.

    The config itself stays as it is: the sweeper takes the jobs' overrides from it.
    """

    file: Path | None = None

    @override
    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        MaskedSweep.file = Path(config.hydra.sweep.dir).resolve() / "multirun.yaml"  # jobs may change the folder

    @override
    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        mask_sweep()

    @override
    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        print(f"The sweep on one page: grpo-rl report {shlex.quote(config.hydra.sweep.dir)}")


def mask_sweep() -> None:
    """Masks the secrets in multirun.yaml, if this process has started a sweep that wrote one."""
    if MaskedSweep.file is None or not MaskedSweep.file.is_file():
        return
    values = yaml.safe_load(MaskedSweep.file.read_text(encoding="utf-8"))
    given = values["hydra"]["overrides"]
    given.update({name: [masked_override(word) for word in words] for name, words in given.items()})
    values["hydra"]["job"]["override_dirname"] = ""  # all overrides as one text
    write_whole(MaskedSweep.file, yaml.safe_dump(masked(values), sort_keys=False, allow_unicode=True))


REFUSED = (ValueError, SystemExit, KeyboardInterrupt)
"""The errors of a start that is refused, or called off."""


class RunIsOver(SystemExit):
    """Ends a script without an error: the run to resume has nothing left to do, which was reported."""


def objective(summary: object) -> float | None:
    """The number that a sweep maximises: the run's gain in held-out reward, or of SFT the fall of its held-out loss.

    None where none was measured.

    >>> objective({"steps": 4, "eval_gain": 0.25}), objective({"steps": 4})
    (0.25, None)
    >>> objective({"eval_loss_before": 0.75, "eval_loss_after": 0.25})
    0.5
    """
    if not isinstance(summary, dict):
        return None
    if "eval_loss_after" in summary:
        return float(summary["eval_loss_before"] - summary["eval_loss_after"])
    gain = summary.get("eval_gain")
    return None if gain is None else float(gain)


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Removes Hydra's log and folder of a start that is refused inside; a folder that the user named stays."""
    try:
        yield
    except REFUSED:
        folder, log = Path(HydraConfig.get().runtime.output_dir), f"{HydraConfig.get().job.name}.log"
        with suppress(OSError):
            unused = {path.name for path in folder.iterdir()} <= {log, ".lock"}
            if unused and os.environ.get("RANK", "0") == "0":
                for handler in logging.getLogger().handlers[:]:
                    if getattr(handler, "baseFilename", None) == str(folder / log):  # it would open the file again
                        logging.getLogger().removeHandler(handler)
                (folder / log).unlink(missing_ok=True)
                if not fixed_folder():  # else another start may wait for its lock
                    shutil.rmtree(folder)
                    for parent in folder.parents[:2]:  # the day's, and outputs
                        if Path.cwd() in parent.parents:
                            parent.rmdir()
        raise


def main(config_name: str, mode: str = "sync") -> Callable:
    """Decorator for a script's main function: Hydra's own, with our checks; wrong input is reported in one line.

    ``config_name`` is the default of ``--config-name``; ``mode`` is the only mode that a config may name. The function
    gets the settings and the run's folder, and stays there as ``__wrapped__``.
    """

    def decorate(function: Callable[[Settings, str], object]) -> Callable[[], None]:
        @functools.wraps(function)
        def run(cfg: DictConfig) -> object:
            # The live view replaces progress bars; transformers reads this where it is imported.
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
            tqdm.set_lock(threading.RLock())  # tqdm's own lock may stay in /dev/shm when the run is killed
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                options = [word for word in compose.divided(sys.argv[1:])[0] if word not in ("--multirun", "-m")]
                compose.typed[:] = [*compose.program(mode), *options, *HydraConfig.get().overrides.task]
            try:
                with leaving_nothing():
                    settings = script_settings(cfg, mode)
                    with watching(settings.logger.wait_deadline_s):
                        result = function(settings, HydraConfig.get().runtime.output_dir)
                return objective(result) if HydraConfig.get().mode == RunMode.MULTIRUN else result
            except RunIsOver:
                return None  # exit code 0, as for a run that ends
            except SystemExit as error:
                # A trial that failed by itself, as with a dead engine, is one failed trial; Ctrl-C has no cause.
                if HydraConfig.get().mode == RunMode.MULTIRUN and error.__cause__ is not None:
                    raise RuntimeError(str(error)) from error.__cause__
                raise
            except ValueError as error:
                # A Run turns later failures into other errors, so this is a wrong setting, which needs no traceback.
                # In a sweep an exit would prevent the other jobs.
                if HydraConfig.get().mode == RunMode.MULTIRUN:
                    raise
                raise SystemExit(f"error: {shown(str(error))}") from error
            finally:
                gc.collect()  # models sit in reference cycles; the next job of a sweep needs their memory now
                give_back()

        @functools.wraps(function)
        def entry() -> None:
            compose.typed[:] = [*compose.program(mode), *sys.argv[1:]]
            replace_unwritable()
            sys.argv[1:] = arguments = compose.arranged(compose.choosing_configs(sys.argv[1:]))
            own = compose.hydra_options(arguments).config_dir
            where = [FOLDER, *([Path(own)] if own else [])]
            if (about := topic(arguments)) is not None:
                summary = (function.__globals__["__doc__"] or "").partition(": `")[0] + "."
                dataset = compose.dataset_of(arguments, config_name)
                try:
                    print(help_text(about, summary, config_name, where, dataset, mode), flush=True)
                except BrokenPipeError:  # behind `| head`
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                except ValueError as error:
                    raise SystemExit(f"error: {shown(str(error))}") from None
                return
            # Otherwise Hydra shortens every traceback, even those of bugs.
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")
            try:
                hydra.main(version_base="1.3", config_path=str(FOLDER), config_name=config_name)(run)()
            except KeyboardInterrupt:
                print("stopped by Ctrl-C", file=sys.stderr)
                raise SystemExit(130) from None
            except compose.OF_COMPOSING as error:
                raise SystemExit(f"error: {compose.explained(error, where)}") from error
            except ValueError as error:  # of a job of a sweep, or of options that exclude each other
                raise SystemExit(f"error: {shown(str(error))}") from error
            except OSError as error:
                # A disk that takes no more, or not from us.
                if error.errno not in (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT):
                    raise
                what = f"can't write to {error.filename or 'the disk'}: {os.strerror(error.errno)}"
                remedy = "free some space or set hydra.run.dir. Checkpoints that were written are whole"
                raise SystemExit(". ".join([f"error: {what}; {remedy}", *getattr(error, "__notes__", [])])) from error
            finally:
                mask_sweep()  # no job may have started

        return entry

    return decorate
