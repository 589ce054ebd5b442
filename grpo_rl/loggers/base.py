"""MetricsLogger, the protocol of loggers; their names, found without their libraries; and their classes."""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from grpo_rl.by_name import is_name, object_by_name, short_name

BUILT_IN = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if module.name != "base"]
"""The names of the built-in loggers: the other files of this folder."""


class MetricsLogger(Protocol):
    """A place that metrics and responses go to, next to the run folder's own files; `docs/loggers.md` has an example.

    Args:
        run_dir: the run folder, which exists.
        config: the whole config as plain values, secrets masked.
        last_step: the last step of the run so far, -1 if there is none. What the place holds of later steps belongs to
            an abandoned continuation, and is logged again.
        settings: those of `logger.settings` under the logger's name.

    A logger with a true attribute ``needs_history`` is given, once it is made, all that the run folder holds.

    A built-in one is the class ``Log`` of its file, and ``LIBRARY`` there is the module that it requires. Its
    constructor also gets those of `logger.project`, `logger.name` and `logger.mode` that are parameters of it. Its
    static method ``check_account``, where it has one, gives `grpo-rl doctor` a line.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any], last_step: int, **settings: Any) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes numbers of a step; the held-out rewards of the last one may come by themselves."""

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes the responses of a step (see `grpo_rl.monitor.completions.completion_rows`)."""

    def close(self, exit_code: int = 0) -> None:
        """Writes what is left; a non-zero ``exit_code`` means that the run failed."""


def logger_names(backend: str | Sequence[str]) -> list[str]:
    """The loggers that `logger.backend` names, each once.

    Raises:
        ValueError: there is no logger of that name.

    >>> logger_names(["tensorboard", "my_module:Log", "none"])
    ['tensorboard', 'my_module:Log']
    """
    names = dict.fromkeys([backend] if isinstance(backend, str) else backend)
    for name in names:
        if not (name in (*BUILT_IN, "none") or is_name(name)):
            raise ValueError(f"logger.backend={name}: choose {', '.join(BUILT_IN)}, package.module:Class, or none")
    return [name for name in names if name != "none"]


def logger_class(name: str) -> type[MetricsLogger]:
    """The class of a logger; its library is imported.

    Raises:
        ValueError: the library is not installed; there is no such module or class.
    """
    if name not in BUILT_IN:
        return object_by_name(name, "logger.backend")
    module = importlib.import_module(f"grpo_rl.loggers.{name}")
    try:
        importlib.import_module(module.LIBRARY)
    except ImportError as error:
        remedy = f"pip install 'grpo-rl[{name}]', or take it out of logger.backend"
        raise ValueError(f"logger.backend={name}, but it can't be imported ({error}): {remedy}") from error
    return module.Log


def check_loggers(backend: str | Sequence[str], settings: Mapping[str, Any]) -> dict[str, type[MetricsLogger]]:
    """The classes of loggers by name.

    Raises:
        ValueError: one can't be imported, or there are settings of one that is not chosen.
    """
    classes = {name: logger_class(name) for name in logger_names(backend)}
    known = [short_name(name) for name in classes]
    if idle := [key for key in settings if key not in known]:
        has = ", ".join(known) or "none"
        raise ValueError(f"logger.settings.{idle[0]} is of a logger that logger.backend does not name; it has {has}")
    return classes


def run_name(run_dir: Path) -> str:
    """The name of a run that was given none: its folder's, with the day.

    >>> run_name(Path("outputs/2026-11-23/16-41-22"))
    '2026-11-23_16-41-22'
    """
    path = run_dir.absolute()
    return f"{path.parent.name}_{path.name}"
