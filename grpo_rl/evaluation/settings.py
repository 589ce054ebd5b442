"""The settings of `grpo-rl eval`: its own, and those of training that it passes on to each task."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from grpo_rl.by_name import short_name
from grpo_rl.section import Section, declared, read_section, setting, unknown
from grpo_rl.settings.compose import parsed_override, settings_for_task
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.tasks import SINGLE, check_names

URL = re.compile(r"https?://")
"""The beginning of an endpoint's name."""
OWN_NAMES = {
    "sampling.max_new_tokens": "max_new_tokens=",
    "sampling.temperature": "temperature=",
    "inference_model.max_model_len": "max_model_len=",
    "inference_model.engine": "engine=",
    "env.eval_path": "path.TASK=",
    "env.dataset": "'tasks=[...]'",
    "env.task": "'tasks=[...]'",
    "env": "'tasks=[...]'",
}
"""Settings of training for which an evaluation has its own."""
PASSED_ON = ("env", "model", "inference_model", "sampling", "train_model")
"""Sections of training's config that an evaluation reads, too."""
TASK_NAMES = ", ".join((*SINGLE, "package.module:Class"))


class EvalSettings(Section):
    """The overrides that `grpo-rl eval` takes, such as ``tasks=[gsm8k,countdown] samples=8``."""

    tasks: tuple[str, ...] = setting((), "tasks whose held-out rows are evaluated, on one engine: " + TASK_NAMES)
    rows: int | None = setting(None, "held-out rows of each task, from the first; null: all", ge=2)
    samples: int = setting(0, "responses to each row next to the greedy one, for pass@k and maj@k; 0: none", ge=0)
    temperature: float = setting(1.0, "temperature of those responses", gt=0, le=2)
    max_new_tokens: int = setting(512, "longest response, in tokens; in a conversation: longest turn", ge=1)
    max_model_len: int = setting(2048, "prompt + response, in tokens, of an engine that is started here", ge=2)
    engine: Literal["vllm", "transformers"] = setting("vllm", "the engine that is started here")
    path: Mapping[str, Any] = setting({}, "held-out data by task: path.gsm8k=test.jsonl; of module:Class: path.Class")
    seed: int = setting(0, "seed of the sampled responses")
    out: str | None = setting(None, "output folder; an evaluation that was cut off goes on there; null: a new one")
    served: str | None = setting(None, "for an endpoint: name of the served model; null: the only one that it lists")
    concurrency: int = setting(8, "for an endpoint: requests at the same time", ge=1)
    retries: int = setting(5, "for an endpoint: further tries of a request that fails for now", ge=0)
    deadline_s: float = setting(300, "for an endpoint: seconds of one try of a request", gt=0)


def read_eval(words: Sequence[str]) -> tuple[EvalSettings, list[str]]:
    """The evaluation's own settings, and the overrides that are training's.

    Raises:
        ValueError: an unknown key, a wrong value, no task, or an override that can't be read.

    >>> own, rest = read_eval(["tasks=[gsm8k,math500]", "path.gsm8k=a.jsonl", "env.reward.correctness=1"])
    >>> own.tasks, own.path, rest
    (('gsm8k', 'math500'), {'gsm8k': 'a.jsonl'}, ['env.reward.correctness=1'])
    """
    known, rest = declared(EvalSettings), []
    values: dict[str, Any] = {"path": {}}
    for word in words:
        override = parsed_override(word)
        key = override.key_or_group
        if key in OWN_NAMES:
            raise ValueError(f"{word}: an evaluation has its own setting for this, {OWN_NAMES[key]}")
        if key.split(".")[0] in PASSED_ON:
            rest.append(word)
        elif key.startswith("path."):
            values["path"][key.removeprefix("path.")] = override.value()
        else:
            values[key] = override.value()
    if isinstance(tasks := values.get("tasks"), str):
        values["tasks"] = [tasks]
    if wrong := [key for key in values if key not in known]:
        raise ValueError(f"{unknown('setting', wrong[0], known)}, and those of {', '.join(PASSED_ON)}")
    own = read_section(EvalSettings, values)
    if not own.tasks:
        raise ValueError(f"no task is given; set 'tasks=[...]' of {TASK_NAMES}")
    check_names(own.tasks, "tasks")
    short = [short_name(name) for name in own.tasks]
    if idle := [name for name in own.path if name not in short]:
        raise ValueError(f"path.{idle[0]}: {unknown('task', idle[0], short)}")
    return own, rest


def task_settings(own: EvalSettings, name: str, rest: Sequence[str]) -> Settings:
    """A task's settings as training would have them, with the evaluation's sampling, context, engine and data."""
    path = own.path.get(short_name(name))
    values = {
        "env.eval_path": path,
        "sampling.max_new_tokens": own.max_new_tokens,
        "sampling.temperature": own.temperature,
        "inference_model.max_model_len": own.max_model_len,
        "inference_model.engine": own.engine,
        "train.seed": own.seed,
        "mode": "sync",
    }
    if path and not any(word.lstrip("+").startswith("env.path=") for word in rest):
        values["env.path"] = path  # nothing else is read: env.subset and env.revision are of these rows
    return settings_for_task(name, values, overrides=rest)
