"""RunLogs: all logs of a run, opened and closed together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from grpo_rl.data.group import Group
from grpo_rl.envs.base import LLMEnv
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.monitor.advisories import Advisories, Advisory
from grpo_rl.monitor.completions import CompletionsLog, completion_rows
from grpo_rl.monitor.loggers import Loggers, open_loggers
from grpo_rl.monitor.metrics import MetricsLog, read_metrics
from grpo_rl.monitor.progress import Progress
from grpo_rl.monitor.sampling_log import SamplingLog
from grpo_rl.monitor.token_log import TokenLog, token_pieces
from grpo_rl.settings.sections import Logger


class RunLogs:
    """The terminal view, ``metrics.jsonl``, responses, tokens and loggers of a run; used as a context manager.

    Args:
        step: the step the run resumes after.
        resumes: whether there are earlier metrics, whose advisories are not repeated.
        tokenizer: reads the tokens of recorded groups; None: none are recorded.
        loss: gives each token's terms for the log of tokens, which then has all groups; None: it has a few.
        rank_zero: whether this is rank zero; other ranks write metrics only and show nothing.
    """

    def __init__(
        self,
        folder: Path,
        logger: Logger,
        config: Mapping[str, Any],
        total_steps: int,
        step: int = 0,
        resumes: bool = False,
        loss: GRPOLoss | None = None,
        rank_zero: bool = True,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.folder = folder
        self.metrics = MetricsLog(folder)
        self.completions = CompletionsLog(folder) if logger.completions and rank_zero else None
        self.sampling = SamplingLog(folder) if tokenizer and rank_zero else None
        self.tokens: TokenLog | None = None
        if tokenizer and rank_zero and (logger.token_groups or loss):
            self.tokens = TokenLog(folder, config, logger.token_groups, partial(token_pieces, tokenizer), loss)
        self.advisories, self._advises = Advisories(config), True
        record = partial(_log_line, _log_of(folder)) if rank_zero else lambda _: None
        self.progress = Progress(
            total_steps, None if rank_zero else Console(quiet=True), first_step=step, record=record
        )
        for row in read_metrics(folder) if resumes else ():
            self._advise(row)
        self.loggers = open_loggers(logger, folder, config, self.note) if rank_zero else Loggers(self.note, folder)
        self.last_words: list[str] = []
        """The exit message: lines shown when all else is closed, unless an error ends the run."""

    def __enter__(self) -> RunLogs:
        self.started = time.perf_counter()
        self.progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.progress.__exit__()
        finally:  # the live view is over: a logger may take its time, and print
            self.loggers.close(exit_code=int(kind is not None))
        for line in self.last_words if kind is None else ():
            self.progress.console.print(line, soft_wrap=True, markup=False, highlight=False)

    @property
    def observers(self) -> list[Callable[..., None]]:
        """Functions called with each micro-batch (`grpo_rl.monitor.step_record.Observer`)."""
        return [self.tokens.add] if self.tokens else []

    def note(self, text: str) -> None:
        """Shows a line to the user."""
        self.progress.note(text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs numbers of a step, and shows the advisories that they raise."""
        self.metrics.log(step, {"time": time.time(), **metrics})
        for advisory in self._advise({"step": step, **metrics}):
            self.note(f"Advisory. {advisory}")
        self.loggers.log(step, metrics)

    def _advise(self, row: Mapping[str, float]) -> list[Advisory]:
        try:
            return self.advisories.update(row) if self._advises else []
        except Exception as error:  # advice that fails must not end a run
            self._advises, why = False, f"{type(error).__name__}: {error}"
            self.note(f"Warning. There are no advisories from step {row['step']} on ({why}); all else goes on")
            return []

    def has(self, step: int, name: str) -> bool:
        """True if a number of a step is in ``metrics.jsonl`` already."""
        return any(row["step"] == step and name in row for row in read_metrics(self.folder))

    def log_step(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group], env: LLMEnv) -> None:
        """Logs a training step: its numbers, and its groups as text."""
        self.log(step, metrics)
        if self.completions or self.loggers:
            rows = completion_rows(groups, env.decode, env.gold, env.max_turns > 1, env.decode_prompt)
            if self.completions:
                self.completions.log(step, rows, env.task.reward_parts)
            self.loggers.table(step, rows)
        response = env.decode(groups[0].responses[0])
        self.progress.update(step, metrics, sample=f"{env.query(groups[0].row)}\n{response}")

    def log_sampled(self, step: int, sampled: Sequence[Any], zero: float) -> None:
        """Logs when engines sampled (see `grpo_rl.monitor.sampling_log.SamplingLog.write`)."""
        if self.sampling:
            self.sampling.write(step, sampled, zero)


def _log_of(folder: Path) -> Path:
    """The log in the run's folder, by the name of Hydra's own; a resumed run goes on in that of its folder."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)]
    return folder.absolute() / (Path(handlers[0].baseFilename).name if handlers else "grpo.log")


def _log_line(path: Path, text: str) -> None:
    """Appends a line as Hydra writes it; not through its handlers, which print it in the terminal again."""
    stamp = datetime.now().isoformat(" ", "milliseconds").replace(".", ",")
    # A full disk is named by the files that matter.
    with suppress(OSError), path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(f"[{stamp}][grpo_rl.run][INFO] - {text}\n")
