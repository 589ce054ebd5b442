"""RunLogs: all logs of a run, opened and closed together, and the hooks that write to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from tensordict import TensorDictBase
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from grpo_rl.data.group import Group
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.monitor.advisories import Advisories, Advisory
from grpo_rl.monitor.completions import CompletionsLog, completion_rows
from grpo_rl.monitor.loggers import Loggers, open_loggers
from grpo_rl.monitor.metrics import MetricsLog, read_metrics
from grpo_rl.monitor.progress import Progress
from grpo_rl.monitor.step_parts import write_sampling
from grpo_rl.monitor.token_log import TokenLog, token_pieces
from grpo_rl.run.hooks import Hook

if TYPE_CHECKING:
    from grpo_rl.run.folder import RunFolder
    from grpo_rl.settings.sections import Logger, Train


class RunLogs:
    """The terminal view, ``metrics.jsonl``, responses, tokens and loggers of a run; used as a context manager.

    On other ranks than zero metrics alone are written, and nothing is shown.

    Args:
        folder: of a run that may resume: earlier advisories are not repeated.
        tokenizer: reads the tokens of recorded groups; None: nothing was sampled, and numbers alone are logged.
        loss: gives each token's terms for the log of tokens, which has all groups with `train.lineage`, else a few.
    """

    def __init__(
        self,
        folder: RunFolder,
        logger: Logger,
        train: Train,
        total_steps: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        loss: GRPOLoss | None = None,
    ) -> None:
        path, config, zero = folder.path, folder.config, folder.rank_zero
        record = partial(_log_line, _log_of(path)) if zero else lambda _: None
        self.progress = Progress(
            total_steps, None if zero else Console(quiet=True), first_step=folder.step, record=record
        )
        metrics = MetricsFile(path)  # makes the file, which a run that begins again has set aside
        advice = Advice(config, self.note, read_metrics(path) if folder.resumes else ())
        self._loggers = open_loggers(logger, path, config, self.note) if zero else Loggers(self.note, path)
        self.hooks: list[Hook] = [metrics, advice, Trackers(self._loggers)]
        """The hooks that write the logs, in the order in which they do."""
        if tokenizer and zero:
            if logger.completions or self._loggers:
                self.hooks.append(Responses(CompletionsLog(path) if logger.completions else None, self._loggers))
            self.hooks.append(SamplingTimes(path))
            loss = loss if train.lineage else None
            if logger.token_groups or loss:
                pieces = partial(token_pieces, tokenizer)
                self.hooks.append(Tokens(TokenLog(path, config, logger.token_groups, pieces, loss)))
        self.hooks.append(Terminal(self.progress))
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
            self._loggers.close(exit_code=int(kind is not None))
        for line in self.last_words if kind is None else ():
            self.progress.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def note(self, text: str) -> None:
        """Shows a line to the user."""
        self.progress.note(text)


class MetricsFile(Hook):
    """Writes all numbers to ``metrics.jsonl``."""

    def __init__(self, folder: Path) -> None:
        self._log = MetricsLog(folder)

    @override
    def on_log(self, run: Any, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        self._log.log(run.step, {"time": time.time(), **metrics})


class Advice(Hook):
    """Shows the advisories that numbers raise, and adds them to the summary.

    Args:
        rows: what a resumed run logged before, whose advisories are not shown again.
    """

    def __init__(self, config: Mapping[str, Any], say: Callable[[str], None], rows: Sequence[Mapping[str, float]]):
        self._advisories, self._works, self._say = Advisories(config), True, say
        for row in rows:
            self._new(row)

    @override
    def on_log(self, run: Any, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        for advisory in self._new({"step": run.step, **metrics}):
            self._say(f"Advisory. {advisory}")

    @override
    def on_end(self, run: Any, summary: dict[str, object]) -> None:
        summary["advisories"] = [asdict(advisory) for advisory in self._advisories.raised.values()]

    on_stop = on_end

    def _new(self, row: Mapping[str, float]) -> list[Advisory]:
        try:
            return self._advisories.update(row) if self._works else []
        except Exception as error:  # advice that fails must not end a run
            self._works, why = False, f"{type(error).__name__}: {error}"
            self._say(f"Warning. There are no advisories from step {row['step']} on ({why}); all else goes on")
            return []


class Trackers(Hook):
    """Sends all numbers to the loggers."""

    def __init__(self, loggers: Loggers) -> None:
        self._loggers = loggers

    @override
    def on_log(self, run: Any, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        self._loggers.log(run.step, metrics)


class Responses(Hook):
    """Writes each step's responses as text, and sends them to the loggers."""

    def __init__(self, log: CompletionsLog | None, loggers: Loggers) -> None:
        self._log, self._loggers = log, loggers

    @override
    def on_log(self, run: Any, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        if groups:
            env = run.parts.env
            rows = completion_rows(groups, env.decode, env.gold, env.max_turns > 1, env.decode_prompt)
            if self._log:
                self._log.log(run.step, rows, env.task.reward_parts)
            self._loggers.table(run.step, rows)


class SamplingTimes(Hook):
    """Writes when engines sampled while the trainer trained."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def on_log(self, run: Any, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        if groups:
            sampled = run.parts.collector.take_sampled()
            write_sampling(self._folder, run.step, sampled, run.seconds - time.perf_counter())


class Tokens(Hook):
    """Writes what each step is trained on token by token, also of a step whose numbers end the run."""

    def __init__(self, log: TokenLog) -> None:
        self._log = log

    @override
    def on_batch(self, run: Any, groups: Sequence[Group]) -> None:
        self._log.begin(groups)

    @override
    def on_micro_batch(self, run: Any, tokens: TensorDictBase, losses: TensorDictBase) -> None:
        self._log.add(tokens, losses)

    @override
    def on_log(self, run: Any, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        if groups:
            own = {name: metrics[name] for name in ("entropy_coef",) if name in metrics}
            self._log.write(run.step, groups, {"kl_coef": metrics.get("kl/coef", 0.0)} | own)

    @override
    def on_error(self, run: Any, error: BaseException) -> None:
        self._log.write(run.step + 1, None, run.parts.schedules.coefs)


class Terminal(Hook):
    """Shows each step's numbers, and one of its responses."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    @override
    def on_log(self, run: Any, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        env = run.parts.env
        sample = f"{env.query(groups[0].row)}\n{env.decode(groups[0].responses[0])}" if groups else ""
        self._progress.update(run.step, metrics, sample)


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
