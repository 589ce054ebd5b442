"""A run's results: the exported model, ``summary.json``, ``evaluation.json`` and the report."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from grpo_rl.monitor.metrics import first_and_last
from grpo_rl.monitor.progress import duration
from grpo_rl.report.files import EVALUATION, OVERRIDES, SUMMARY, read_rows, versions
from grpo_rl.report.page import finite, write_report
from grpo_rl.run.export import export
from grpo_rl.run.hooks import Hook
from grpo_rl.run.model_card import model_card, result
from grpo_rl.run.push import CARD, MODEL
from grpo_rl.settings.compose import overrides
from grpo_rl.storage.masking import masked_override
from grpo_rl.storage.whole_file import put_back, write_whole

BEST, BEST_MODEL = "best.json", "best_model"
ENDS = "mean reward of all sampled responses, over the first and the last steps: a tenth, 5 at least, half at most"
"""The meaning of the training rewards in ``summary.json``."""


class BestModel(Hook):
    """Exports the model of the best evaluation so far, which takes the place of the one before once it is whole.

    ``best.json`` next to its weights has its step, so that no kill leaves the one without the other.

    Args:
        adapters: ``merged`` into the weights, or as ``adapter`` by themselves.
    """

    def __init__(self, adapters: str) -> None:
        self._adapters = adapters

    @override
    def on_evaluate(self, run: Any, metrics: dict[str, float]) -> None:
        if run.is_best:
            policy, beside = run.parts.policy, {BEST: json.dumps({"step": run.step}) + "\n"}
            folder = run.folder.path / BEST_MODEL
            export(policy.model, run.parts.tokenizer, folder, self._adapters, policy.peers, beside)


class FinalModel(Hook):
    """Exports the model at the end with its card, and completes the summary."""

    def __init__(self, adapters: str) -> None:
        self._adapters = adapters

    @override
    def on_end(self, run: Any, summary: dict[str, object]) -> None:
        policy, model = run.parts.policy, run.folder.path / MODEL
        export(policy.model, run.parts.tokenizer, model, self._adapters, policy.peers)
        self.on_stop(run, summary)
        if model.is_dir():  # rank zero's
            write_whole(model / CARD, model_card(run.folder.config, summary))

    @override
    def on_stop(self, run: Any, summary: dict[str, object]) -> None:
        summary["versions"] = versions()
        rewards = [row["reward/mean"] for row in read_rows(run.folder.path) if "reward/mean" in row]
        if rewards:
            first, last = first_and_last(rewards)
            summary |= {"train_reward_first": first, "train_reward_last": last, "train_reward_of": ENDS}


class ResultFiles(Hook):
    """Writes the summary and the report, and shows where the results of a finished run are."""

    @override
    def on_stop(self, run: Any, summary: dict[str, object]) -> None:
        self._write(run, summary)

    @override
    def on_end(self, run: Any, summary: dict[str, object]) -> None:
        report = self._write(run, summary)
        run.logs.last_words = ["Result:", *(f"  {line}" for line in result_lines(summary))]
        paths = {"checkpoint": summary["checkpoint"], "model": run.folder.path / MODEL, "report": report}
        run.logs.last_words += [f"{name.capitalize()}: {path}" for name, path in paths.items() if path]

    def _write(self, run: Any, summary: dict[str, object]) -> Path | None:
        write_summary(run.folder.path, summary)
        return try_write_report(run.folder.path, run.logs.note)


def result_lines(summary: Mapping[str, Any]) -> list[str]:
    """The result in a few short lines of plain text, to paste into a message.

    >>> for line in result_lines({"model": "org/M", "task": "gsm8k", "steps": 100, "seconds": 754, "eval_before": 0.25,
    ...     "eval_after": 0.5, "eval_gain": 0.25, "eval_gain_ci95": [0.125, 0.375], "command": "python sota/grpo.py"}):
    ...     print(line)
    org/M on gsm8k: 100 steps in 12:34
    held-out reward 0.250 before and 0.500 after, a gain of +0.250 (95 % interval +0.125 to +0.375): learned
    python sota/grpo.py
    >>> result_lines({"train_reward_first": 0.0, "train_reward_last": 0.0})[1].rpartition(": ")[2]
    'the mean reward is 0 at first and at last; see docs/troubleshooting.md'
    """
    rewards = [summary.get(name) for name in ("eval_before", "eval_after", "train_reward_first", "train_reward_last")]
    took = f" in {duration(summary['seconds'])}" if summary.get("seconds") is not None else ""
    verdict = ""
    if summary.get("eval_gain_ci95"):
        low, high = summary["eval_gain_ci95"]
        verdict = f": {'learned' if low > 0 else 'got worse' if high < 0 else 'no clear change, the interval holds 0'}"
    if any(reward is not None for reward in rewards) and not any(rewards):
        verdict = ": the mean reward is 0 at first and at last; see docs/troubleshooting.md"
    lines = [
        f"{summary.get('model')} on {summary.get('task')}: {summary.get('steps')} steps{took}",
        f"{result(summary)}{verdict}",
    ]
    return lines + ([str(summary["command"])] if summary.get("command") else [])


def best_kept(folder: Path) -> int | None:
    """The step of the best model that is kept whole; None if none is."""
    put_back(folder / BEST_MODEL)
    try:
        return int(json.loads((folder / BEST_MODEL / BEST).read_text())["step"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_summary(folder: Path, summary: Mapping[str, object]) -> None:
    """Writes ``summary.json``."""
    write_whole(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")


def write_evaluation(
    folder: Path, step: int, rewards: Sequence[float], best: Mapping[str, object] | None = None
) -> None:
    """Writes the held-out rewards of a step, with null for NaN, the reward of a response that has none.

    Args:
        best: state of the tracker of the best evaluation after this one: a checkpoint of the same step may be older.
    """
    stored = finite({"step": step, "rewards": list(rewards)} | ({"best": best} if best else {}))
    write_whole(folder / EVALUATION, json.dumps(stored, allow_nan=False) + "\n")


def try_write_report(folder: Path, say: Callable[[str], None]) -> Path | None:
    """Writes the report and returns its path; None, with a warning, if it can't be written."""
    try:
        return write_report(folder)
    except Exception as error:  # a report that fails must not make a finished run fail
        say(
            f"Warning. The report can't be written ({type(error).__name__}: {error}); all else is there. Once that "
            f"is fixed: grpo-rl report {folder}"
        )
        return None


def write_overrides(run_dir: Path) -> None:
    """Writes the overrides that a run is started with, without secrets."""
    words = [masked_override(word) for word in overrides()]
    write_whole(run_dir / OVERRIDES, yaml.safe_dump(words, allow_unicode=True))
