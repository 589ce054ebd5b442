"""The head of the page: what the run gained, as one sentence that claims no more than its interval, and its tiles."""

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from grpo_rl.monitor.metrics import steps_at_an_end
from grpo_rl.monitor.progress import ETA_STEPS, duration
from grpo_rl.report.files import is_running, read_config, read_overrides, read_rows, read_summary, subject, versions

FEWEST_STEPS = 6
"""Fewest steps whose training reward is judged: three on each side give no interval worth its name."""


def build(run_dir: Path) -> dict[str, Any]:
    """The head of the page of a run folder."""
    rows, summary, config = read_rows(run_dir), read_summary(run_dir), read_config(run_dir)
    states = {True: "running", False: "stopped", None: "unknown"}
    state = "ended" if summary.get("finished") else states[is_running(run_dir)]
    folder = run_dir.resolve().name if run_dir.name in ("", ".", "..") else str(run_dir)
    code = summary.get("git_commit")
    origin = [folder, _began(rows), f"commit {code[:8]}{'+changes' * code.endswith('+changes')}" if code else ""]
    return {
        "title": f"{subject(config)}: training report",
        "subject": f"Training report · {subject(config)}",
        "headline": headline(rows, summary),
        "note": note(rows, summary, state, progress(rows, config)),
        "origin": " · ".join(filter(None, origin)),
        "command": summary.get("command") or shlex.join(read_overrides(run_dir)),
        "tiles": tiles(rows, summary),
        "state": state,
        "step": int(max((row["step"] for row in rows), default=0)),
        "footer": " · ".join(f"{name} {of}" for name, of in (summary.get("versions") or versions()).items()),
    }


def _began(rows: Sequence[Mapping[str, float]]) -> str:
    """The local time of a run's first line, to the minute; empty where it has none."""
    try:
        return f"{datetime.fromtimestamp(rows[0]['time']):%-d %B %Y, %H:%M}"
    except (LookupError, ValueError, OverflowError, OSError):  # a time that is none, in a file from elsewhere
        return ""


def progress(rows: Sequence[Mapping[str, float]], config: Mapping[str, Any]) -> str:
    """The last step of a GRPO run, out of how many, and when it will end by the pace of its newest steps.

    Empty for SFT, whose number of steps follows from its data, and while there is no pace.

    >>> rows = [{"step": step, "time/at_s": 60.0 * step} for step in (1, 2, 3)]
    >>> config = {"train": {"total_dialog_turns": 160}, "env": {"num_envs": 2, "repeats": 4}}
    >>> progress(rows, config), progress(rows, config | {"mode": "sft"})
    ('Step 3 of 20, ends in about 17:00.', '')
    """
    last = {int(row["step"]): row["time/at_s"] for row in rows if row["step"] > 0 and "time/at_s" in row}
    newest = sorted(last)[-ETA_STEPS - 1 :]
    try:
        total = math.ceil(
            config["train"]["total_dialog_turns"] / (config["env"]["num_envs"] * config["env"]["repeats"])
        )
        left_s = (last[newest[-1]] - last[newest[0]]) / (newest[-1] - newest[0]) * (total - newest[-1])
        return f"Step {newest[-1]} of {total}, ends in about {duration(left_s)}." if config.get("mode") != "sft" else ""
    except (LookupError, TypeError, ValueError, ArithmeticError):  # too few steps, or a config that is none
        return ""


class Change(NamedTuple):
    """A change of a mean from the beginning to the end of a run, with its 95 % interval."""

    before: float
    after: float
    gain: float
    low: float
    high: float

    @property
    def verb(self) -> str | None:
        """The word for it; None where the interval holds zero."""
        return "rose" if self.low > 0 else "fell" if self.high < 0 else None

    def sentence(self, what: str, detail: str = "") -> str:
        """One sentence that claims no more than the interval.

        >>> Change(0.4, 1.5, 1.1, 0.9, 1.3).sentence("Held-out reward")
        'Held-out reward rose from 0.400 to 1.500: a gain of +1.100, 95 % interval +0.900 to +1.300.'
        """
        span = f"{self.gain:+.3f}, 95 % interval {self.low:+.3f} to {self.high:+.3f}"
        change = f"from {self.before:.3f} to {self.after:.3f}{detail}"
        if self.verb:
            return f"{what} {self.verb} {change}: a {'gain' if self.verb == 'rose' else 'loss'} of {span}."
        return f"{what} went {change}: no clear change ({span})."


