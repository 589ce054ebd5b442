"""The decorator of a script's main function: Hydra's own, with settings that are checked before anything starts.

What takes seconds to import, torch first of all, is imported by the function itself, after the check.
"""

from __future__ import annotations

import errno
import functools
import gc
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from tqdm import tqdm

from grpo_rl.policies.allocator import give_back
from grpo_rl.settings.command_line import arranged, divided, hydra_options, program, typed
from grpo_rl.settings.compose import FOLDER, OF_COMPOSING, choosing_configs, dataset_of, explained
from grpo_rl.settings.help import help_text, topic
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.script_settings import fixed_folder, mask_sweep, script_settings
from grpo_rl.storage.masking import shown
from grpo_rl.storage.printable import replace_unwritable
from grpo_rl.waits.watcher import watching

FULL_OR_CLOSED = (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk that takes no more, or not from us."""

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
                options = [word for word in divided(sys.argv[1:])[0] if word not in ("--multirun", "-m")]
                typed[:] = [*program(mode), *options, *HydraConfig.get().overrides.task]
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
            typed[:] = [*program(mode), *sys.argv[1:]]
            replace_unwritable()
            sys.argv[1:] = arguments = arranged(choosing_configs(sys.argv[1:]))
            own = hydra_options(arguments).config_dir
            where = [FOLDER, *([Path(own)] if own else [])]
            if (about := topic(arguments)) is not None:
                summary = (function.__globals__["__doc__"] or "").partition(": `")[0] + "."
                try:
                    print(help_text(about, summary, config_name, where, dataset_of(arguments, config_name), mode))
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
            except OF_COMPOSING as error:
                raise SystemExit(f"error: {explained(error, where)}") from error
            except ValueError as error:  # of a job of a sweep, or of options that exclude each other
                raise SystemExit(f"error: {shown(str(error))}") from error
            except OSError as error:
                if error.errno not in FULL_OR_CLOSED:
                    raise
                what = f"can't write to {error.filename or 'the disk'}: {os.strerror(error.errno)}"
                remedy = "free some space or set hydra.run.dir. Checkpoints that were written are whole"
                raise SystemExit(". ".join([f"error: {what}; {remedy}", *getattr(error, "__notes__", [])])) from error
            finally:
                mask_sweep()  # no job may have started

        return entry

    return decorate
