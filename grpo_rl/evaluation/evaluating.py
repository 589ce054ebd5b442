"""Evaluations of a model on several tasks, stored task by task, and the comparison of two."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils import logging as transformers_logging

from grpo_rl.engines.base import EngineDeadError, OutOfMemoryError, Sampling
from grpo_rl.envs.guards.guard import ScoreError
from grpo_rl.envs.rewards.json_client import EndpointError
from grpo_rl.evaluation.models import model_folder
from grpo_rl.evaluation.results import (
    EVAL,
    TaskResult,
    comparison_table,
    read_eval_file,
    results_table,
    task_result,
    write_eval,
    write_responses,
)
from grpo_rl.evaluation.settings import URL, EvalSettings
from grpo_rl.evaluation.sources import Endpoint, LocalSource, ServedSource
from grpo_rl.section import plain
from grpo_rl.settings.derived import dtype
from grpo_rl.settings.schema import Settings
from grpo_rl.storage.masking import masked, masked_override, masked_text, shown
from grpo_rl.waits import start_phase

NOT_THE_SCORES = ("out", "concurrency", "retries", "deadline_s", "tasks")
"""Settings that an evaluation may go on with otherwise."""
DTYPE = "train_model.dtype="


def evaluate_model(
    name: str, own: EvalSettings, settings: Mapping[str, Settings], rest: Sequence[str], folder: Path
) -> int:
    """Evaluates one model into ``folder``, and returns the exit code. Tasks that the folder has already stay.

    Args:
        settings: of each task, as training would have them.
        rest: the overrides of training's settings that they were made with.

    Raises:
        ValueError: wrong input, or the folder holds another evaluation.
    """
    transformers_logging.disable_progress_bar()
    scoring = {key: value for key, value in plain(own).items() if key not in NOT_THE_SCORES}
    if not URL.match(name):
        scoring["dtype"] = dtype(next(iter(settings.values())))  # null depends on the machine
    header = {
        "model": masked_text(name),  # a URL may have a password
        "settings": masked(scoring, told_apart=True),
        "overrides": [_masked_word(word) for word in rest if not word.startswith(DTYPE)],
    }
    done: dict[str, TaskResult] = {}
    if (folder / EVAL).exists():
        stored, done = read_eval_file(folder)
        if stored != header:
            raise ValueError(f"{folder} holds an evaluation of another model or with other settings; set another out=")
    to_do = {task: settings[task] for task in own.tasks if task not in done}
    console, failed = Console(), []
    if Path(name, "config.yaml").is_file():
        console.print("The run's prompt (env.system_prompt, env.examples) is not taken over: give its settings again")
    for task in (task for task in own.tasks if task in done):
        console.print(f"{task}: is in {folder} already")
    with ExitStack() as stack:
        if to_do:
            try:
                source = _started(name, own, to_do, stack)
            except (EndpointError, EngineDeadError, OutOfMemoryError) as error:
                raise ValueError(str(error)) from error
        for task in to_do:
            start = time.perf_counter()
            try:
                rows = [*source.tasks[task].rows][: own.rows]  # pyrefly: ignore[unbound-name]
                sampling = Sampling(**settings[task].sampling)
                greedy = source.evaluate(task, rows, replace(sampling, temperature=0.0), 1, own.seed)
                sampled = source.evaluate(task, rows, sampling, own.samples, own.seed) if own.samples else None
            # A ValueError here is of this task's data or its scorer: the settings are checked, and the engine runs.
            except (EndpointError, EngineDeadError, OutOfMemoryError, ScoreError, ValueError) as error:
                print(f"{task}: failed: {shown(str(error))}", file=sys.stderr)
                failed.append(task)
                continue
            parts = {"greedy": greedy} | ({"sampled": sampled} if sampled else {})
            write_responses(folder, task, source.tasks[task], rows, parts)
            done[task] = task_result(source.tasks[task], rows, greedy, sampled)
            write_eval(folder, header, done)
            console.print(f"{task}: {len(rows)} rows in {time.perf_counter() - start:.1f} s")
    console.print(results_table(masked_text(name), {task: done[task] for task in own.tasks if task in done}))
    if done:
        console.print(f"Written to {folder / EVAL}", soft_wrap=True)
    if failed:
        print(f"Not evaluated: {', '.join(failed)}; go on with out={folder}", file=sys.stderr)
    return int(bool(failed))


def _started(
    name: str, own: EvalSettings, to_do: Mapping[str, Settings], stack: ExitStack
) -> LocalSource | ServedSource:
    """The source of the model's responses, started; an engine is closed with the stack."""
    if URL.match(name):
        key = os.environ.get("OPENAI_API_KEY")
        endpoint = Endpoint(name, key, own.served, own.concurrency, own.retries, own.deadline_s)
        return ServedSource(endpoint, to_do, own.rows)
    with start_phase("loading the model and starting the engine"):
        source = LocalSource(stack.enter_context(model_folder(name)), to_do, own.rows, own.samples)
        stack.callback(source.close)
        source.start()
    return source


def compare(first: Path, second: Path) -> int:
    """Prints the paired comparison of two evaluations."""
    (a, of_a), (b, of_b) = read_eval_file(first), read_eval_file(second)
    console = Console()
    if other := [*_other(a["settings"], b["settings"]), *_other(*map(_overridden, (a, b)))]:
        console.print(f"Note: the evaluations differ in {', '.join(other)}")
    console.print(comparison_table((a["model"], b["model"]), of_a, of_b))
    return 0


def _masked_word(word: str) -> str:
    """An override without its secrets, distinguished from one with others."""
    hidden = masked_override(word)
    return word if hidden == word else f"{hidden} ({masked(word, 'secret', told_apart=True)})"


def _overridden(header: Mapping[str, Any]) -> dict[str, str]:
    """The overrides of training's settings that an evaluation was made with; the last of a key counts."""
    words = (word.lstrip("+").partition("=") for word in header.get("overrides", []))
    return {key: value for key, _, value in words}


def _other(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
