"""The loggers of a run: experiment trackers and classes of one's own behind one protocol, several at once."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

from grpo_rl.by_name import object_by_name
from grpo_rl.monitor.completions import logged_steps, read_step
from grpo_rl.monitor.logger_names import BUILT_IN, logger_names, settings_name
from grpo_rl.monitor.metrics import METRICS_FILE, read_metrics, rows_from
from grpo_rl.storage.masking import masked, masked_text
from grpo_rl.waits.registry import Wait, waiting

REMEDY = (
    "end the run and resume it without this logger in logger.backend, or with logger.mode=offline for wandb; what it "
    "lacks is in the run folder"
)
METHODS = ("log", "table", "close")
LONGEST_WAIT_S = 300.0
"""A logger that fails is tried again after 2, 4, 8, ... seconds, and at last every so many."""
CATCH_UP = 100
"""Rows that a logger missed are sent so many at a time, one time a step: training waits for them."""


class MetricsLogger(Protocol):
    """A place that metrics and responses go to, beside the run folder's own files; `docs/loggers.md` has an example.

    Args:
        run_dir: the run folder, which exists.
        config: the whole config as plain values, secrets masked.
        last_step: the last step of the run so far, -1 if there is none. What the place holds of later steps belongs to
            an abandoned continuation, and is logged again.
        settings: those of `logger.settings` under the logger's name.

    A logger with a true attribute ``needs_history`` is given, once it is made, all that the run folder holds.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any], last_step: int, **settings: Any) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes numbers of a step; the held-out rewards of the last one may come by themselves."""
        ...

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes the responses of a step (see `grpo_rl.monitor.completions.completion_rows`)."""
        ...

    def close(self, exit_code: int = 0) -> None:
        """Writes what is left; a non-zero ``exit_code`` means that the run failed."""
        ...


def logger_class(name: str) -> type[MetricsLogger]:
    """The class of a logger, imported with its library.

    Raises:
        ValueError: the library is not installed; there is no such module or class, or it lacks a method.
    """
    if name in BUILT_IN:
        where, library = BUILT_IN[name]
        try:
            importlib.import_module(library)
        except ImportError as error:
            remedy = f"pip install 'grpo-rl[{name}]', or take it out of logger.backend"
            raise ValueError(f"logger.backend={name}, but it can't be imported ({error}): {remedy}") from error
        name = where
    found = object_by_name(name, "logger.backend", inspect.isclass)
    if not inspect.isclass(found):
        raise ValueError(f"logger.backend={name} is {found!r:.80}; it must be a class")
    if missing := [method for method in METHODS if not callable(getattr(found, method, None))]:
        raise ValueError(
            f"logger.backend={name}: {found.__name__} has no method {', '.join(missing)}; a logger has "
            f"{', '.join(METHODS)} (docs/loggers.md)"
        )
    return cast("type[MetricsLogger]", found)


def check_loggers(backend: str | Sequence[str], settings: Mapping[str, Any]) -> None:
    """Refuses loggers that can't be imported, and settings of loggers that are not chosen.

    Raises:
        ValueError: says which, and what to do.
    """
    names = logger_names(backend)
    for name in names:
        logger_class(name)
    known = [settings_name(name) for name in names]
    if idle := [key for key in settings if key not in known]:
        raise ValueError(
            f"logger.settings.{idle[0]} is of a logger that logger.backend does not name; it has "
            f"{', '.join(known) or 'none'}"
        )
    if wrong := [key for key, value in settings.items() if not isinstance(value, Mapping)]:
        raise ValueError(f"logger.settings.{wrong[0]} is {settings[wrong[0]]!r}; it must be a mapping")


