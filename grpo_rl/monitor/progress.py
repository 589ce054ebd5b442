"""The terminal view of a run: a live panel in a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from grpo_rl.monitor.metrics import finite_mean, is_reward_statistic
from grpo_rl.storage.masking import printable, shown
from grpo_rl.waits import Wait, start_phase, waiting

BLOCKS = "▁▂▃▄▅▆▇█"
SAMPLE_LINES = 5
ETA_STEPS = 20
"""The ETA goes by the mean of this many last steps, so that it follows responses that grow or shrink. The first step
of a process counts only until there is another: it compiles, and fills caches."""
FACTS = {
    "loss": {"loss/sft": ("loss", "{:.3f}"), "eval/loss": ("held-out loss", "{:.3f}")},
    "policy": {"entropy": ("entropy", "{:.3g}"), "kl/ref": ("kl", "{:.3g}"), "grad_norm": ("grad norm", "{:.3g}")},
    "responses": {"response/mean_length": ("length", "{:.1f}"), "response/truncated_fraction": ("cut off", "{:.0%}")},
    "turns": {
        "measure/turns": ("turns", "{:.1f}"),
        "measure/replies": ("replies", "{:.1f}"),
        "measure/error_replies": ("errors", "{:.2f}"),
        "agents/sessions": ("sessions so far", "{:,.0f}"),
        "agents/calls": ("calls so far", "{:,.0f}"),
    },
    "async": {"time/wait_s": ("waiting", "{:.1f} s"), "staleness/mean": ("staleness", "{:.2f}")},
    "speed": {
        "throughput/sample_tokens_per_s": ("sampling", "{:,.0f} tokens/s"),
        "throughput/train_tokens_per_s": ("training", "{:,.0f} tokens/s"),
        "limit_fraction": ("roofline", "{:.0%}"),
    },
}
"""The view's rows: their metrics, each with its label and format."""
WAITS = {
    "sample": "groups of the next step",
    "wait": "groups of the next step",
    "evaluating": "the evaluation on held-out data",
    "checkpoint": "a checkpoint on the disk",
}
"""The trainer waits for these in a phase; in others for the phase to end."""


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The values as block characters, from the least (lowest block) to the greatest; NaN is a gap.

    More values than ``width`` are averaged in equal bins.

    >>> sparkline([0.0, 1.0, float("nan"), 2.0])
    '▁▅ █'
    """
    values = [float(v) for v in values]
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [finite_mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return " " * len(values)
    low, span = min(finite), max(finite) - min(finite)

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return BLOCKS[int((value - low) / span * (len(BLOCKS) - 1) + 0.5) if span else 0]

    return "".join(map(block, values))


class Progress:
    """Shows a run in the terminal; used as a context manager.

    Args:
        first_step: steps that were done before a resume; they count as progress, not for the ETA.
        console: where to print; the terminal by default. Without one, in a notebook too, each step is one plain line
            with the time of day.
        record: called with each step's plain line and with each note, wherever they are shown.
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
        self.console = console or _console()
        self._clock, self._record = clock, record
        self._started = self._last = clock()
        self._durations: deque[float] = deque(maxlen=ETA_STEPS)
        self._is_first = True
        self._metrics: dict[str, float] = {}
        self._rewards: list[float] = []
        self._held_out: list[float] = []
        self._sample = ""
        self._phase = "starting"
        self._wait: Wait | None = None
        self._shows = False
        self._live = (
            Live(get_renderable=self._panel, console=self.console, refresh_per_second=4)
            if self.console.is_terminal and not self.console.is_dumb_terminal
            else None
        )

    def __enter__(self) -> Progress:
        self._started = self._last = self._clock()
        self._shows = True
        return self

    def __exit__(self, *_: object) -> None:
        self._shows = False
        self._wait_for(None)
        if self._live and self._live.is_started:
            # The last state stays in the scrollback, and should not claim that a phase still runs.
            self.phase("finished" if self.step >= self.total_steps else "stopped")
            self._live.stop()

    def start_phase(self, what: str) -> AbstractContextManager[None]:
        """A context for a phase of the run's start, shown with its seconds; see `grpo_rl.waits`."""
        self._phase = what
        return start_phase(what, self.note, not self.console.quiet, self._live is not None)

    def doing(self) -> str:
        """The phase that goes on, as ``phase train of step 5``."""
        return f"phase {self._phase} of step {self.step + 1}"

    def phase(self, name: str) -> None:
        """Names what is going on: sampling, training, weights, evaluating, checkpoint."""
        self._phase = name
        if self._shows:
            self._wait_for(waiting(WAITS.get(name, f"the phase {name} to end"), f"step {self.step + 1}"))
        self._start_live()
        if name in ("sample", "wait", "read") and not self._durations:
            self._last = self._clock()  # what came before the first step is no step's time

    def _wait_for(self, wait: Wait | None) -> None:
        before, self._wait = self._wait, None
        if before:
            before.__exit__()
        self._wait = wait and wait.__enter__()

    def goes_on(self) -> None:
        """Notes progress in a long phase, such as a micro-batch that is done."""
        if self._wait:
            self._wait.again()

    def _start_live(self) -> None:
        # With the first update, not before: engines print while they start, which would leave torn copies of the view.
        if self._live and not self._live.is_started:
            self._live.start()

    def update(self, step: int, metrics: Mapping[str, float], sample: str = "") -> None:
        """Takes the metrics of a finished step and one of its responses; ``eval/*`` may come along or alone."""
        metrics = {name: float(value) for name, value in metrics.items()}
        if "eval/reward" in metrics:
            self._held_out.append(metrics["eval/reward"])
        now = self._clock()
        if step > self.step:
            if self._durations and self._is_first:
                self._durations.clear()
                self._is_first = False
            self._durations.append((now - self._last) / (step - self.step))
            self.step = step
        self._last = now
        self._start_live()
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        self._metrics |= metrics
        self._sample = printable(sample).strip() or self._sample
        line = self._line(metrics)
        self._record(line)
        if not self._live:
            self._print_plain(line)

    def note(self, text: str) -> None:
        """Prints a message above the live view."""
        text = shown(text)
        if self._live:  # before the record: a disk that hangs must not keep a warning from the terminal
            self.console.print(Text(text))
        else:
            self._print_plain(text)
        self._record(text)

    def _print_plain(self, text: str) -> None:
        # soft_wrap: a line in a log file is one line, however long.
        self.console.print(Text(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}"), soft_wrap=True)

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
        fields += [f"{label} {text}" for row in FACTS for label, text in _facts(metrics, row)]
        if self._durations and metrics.keys() & {"reward/mean", "loss/sft"}:
            fields.append(f"{self._durations[-1]:.1f} s/step, ETA {duration(self.eta_s or 0)}")
        return " · ".join(fields)

    def _panel(self) -> RenderableType:
        # One column less than the terminal: some terminals wrap a line that fills them.
        width = min(self.console.width, 110) - 1
        metrics = self._metrics
        head = Table.grid(expand=True)
        head.add_column(ratio=1)
        head.add_column(justify="right")
        elapsed = duration(self._clock() - self._started)
        eta = f" · ETA {duration(max(self.eta_s - (self._clock() - self._last), 0))}" if self.eta_s else ""
        head.add_row(Text(self._phase, style="cyan"), Text(f"{elapsed}{eta}", style="dim"))

        body = Table.grid(padding=(0, 2))
        body.add_column(style="dim", no_wrap=True)
        body.add_column(overflow="fold")
        if self._rewards:
            reward = Text(f"{self._rewards[-1]:.3f}  ", style="bold")
            reward.append(sparkline(self._rewards, max(width - 40, 10)), style="green")
            body.add_row("reward", reward)
        if parts := _parts(metrics):
            body.add_row("", _pairs([(name, f"{metrics[f'reward/{name}']:.3f}") for name in parts]))
        if self._held_out:
            values = [self._held_out[0], self._held_out[-1]] if len(self._held_out) > 1 else self._held_out
            body.add_row("held-out", Text(" → ".join(f"{value:.3f}" for value in values)))
        for label in FACTS:
            if pairs := _facts(metrics, label):
                body.add_row(label, _pairs(pairs))

        bar = ProgressBar(
            total=max(self.total_steps, 1), completed=self.step, complete_style="blue", finished_style="blue"
        )
        # A bare bar ends without a line break and would swallow the row after it.
        rows: list[RenderableType] = [head, Padding(bar, (0, 0, 1, 0))]
        if body.row_count:
            rows.append(body)
        if self._sample:
            rows += [Rule("a sample", style="dim", align="left"), self._sample_text(width - 4)]
        title = Text.assemble((self.title, "bold"), f" · step {self.step}/{self.total_steps}")
        return Panel(Group(*rows), title=title, title_align="left", width=width, box=box.ROUNDED, border_style="blue")

    def _sample_text(self, width: int) -> Text:
        # Wrapped here, not by the panel, as the number of rows has to be known to cut it.
        lines = Text(self._sample).wrap(self.console, width, overflow="fold")
        kept = [line.plain.rstrip() for line in lines[:SAMPLE_LINES]]
        return Text("\n".join(kept if len(lines) <= SAMPLE_LINES else [*kept[:-1], "…"]))


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


def _facts(metrics: Mapping[str, float], row: str) -> list[tuple[str, str]]:
    if row == "async" and "time/wait_s" not in metrics:
        return []  # where training and sampling take turns, no token is stale
    return [(label, text.format(metrics[name])) for name, (label, text) in FACTS[row].items() if name in metrics]


def _pairs(pairs: Sequence[tuple[str, str]]) -> Text:
    return Text("   ").join(Text.assemble((f"{label} ", "dim"), value) for label, value in pairs)
