"""The command `grpo-rl eval`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from transformers.utils import logging as transformers_logging

from grpo_rl.engines.base import EngineDeadError, Sampling
from grpo_rl.envs.guards.guard import ScoreError
from grpo_rl.evaluation.endpoint import Endpoint, EndpointError
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
from grpo_rl.evaluation.sources import URL, LocalSource, ServedSource
from grpo_rl.settings.declaration import plain
from grpo_rl.settings.evaluation import EvalSettings, read_eval, task_settings

OVERRIDE = re.compile(r"[+~]{0,2}[\w.@/-]+=")
NOT_THE_SCORES = ("out", "concurrency", "retries", "deadline_s", "tasks")
"""Settings that an evaluation may go on with otherwise."""


def add_eval(parser: argparse.ArgumentParser) -> None:
    """Evaluates a model on held-out rows of several tasks, on one engine: reward and accuracy of greedy responses, and
    of `samples` others pass@k and maj@k, each with a 95 % interval. Writes eval.json and the responses. Two models are
    compared row by row. Overrides: tasks=[gsm8k,math500,ifeval,countdown] rows=200 samples=8 temperature=0.7
    max_new_tokens=512 engine=vllm path.gsm8k=test.jsonl seed=0 out=FOLDER, and those of training's env, model,
    inference_model and sampling. Exit code 1: a task could not be evaluated; 2: wrong input.
    """
    parser.usage = "grpo-rl eval MODEL [MODEL] tasks=[...] [overrides ...] | grpo-rl eval --compare A B"
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a folder, a name on the hub, a run, a checkpoint, or http://host:port/v1, with the key in OPENAI_API_KEY",
    )
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="two eval.json, or their folders")
    parser.set_defaults(run_command=_eval)


def _eval(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    # argparse takes overrides for models; a model's name with a "=" needs its path: ./a=b.
    given = [*options.models, *overrides]
    words = [word for word in given if OVERRIDE.match(word) and not URL.match(word)]
    models = [word for word in given if word not in words]
    if options.compare:
        if given:
            raise ValueError(f"--compare takes two evaluations alone, and not {given[0]}")
        return compare(*options.compare)
    if not 1 <= len(models) <= 2:
        raise ValueError(f"{len(models)} models are given; eval takes one, or two to compare")
    own, rest = read_eval(words)
    transformers_logging.disable_progress_bar()
    if len(models) == 1:
        return evaluate_model(models[0], own, rest, _folder(own))
    base = _folder(own)
    codes = [evaluate_model(model, own, rest, base / part) for model, part in zip(models, "ab", strict=True)]
    return max(codes) or compare(base / "a", base / "b")


def _folder(own: EvalSettings) -> Path:
    return Path(own.out) if own.out else Path("evaluations", time.strftime("%Y-%m-%d"), time.strftime("%H-%M-%S"))


def evaluate_model(name: str, own: EvalSettings, rest: Sequence[str], folder: Path) -> int:
    """Evaluates one model into ``folder``, and returns the exit code. Tasks that the folder has already stay.

    Raises:
        ValueError: wrong input, or the folder holds another evaluation.
    """
    settings = {task: task_settings(own, task, rest) for task in own.tasks}
    scoring = {key: value for key, value in plain(own).items() if key not in NOT_THE_SCORES}
    header = {"model": name, "settings": scoring, "overrides": list(rest)}
    done: dict[str, TaskResult] = {}
    if (folder / EVAL).exists():
        stored, done = read_eval_file(folder)
        if stored != header:
            raise ValueError(f"{folder} holds an evaluation of another model or with other settings; set another out=")
    to_do = {task: settings[task] for task in own.tasks if task not in done}
    console, failed = Console(), []
    for task in (task for task in own.tasks if task in done):
        console.print(f"{task}: is in {folder} already")
    with ExitStack() as stack:
        if to_do and URL.match(name):
            key = os.environ.get("OPENAI_API_KEY")
            endpoint = Endpoint(name, key, own.served, own.concurrency, own.retries, own.deadline_s)
            source = ServedSource(endpoint, to_do, own.rows)
        elif to_do:
            source = LocalSource(stack.enter_context(model_folder(name)), to_do, own.rows, own.samples)
        if to_do:
            stack.callback(source.close)
            source.start()
        for task in to_do:
            start = time.perf_counter()
            try:
                rows = [*source.task(task).rows][: own.rows]
                sampling = Sampling(**settings[task].sampling)
                greedy = source.evaluate(task, rows, replace(sampling, temperature=0.0), 1, own.seed)
                sampled = source.evaluate(task, rows, sampling, own.samples, own.seed) if own.samples else None
            # A ValueError here is of this task's data or its scorer: the settings are checked, and the engine runs.
            except (EndpointError, EngineDeadError, ScoreError, ValueError) as error:
                print(f"{task}: failed: {error}", file=sys.stderr)
                failed.append(task)
                continue
            parts = {"greedy": greedy} | ({"sampled": sampled} if sampled else {})
            write_responses(folder, task, source.task(task), rows, parts)
            done[task] = task_result(source.task(task), rows, greedy, sampled)
            write_eval(folder, header, done)
            console.print(f"{task}: {len(rows)} rows in {time.perf_counter() - start:.1f} s")
    console.print(results_table(name, {task: done[task] for task in own.tasks if task in done}))
    if done:
        console.print(f"Written to {folder / EVAL}", soft_wrap=True)
    if failed:
        print(f"Not evaluated: {', '.join(failed)}; go on with out={folder}", file=sys.stderr)
    return int(bool(failed))


def compare(first: Path, second: Path) -> int:
    """Prints the paired comparison of two evaluations.

    Raises:
        ValueError: one can't be read, or they had other rows.
    """
    (a, of_a), (b, of_b) = read_eval_file(first), read_eval_file(second)
    console = Console()
    if a["settings"] != b["settings"]:
        other = [key for key in a["settings"] if a["settings"][key] != b["settings"].get(key)]
        console.print(f"Note: the evaluations differ in {', '.join(other)}")
    console.print(comparison_table((a["model"], b["model"]), of_a, of_b))
    return 0
