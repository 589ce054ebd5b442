"""The settings of one task among several: of a mixture, of ``evaluate.tasks``, or of `grpo-rl eval`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf

from grpo_rl.by_name import is_name
from grpo_rl.section import plain, select
from grpo_rl.settings.compose import DEFAULT_CONFIG, OF_COMPOSING, compose_config, explained
from grpo_rl.settings.mixture import SHARED, entries, read_tasks
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.tasks import ALIASES

OF_RUN = ("sampling", "inference_model", "model", "train.seed", "mode", "evaluate.rows")
"""Settings that all tasks of a run share."""


@contextmanager
def named(where: str) -> Iterator[None]:
    """Puts the place of a task's settings before what is wrong with them."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def settings_for_task(
    dataset: str, values: Mapping[str, Any], env: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Settings:
    """A task's settings as a run of it alone would have them.

    Args:
        values: replace those of the default config, by dotted name.
        env: the task's own settings, merged into its defaults.
        overrides: as on a command line.
    """
    cfg = compose_config(DEFAULT_CONFIG, [f"env.dataset={ALIASES.get(dataset, dataset)}", *overrides])
    for key, value in values.items():
        OmegaConf.update(cfg, key, plain(value), merge=False)
    try:
        OmegaConf.update(cfg, "env", plain(env or {}), merge=True, force_add=True)
    except OF_COMPOSING as error:  # of another type than the default
        raise ValueError(explained(error)) from error
    return Settings.read(cfg, divides=False)


def settings_of_mixture(settings: Settings) -> dict[str, Settings]:
    """The settings of each task of ``env.mixture``: its own, and the mixture's where it gives none."""
    found = {}
    for name, entry in entries(settings).items():
        own = {key: value for key, value in entry.env.items() if key not in SHARED}
        # Those of an entry are its own, whole: merged, it would have the mixture's rewards, too.
        shared = {f"env.{key}": entry.env.get(key, settings.env[key]) for key in SHARED}
        with named(f"env.mixture.{name}"):
            found[name] = settings_for_task(entry.task, _of_run(settings) | shared, own)
    return found


def settings_of_eval_tasks(settings: Settings) -> list[Settings]:
    """The settings of each task of ``evaluate.tasks``: its own, with the run's sampling, context and engine."""
    found = []
    for i, task in enumerate(read_tasks(settings.evaluate.tasks)):
        values = _of_run(settings) | {"env.eval_path": task.path}
        if is_name(task.task):
            values["env.path"] = task.path  # no rows of its own are known, and none are trained on
        with named(f"evaluate.tasks[{i}]"):
            found.append(settings_for_task(task.task, values, task.env))
    return found


def _of_run(settings: Settings) -> dict[str, Any]:
    return {key: select(settings, key) for key in OF_RUN}
