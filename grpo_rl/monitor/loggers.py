"""The loggers of a run: experiment trackers and classes of one's own behind one protocol, several at once."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_rl.by_name import is_name, short_name
from grpo_rl.loggers.base import MetricsLogger, logger_class, logger_names
from grpo_rl.monitor.metrics import METRICS_FILE, read_metrics
from grpo_rl.monitor.step_parts import COMPLETIONS_FOLDER, StepParts
from grpo_rl.storage.masking import masked, masked_text
from grpo_rl.waits import waiting

REMEDY = (
    "end the run and resume it without this logger in logger.backend, or with logger.mode=offline if it takes a mode; "
    "what it lacks is in the run folder"
)
REST = 20
"""Calls that a logger misses after one that failed: those of ten steps, as an attempt may take seconds."""


def open_loggers(
    logger: Mapping[str, Any], run_dir: Path, config: Mapping[str, Any], say: Callable[[str], None], again: bool = False
) -> Loggers:
    """The loggers, open, with all that the run folder holds in those that were written anew.

    Args:
        logger: the config's section ``logger``, with its secrets.
        again: gives all of it to each of them, in the place of what they have.

    Raises:
        ValueError: one of them can't start; those before it are closed.
    """
    names = logger_names(logger["backend"])
    rows = read_metrics(run_dir) if names and (run_dir / METRICS_FILE).exists() else []
    last_step = -1 if again else max((int(row["step"]) for row in rows), default=-1)
    loggers = Loggers(say, run_dir)
    for name in names:
        try:
            with waiting(f"the logger {name}", "its start, and what the run has so far", remedy=REMEDY):
                made = logger_class(name)
                takes = () if is_name(name) else inspect.signature(made).parameters
                own = {key: logger[key] for key in ("project", "name", "mode") if key in takes}
                own |= logger["settings"].get(short_name(name), {})
                opened = made(run_dir, masked(config), last_step, **own)  # the config goes to other machines
                loggers._loggers[name] = opened
                if again or getattr(opened, "needs_history", False):
                    _replay(opened, run_dir, rows)
        except BaseException as error:  # whatever a library or a class of one's own raises
            with suppress(Exception):  # the error that is raised is the one to see
                loggers.close(1)
            if not isinstance(error, Exception):
                raise
            why = f"{_described(error)}; mend it or take it out of logger.backend"
            raise ValueError(f"the logger {name} can't start: {why}") from error
    return loggers


def _replay(logger: MetricsLogger, run_dir: Path, rows: Sequence[Mapping[str, float]]) -> None:
    """Logs all rows of metrics again, and the responses that the run folder holds."""
    for row in rows:
        logger.log(int(row["step"]), sent(row))
    parts = StepParts(run_dir / COMPLETIONS_FOLDER)
    for step in parts.steps():
        logger.table(step, parts.read(step).drop_columns("step").to_pylist())


class Loggers:
    """Several loggers as one. One that fails once the run goes on is named, rests, is tried again, and ends no run.

    What it misses meanwhile is counted; `grpo-rl send` sends a run again.
    """

    def __init__(self, say: Callable[[str], None], run_dir: Path = Path()) -> None:
        self._say, self._run_dir = say, run_dir
        self._loggers: dict[str, MetricsLogger] = {}
        self._resting, self._missed = Counter[str](), Counter[str]()

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(f"step {step}", lambda logger: logger.log(step, sent(metrics)))

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._each(f"the responses of step {step}", lambda logger: logger.table(step, rows))

    def close(self, exit_code: int = 0) -> None:
        """Closes all of them, also those after one that fails."""
        self._resting.clear()
        self._each("its end", lambda logger: logger.close(exit_code))
        for name, count in self._missed.items():
            again = f"send the run again: grpo-rl send {self._run_dir}"
            self._say(f"Warning. The logger {name} missed {count} calls; {again}")

    def _each(self, what: str, call: Callable[[MetricsLogger], None]) -> None:
        for name, logger in self._loggers.items():
            if self._resting[name]:
                self._resting[name] -= 1
                self._missed[name] += 1
                continue
            try:
                with waiting(f"the logger {name}", what, remedy=REMEDY):
                    call(logger)
            except Exception as error:  # a tracker that is away, of whatever library, must not end a run of days
                if not self._missed[name]:
                    why = f"failed at {what} ({_described(error)})"
                    self._say(f"Warning. The logger {name} {why}. The run goes on; {METRICS_FILE} has everything")
                self._resting[name] = REST
                self._missed[name] += 1


def sent(row: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a line of ``metrics.jsonl`` that loggers get: they place points by steps and clocks of their own.

    >>> sent({"step": 3, "time": 1.8e9, "time/at_s": 60.0, "time/train_s": 2.0, "reward/mean": 0.5})
    {'time/train_s': 2.0, 'reward/mean': 0.5}
    """
    return {name: value for name, value in row.items() if name not in ("step", "time", "time/at_s")}


def _described(error: Exception) -> str:
    """The error's text for logs; libraries' messages may have the address and the key that they were given."""
    return f"{type(error).__name__}: {masked_text(str(error))}"
