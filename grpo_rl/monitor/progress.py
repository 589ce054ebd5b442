"""The terminal view of a run: a line for each step, and in a terminal a bar below with the phase that goes on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from grpo_rl.monitor.metrics import is_reward_statistic
from grpo_rl.monitor.phases import start_phase
from grpo_rl.storage.masking import shown
from grpo_rl.waits.registry import Wait, waiting

ETA_STEPS = 20
"""The ETA goes by the mean of this many last steps, so that it follows responses that grow or shrink. The first step
of a process counts only until there is another: it compiles, and fills caches."""
FACTS = {
    "loss/sft": ("loss", "{:.3f}"),
    "eval/loss": ("held-out loss", "{:.3f}"),
    "entropy": ("entropy", "{:.3g}"),
    "kl/ref": ("kl", "{:.3g}"),
    "grad_norm": ("grad norm", "{:.3g}"),
    "response/mean_length": ("length", "{:.1f}"),
    "response/truncated_fraction": ("cut off", "{:.0%}"),
    "throughput/sample_tokens_per_s": ("sampling", "{:,.0f} tokens/s"),
    "throughput/train_tokens_per_s": ("training", "{:,.0f} tokens/s"),
    "limit_fraction": ("roofline", "{:.0%}"),
}
"""Metrics of a step's line, each with its label and format."""
WAITS = {
    "sample": "groups of the next step",
    "wait": "groups of the next step",
    "evaluating": "the evaluation on held-out data",
    "checkpoint": "a checkpoint on the disk",
}
"""The trainer waits for these in a phase; in others for the phase to end."""


class Progress:
    """Shows a run in the terminal; used as a context manager.

    Args:
        first_step: steps that were done before a resume; they count as progress, not for the ETA.
        console: where to print; the terminal by default. Without one, in a notebook too, there are lines alone.
        record: called with each step's line and with each note, wherever they are shown.
    """

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        *,
        first_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
        record: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.total_steps, self.step = total_steps, first_step
        self.title = "GRPO"
        self.compiles = False
        """True if the first step includes compilation, which its line says."""
        self.console = console or _console()
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        """True if a bar shows what goes on."""
        self._clock, self._record = clock, record
        self._last = clock()
        self._durations: deque[float] = deque(maxlen=ETA_STEPS)
        self._is_first = True
        self._phase = "starting"
        self._wait: Wait | None = None
        self._shows = False
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._bar = Bar(*columns, console=self.console, refresh_per_second=4, disable=not self.is_live)
        self._task = self._bar.add_task("", total=total_steps, completed=first_step)

    def __enter__(self) -> Progress:
        self._last = self._clock()
        self._shows = True
        return self

    def __exit__(self, *_: object) -> None:
        self._shows = False
        self._wait_for(None)
        if self._bar.live.is_started:
            # The last state stays in the scrollback, and should not claim that a phase still runs.
            self.phase("finished" if self.step >= self.total_steps else "stopped")
            self._bar.stop()

    def start_phase(self, what: str) -> AbstractContextManager[None]:
        """A context for a phase of the run's start, shown with its seconds; see `grpo_rl.monitor.phases`."""
        self._phase = what
        return start_phase(what, self.note, not self.console.quiet, self.is_live)

    def doing(self) -> str:
        """The phase that goes on, as ``phase train of step 5``."""
        return f"phase {self._phase} of step {self.step + 1}"

    def phase(self, name: str) -> None:
        """Names what is going on: sampling, training, weights, evaluating, checkpoint."""
        self._phase = name
        if self._shows:
            self._wait_for(waiting(WAITS.get(name, f"the phase {name} to end"), f"step {self.step + 1}"))
        self._show()
        if name in ("sample", "wait", "read") and not self._durations:
            self._last = self._clock()  # what came before the first step is no step's time

    def _wait_for(self, wait: Wait | None) -> None:
        before, self._wait = self._wait, None
        if before:
            before.__exit__()
        self._wait = wait and wait.__enter__()

    def goes_on(self) -> None:
        """Notes a sign of life in a long phase, such as a micro-batch that is done."""
        if self._wait:
            self._wait.again()

    def _show(self) -> None:
        # From the first update on, not before: engines print while they start, which would leave torn copies of it.
        self._bar.start()
        self._bar.update(self._task, description=f"{self.title} · {self._phase}", completed=self.step)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a finished step; ``eval/*`` may come along or alone."""
        now = self._clock()
        if step > self.step:
            if self._durations and self._is_first:
                self._durations.clear()
                self._is_first = False
            self._durations.append((now - self._last) / (step - self.step))
            self.step = step
        self._last = now
        self._show()
        self._print(self._line({name: float(value) for name, value in metrics.items()}))

    def note(self, text: str) -> None:
        """Prints a message."""
        self._print(shown(text))

    def _print(self, text: str) -> None:
        # Before the record: a disk that hangs must not keep a warning from the terminal. soft_wrap: a line in a log
        # file is one line, however long.
        self.console.print(Text(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}"), soft_wrap=True)
        self._record(text)

    @property
    def eta_s(self) -> float | None:
        """Seconds that the remaining steps will take, by the last ones; None before the first step."""
        if not self._durations:
            return None
        return (self.total_steps - self.step) * sum(self._durations) / len(self._durations)

    def _line(self, metrics: Mapping[str, float]) -> str:
        fields = [f"step {self.step}/{self.total_steps}"]
        if "eval/reward" in metrics:
            fields.append(f"held-out reward {metrics['eval/reward']:.3f}")
        if "reward/mean" in metrics:
            fields.append(f"reward {metrics['reward/mean']:.3f}")
            fields += [f"{name} {metrics[f'reward/{name}']:.3f}" for name in _parts(metrics)]
        fields += [f"{label} {text.format(metrics[name])}" for name, (label, text) in FACTS.items() if name in metrics]
        if self._durations and metrics.keys() & {"reward/mean", "loss/sft"}:
            compiled = self.compiles and self._is_first
            step_s = f"{self._durations[-1]:.1f} s" + (", compilation included" if compiled else "/step")
            fields.append(f"{step_s}, ETA {'below ' * compiled}{duration(self.eta_s or 0)}")
        return " · ".join(fields)


def _console() -> Console:
    """The terminal. In a notebook plain text: rich would print HTML for each line, or redraw what can't be redrawn."""
    found = Console()
    return Console(force_jupyter=False, force_terminal=False) if found.is_jupyter else found


def duration(seconds: float) -> str:
    """Seconds as a person reads them.

    >>> duration(9), duration(754), duration(93784)
    ('0:09', '12:34', '1d 2:03:04')
    """
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{days}d {clock}" if days else clock


def _parts(metrics: Mapping[str, float]) -> list[str]:
    names = [name.removeprefix("reward/") for name in metrics if name.startswith("reward/")]
    return [name for name in names if not is_reward_statistic(name)]