def open_loggers(
    backend: str | Sequence[str],
    run_dir: Path,
    config: Mapping[str, Any],
    say: Callable[[str], None],
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    common: Mapping[str, Any] | None = None,
    of_wandb: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Loggers:
    """The loggers, open, with all that the run folder holds in those that were written anew.

    Args:
        settings: by the logger's name.
        common: further arguments of the built-in loggers: the run's name, its project.
        of_wandb: further arguments of wandb: its mode.

    Raises:
        ValueError: one of them can't start; those before it are closed.
    """
    names = logger_names(backend)
    rows = read_metrics(run_dir) if names and (run_dir / METRICS_FILE).exists() else []
    last_step = max((int(row["step"]) for row in rows), default=-1)
    loggers = Loggers(say, clock, run_dir / METRICS_FILE)
    try:
        for name in names:
            own = dict(common or {}) if name in BUILT_IN else {}
            own |= dict(of_wandb or {}) if name == "wandb" else {}
            own |= (settings or {}).get(settings_name(name), {})
            # The config goes to other machines, and is shown there.
            logger = _opened(name, run_dir, masked(config), last_step, own)
            loggers.add(name, logger)
            if getattr(logger, "needs_history", False):
                try:
                    with waiting(f"the logger {name}", "what the run has so far", remedy=REMEDY):
                        replay(logger, run_dir, rows)
                except Exception as error:  # whatever a library or a class of one's own raises
                    raise ValueError(
                        f"the logger {name} can't be given what the run folder holds ({_described(error)})"
                        "; mend it or take it out of logger.backend"
                    ) from error
    except BaseException:
        with suppress(Exception):  # the error that is raised is the one to see
            loggers.close(1)
        raise
    return loggers


def _opened(
    name: str, run_dir: Path, config: Mapping[str, Any], last_step: int, settings: Mapping[str, Any]
) -> MetricsLogger:
    try:
        with waiting(f"the logger {name}", "its start", remedy=REMEDY):
            return logger_class(name)(run_dir, config, last_step, **settings)
    except ValueError:
        raise
    except Exception as error:  # whatever a library or a class of one's own raises
        raise ValueError(
            f"the logger {name} can't start ({_described(error)}); mend it or take it out of logger.backend"
        ) from error


def replay(logger: MetricsLogger, run_dir: Path, rows: Sequence[Mapping[str, float]]) -> None:
    """Logs all rows of metrics again, and the responses that the run folder holds."""
    for row in rows:
        logger.log(int(row["step"]), sent(row))
    for step in logged_steps(run_dir):
        logger.table(step, [{name: row[name] for name in row if name != "step"} for row in read_step(run_dir, step)])


class Loggers:
    """Several loggers as one. One that fails once the run goes on is named, tried again, and ends no run.

    Numbers that it missed are sent once it works again, from ``metrics.jsonl``, some at a time; tables are not. What it
    never got is counted at the end.

    Args:
        path: the run's ``metrics.jsonl``, which has each row before it is logged here.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        path: Path = Path(METRICS_FILE),
    ) -> None:
        self._say, self._clock, self._path = say, clock, path
        self._attempts: list[_Attempts] = []

    def __bool__(self) -> bool:
        return bool(self._attempts)

    def add(self, name: str, logger: MetricsLogger) -> None:
        """Adds a logger."""
        self._attempts.append(_Attempts(name, logger, self._say, self._clock, self._path))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs numbers of a step."""
        for attempts in self._attempts:
            attempts.log(step, sent(metrics))

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs the responses of a step."""
        for attempts in self._attempts:
            attempts.table(step, rows)

    def close(self, exit_code: int = 0) -> None:
        """Closes all of them, also those after one that fails."""
        for attempts in self._attempts:
            attempts.close(exit_code)


def sent(row: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a line of ``metrics.jsonl`` that loggers get: they place points by steps and clocks of their own.

    >>> sent({"step": 3, "time": 1.8e9, "time/at_s": 60.0, "time/train_s": 2.0, "reward/mean": 0.5})
    {'time/train_s': 2.0, 'reward/mean': 0.5}
    """
    return {name: value for name, value in row.items() if name not in ("step", "time", "time/at_s")}


class _Attempts:
    def __init__(
        self, name: str, logger: MetricsLogger, say: Callable[[str], None], clock: Callable[[], float], path: Path
    ) -> None:
        self._name, self._logger, self._say, self._clock, self._path = name, logger, say, clock, path
        self._missing = 0
        """Rows that it lacks: those of the file from the byte ``_from`` on."""
        self._from = self._end = self._size()
        self._failures = self._lost_tables = 0
        self._told = False
        self._not_before = 0.0

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        begin, self._end = self._end, self._size()
        if not self._missing:
            self._from = begin
        self._missing += 1
        if self._clock() < self._not_before:
            return
        if self._missing > 1:
            self._catch_up()
        elif self._took(step, metrics):
            self._missing = 0

    def _took(self, step: int, metrics: Mapping[str, float]) -> bool:
        try:
            with self._waiting(f"step {step}"):
                self._logger.log(step, metrics)
        except Exception as error:  # a tracker that is away, of whatever library, must not end a run of days
            self._failed(step, error)
            return False
        self._failures = 0
        return True

    def _catch_up(self) -> bool:
        """Sends some of the missing rows, and tells whether it could."""
        try:
            rows = rows_from(self._path, self._from, min(self._missing, CATCH_UP))
        except (OSError, ValueError) as error:  # a disk that fails is the run's matter
            self._failed(-1, error)
            return False
        for row, end in rows:
            metrics = sent(row)
            if not self._took(int(row["step"]), metrics):
                return False
            self._from, self._missing = end, self._missing - 1
        return bool(rows)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._missing:  # it was away a moment ago
            self._lost_tables += 1
            return
        try:
            with self._waiting(f"responses of step {step}"):
                self._logger.table(step, rows)
        except Exception as error:  # as above
            self._lost_tables += 1
            self._failed(step, error)

    def _waiting(self, detail: str) -> Wait:
        return waiting(f"the logger {self._name}", detail, remedy=REMEDY)

    def _failed(self, step: int, error: Exception) -> None:
        self._failures += 1
        self._not_before = self._clock() + min(2.0 ** min(self._failures, 10), LONGEST_WAIT_S)
        if not self._told:
            self._told = True
            self._say(
                f"Warning. The logger {self._name} failed at step {step} ({_described(error)}). The run "
                f"goes on, and tries again; {METRICS_FILE} has everything"
            )

    def close(self, exit_code: int) -> None:
        while self._missing and self._catch_up():
            pass
        try:
            with self._waiting("its end"):
                self._logger.close(exit_code)
        except Exception as error:  # as above
            self._say(f"Warning. The logger {self._name} can't be closed ({_described(error)})")
        if self._missing or self._lost_tables:
            self._say(
                f"Warning. The logger {self._name} lacks {self._missing} rows of metrics and {self._lost_tables} "
                "tables of responses; the run folder has them"
            )


def _described(error: Exception) -> str:
    """The error for people; libraries' messages may have the address and the key that they were given."""
    return f"{type(error).__name__}: {masked_text(str(error))}"


def run_name(run_dir: Path) -> str:
    """The name of a run that was given none: its folder's, with the day.

    >>> run_name(Path("outputs/2026-11-23/16-41-22"))
    '2026-11-23_16-41-22'
    """
    path = run_dir.absolute()
    return f"{path.parent.name}_{path.name}"
