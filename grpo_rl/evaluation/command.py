"""The command `grpo-rl eval`."""

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path

from grpo_rl.evaluation.settings import URL, read_eval, task_settings
from grpo_rl.policies.before_loading import check_name, local_path
from grpo_rl.waits import start_phase

OVERRIDE = re.compile(r"[+~]{0,2}[\w.@/-]+=")


def add_eval(parser: argparse.ArgumentParser) -> None:
    """Evaluates a model on held-out rows of several tasks, on one engine: reward and accuracy of greedy responses, and
    of `samples` others pass@k and maj@k, each with a 95 % interval. Writes eval.json and the responses. Two models are
    compared row by row. Overrides: 'tasks=[gsm8k,math500,ifeval,countdown]' rows=200 samples=8 temperature=0.7
    max_new_tokens=512 engine=vllm path.gsm8k=test.jsonl seed=0 out=FOLDER, and those of training's env, model,
    inference_model and sampling. Exit code 1: a task could not be evaluated; 2: wrong input.
    """
    parser.usage = "grpo-rl eval MODEL [MODEL] 'tasks=[...]' [overrides ...] | grpo-rl eval --compare A B"
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a folder, a name on the hub, a run, a checkpoint, or http://host:port/v1, with the key in OPENAI_API_KEY",
    )
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="two eval.json, or their folders")
    parser.set_defaults(run_command=_eval)


def _eval(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    # argparse takes overrides for models.
    given = [*options.models, *overrides]
    words = [word for word in given if OVERRIDE.match(word) and not URL.match(word) and not local_path(word)]
    models = [word for word in given if word not in words]
    if options.compare:
        if given:
            raise ValueError(f"--compare takes two evaluations alone, and not {given[0]}")
        from grpo_rl.evaluation.evaluating import compare

        return compare(*options.compare)
    if not 1 <= len(models) <= 2:
        raise ValueError(f"{len(models)} models are given; eval takes one, or two to compare")
    for model in models:
        if not URL.match(model) and not local_path(model):
            check_name(model)
    own, rest = read_eval(words)
    settings = {task: task_settings(own, task, rest) for task in own.tasks}
    with start_phase("importing torch and the rest"):
        from grpo_rl.evaluation.evaluating import compare, evaluate_model

    base = Path(own.out or time.strftime("evaluations/%Y-%m-%d/%H-%M-%S"))
    if len(models) == 1:
        return evaluate_model(models[0], own, settings, rest, base)
    codes = [evaluate_model(model, own, settings, rest, base / part) for model, part in zip(models, "ab", strict=True)]
    return max(codes) or compare(base / "a", base / "b")