def headline(rows: Sequence[Mapping[str, float]], summary: Mapping[str, Any]) -> str:
    """One sentence: the held-out gain with its interval, or what is known without one."""
    if change := held_out_change(summary):
        return change.sentence("Held-out reward")
    if found := unpaired_change(rows):
        change, step = found
        return change.sentence("So far, held-out reward", f" (step {step})")
    if losses := finite(rows, "loss/sft"):
        return imitation(losses, held_out_losses(rows, summary))
    rewards = finite(rows, "reward/mean")
    if not rewards:
        return "No training step was logged yet."
    if len(rewards) < FEWEST_STEPS:
        return (
            f"Too few steps ({len(rewards)}) to say whether training helped; training reward was {rewards[0]:.3f} "
            f"in the first and {rewards[-1]:.3f} in the last."
        )
    if min(rewards) == max(rewards):
        return f"Training reward was {rewards[0]:.3f} in all {len(rewards)} steps."
    ends = steps_at_an_end(len(rewards))
    return training_change(rewards).sentence(
        "Training reward", f" (means of the first and the last {ends} of {len(rewards)} steps)"
    )


class HeldOutLosses(NamedTuple):
    """The loss of held-out demonstrations before training, and the newest; the step of this while the run goes on."""

    before: float
    after: float
    so_far: int | None = None


def held_out_losses(rows: Sequence[Mapping[str, float]], summary: Mapping[str, Any]) -> HeldOutLosses | None:
    """The held-out losses that a run's summary states, or of one that goes on its first evaluation and the newest.

    >>> held_out_losses([{"step": 0, "eval/loss": 2.0}, {"step": 5, "eval/loss": 1.5}], {})
    HeldOutLosses(before=2.0, after=1.5, so_far=5)
    """
    if None not in (known := [summary.get(f"eval_loss_{when}") for when in ("before", "after")]):
        return HeldOutLosses(*known)
    found = _with(rows, "eval/loss")
    if len(found) < 2:
        return None
    return HeldOutLosses(found[0]["eval/loss"], found[-1]["eval/loss"], int(found[-1]["step"]))


def imitation(losses: Sequence[float], held_out: HeldOutLosses | None) -> str:
    """One sentence on SFT: the held-out loss before and after, if it is known, and that of the training steps.

    >>> imitation([0.5, 0.25], None)
    'The loss of demonstrations was 0.500 nats a token in the first step and 0.250 in the last of 2.'
    """
    trained = f"{losses[0]:.3f} nats a token in the first step and {losses[-1]:.3f} in the last of {len(losses)}"
    if held_out is None:
        return f"The loss of demonstrations was {trained}."
    what = f"loss of held-out demonstrations went from {held_out.before:.3f} to {held_out.after:.3f}"
    what = f"The {what}" if held_out.so_far is None else f"So far, the {what} (step {held_out.so_far})"
    return f"{what}; in training it was {trained}."


def held_out_change(summary: Mapping[str, Any]) -> Change | None:
    """The paired change of the held-out reward that the run's summary states, if it does."""
    if summary.get("eval_gain") is None or not summary.get("eval_gain_ci95"):
        return None
    return Change(summary["eval_before"], summary["eval_after"], summary["eval_gain"], *summary["eval_gain_ci95"])


def unpaired_change(rows: Sequence[Mapping[str, float]]) -> tuple[Change, int] | None:
    """The change from the first to the newest evaluation of a run that goes on, and the step of the newest.

    The interval is that of two independent means, from their standard errors: the rewards of single rows before
    training are not stored, and on the same rows it is, if anything, too wide.

    >>> rows = [{"step": step, "eval/reward": reward, "eval/standard_error": 0.1} for step, reward in [(0, 1), (5, 2)]]
    >>> change, step = unpaired_change(rows)
    >>> f"{change.low:.3f} {change.high:.3f}", step  # 1 - 1.96 * sqrt(0.02), 1 + 1.96 * sqrt(0.02)
    ('0.723 1.277', 5)
    """
    evaluations = _with(rows, "eval/reward")
    # A standard error of zero is one: before training every response may earn nothing.
    if len(evaluations) < 2 or len(_with([evaluations[0], evaluations[-1]], "eval/standard_error")) < 2:
        return None
    first, last = evaluations[0], evaluations[-1]
    gain = last["eval/reward"] - first["eval/reward"]
    half = stats.norm.ppf(0.975) * math.hypot(first["eval/standard_error"], last["eval/standard_error"])
    return Change(first["eval/reward"], last["eval/reward"], gain, gain - half, gain + half), int(last["step"])


def _with(rows: Sequence[Mapping[str, float]], name: str) -> list[Mapping[str, float]]:
    """The lines in which a metric is finite."""
    return [row for row in rows if math.isfinite(row.get(name, math.nan))]


def finite(rows: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """The finite values of a metric, in the order of the lines."""
    return [row[name] for row in _with(rows, name)]


def training_change(rewards: Sequence[float]) -> Change:
    r"""The change of the mean training reward from the first to the last steps, with Welch's 95 % interval.

    A step's mean is one observation: its groups are of prompts that other steps do not have, and the interval covers
    how much such means scatter. Where neighbouring steps resemble each other, a mean is known less well than their
    number says: the variance of the mean is then that of Newey and West (https://doi.org/10.2307/1913610) with
    $\lfloor 4(n/100)^{2/9} \rfloor$ lags, where it is the larger, which with few steps corrects a part of it. What the
    policy learns within an end widens the interval, too.

    Means 1 and 4 of three steps each, variance 1/3 each, 4 degrees of freedom: 3 ± 2.776 * sqrt(2/3):

    >>> change = training_change([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    >>> change.before, change.after, round(change.low, 3), round(change.high, 3)
    (1.0, 4.0, 0.733, 5.267)
    """
    ends = steps_at_an_end(len(rewards))
    first, last = np.asarray(rewards[:ends]), np.asarray(rewards[-ends:])
    variances = [_variance_of_mean(end) for end in (first, last)]
    total, gain = sum(variances), float(last.mean() - first.mean())
    freedom = total**2 / (sum(v**2 for v in variances) / (ends - 1)) if total else ends - 1
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(total)
    return Change(float(first.mean()), float(last.mean()), gain, gain - half, gain + half)


def _variance_of_mean(x: np.ndarray) -> float:
    centred, n = x - x.mean(), len(x)
    plain = float((centred**2).sum() / (n - 1) / n)
    lags = int(4 * (n / 100) ** (2 / 9))
    covariances = [float((centred[lag:] * centred[: n - lag]).sum()) / (n - 1) for lag in range(1, lags + 1)]
    weights = [1 - lag / (lags + 1) for lag in range(1, lags + 1)]
    return max(plain, plain + 2 * sum(w * c for w, c in zip(weights, covariances, strict=True)) / n)


def note(rows: Sequence[Mapping[str, float]], summary: Mapping[str, Any], state: str, going: str = "") -> str:
    """The note below the headline: whether the run has ended, or how far it is, and what its number is of."""
    notes = []
    last = int(max((row["step"] for row in rows), default=0))
    if state == "running":
        notes.append(going or f"The run goes on: this shows it up to step {last}.")
    elif state != "ended":
        notes.append(f"The run has not ended, or was stopped: this shows it up to step {last}.")
    if held_out_change(summary) is None and finite(rows, "reward/mean"):
        if unpaired_change(rows):
            notes.append("The interval takes the two evaluations as independent; the end of the run pairs their rows.")
        else:
            why = "Without two evaluations of held-out reward, with standard errors, there is no gain to state"
            if measured := _with(rows, "eval/reward"):
                why += "; held-out reward was {eval/reward:.3f} after step {step:.0f}".format_map(measured[-1])
            else:
                why += " (evaluate.rows)"
            notes.append(f"{why}; training reward is of the problems that each step happened to draw.")
    return " ".join(notes)


def tiles(rows: Sequence[Mapping[str, float]], summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """The few most important numbers."""
    found = []

    def tile(label: str, value: str, detail: str = "", tone: str = "") -> None:
        found.append({"label": label, "value": value, "detail": detail, "tone": tone})

    if change := held_out_change(summary):
        tone = {"rose": "good", "fell": "bad", None: "unsure"}[change.verb]
        tile("Held-out reward", f"{change.before:.3f} → {change.after:.3f}", "greedy responses")
        tile("Gain", f"{change.gain:+.3f}", f"95 %: {change.low:+.3f} to {change.high:+.3f}", tone)
    if losses := held_out_losses(rows, summary):
        tile("Held-out loss", f"{losses.before:.3f} → {losses.after:.3f}", "nats a token of the demonstrations")
    training = [row for row in rows if row.keys() & {"reward/mean", "loss/sft"}]
    if training:
        took = f"in {duration(summary['seconds'])}" if summary.get("seconds") is not None else ""
        tile("Steps", f"{int(training[-1]['step']):,}", took)
    for phase, label in (("sample", "Sampling"), ("train", "Training")):
        if rates := finite(rows, f"throughput/{phase}_tokens_per_s"):
            tile(label, number(statistics.median(rates)), "tokens/s (median)")
    if fractions := finite(rows, "limit_fraction"):
        tile("Roofline", f"{statistics.median(fractions):.0%}", "of the machine's best (median)")
    if peaks := finite(rows, "memory/peak_gib"):
        tile("Peak memory", f"{max(peaks):.3g} GiB", "of the training process")
    return found


def number(value: float) -> str:
    """A value to three significant digits, as a person writes it.

    >>> number(1930.4), number(0.03456), number(1e-05), number(float("nan"))
    ('1,930', '0.0346', '1e-05', 'n/a')
    """
    if not math.isfinite(value):
        return "n/a"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
