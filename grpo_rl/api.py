"""Training from Python: `grpo_rl.train`, the run of `sota/grpo.py` with a script's or notebook's rows and rewards."""

import functools
import gc
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf

from grpo_rl.losses import factors
from grpo_rl.settings.compose import DEFAULT_CONFIG, compose_config
from grpo_rl.settings.devices import check_machine
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.tasks import TASKS, task_section

Rows = str | Path | Iterable[Mapping[str, Any]]
Reward = str | type | Callable[..., Any]
TRAIN, HELD_OUT = "data/train.jsonl", "data/held_out.jsonl"
"""Files of the run's folder that hold rows which the script gave itself."""
own = SimpleNamespace()
"""Functions and classes of the script or notebook that trains, under the names by which settings give them."""


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended.

    Args:
        folder: with metrics, responses, checkpoint and report.
        summary: what its ``summary.json`` has.
    """

    folder: Path
    summary: Mapping[str, Any]

    @property
    def model(self) -> Path:
        """The folder of the trained model."""
        return self.folder / "model"

    @property
    def gain(self) -> float | None:
        """The gain in held-out reward; None where nothing was held out."""
        return self.summary.get("eval_gain")

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The numbers of each step, by the names of docs/metrics.md."""
        from grpo_rl.monitor.metrics import read_metrics

        return read_metrics(self.folder)


def train(
    model: str | Path,
    data: Rows,
    reward: Reward | Sequence[Reward],
    *,
    held_out: Rows | None = None,
    folder: str | Path | None = None,
    **settings: Any,
) -> TrainedRun:
    """Trains a model by GRPO, as `grpo-rl train` does, and returns the run.

    Args:
        model: ``model.name``.
        data: ``env.path``, or rows, such as a list of dicts or a `datasets.Dataset`.
        reward: reward functions of the rows' columns and of ``completion`` (docs/tasks.md), or a task: one of the
            project's by its name, or a class of one's own.
        held_out: ``env.eval_path``, or rows; all of them are evaluated before and after, unless ``evaluate`` says how
            many.
        folder: of the run; None: a new one below ``outputs``. ``resume="auto"`` goes on there, or begins.
        settings: sections as mappings, ``optimizer={"lr": 1e-5}``; ``loss`` also as the name of a preset. In the place
            of a ``package.module:name`` there can be the function or class itself, or a hook.

    Raises:
        ValueError: settings, rows or functions are wrong, before anything expensive starts.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the live view replaces them
    from grpo_rl.run.claim import folder_of
    from grpo_rl.run.lock import FolderInUseError
    from grpo_rl.settings.config import RunIsOver
    from grpo_rl.sota.grpo import grpo

    place = Path(folder or datetime.now().strftime("outputs/%Y-%m-%d/%H-%M-%S"))
    if settings.get("resume") == "auto":
        if folder is None:
            raise ValueError("resume='auto' goes on in the run's folder; give folder")
        settings["resume"] = place
    if resume := settings.get("resume"):
        place = folder_of(place, str(resume))
    is_new = not place.exists()
    try:
        checked = _settings(model, data, reward, held_out, place, settings)
        check_machine(checked, "sync")
        return TrainedRun(place, grpo.__wrapped__(checked, place))
    except RunIsOver:
        return TrainedRun(place, json.loads((place / "summary.json").read_text()))
    except FolderInUseError:
        raise
    except ValueError:
        if is_new and {path.name for path in place.glob("*")} <= {"data", ".lock"}:  # a refused start leaves nothing
            for name in (TRAIN, HELD_OUT, ".lock"):
                (place / name).unlink(missing_ok=True)
            with suppress(OSError):
                for empty in (place / "data", place, *(place.parents[:2] if folder is None else ())):
                    empty.rmdir()
        raise
    finally:
        gc.collect()  # models sit in reference cycles


def _settings(
    model: str | Path,
    data: Rows,
    reward: Reward | Sequence[Reward],
    held_out: Rows | None,
    place: Path,
    settings: Mapping[str, Any],
) -> Settings:
    vars(own).clear()
    for cached in (task_section, factors.section_of):  # a notebook's function of the same name may be another by now
        cached.cache_clear()
    if settings.get("mode", "sync") != "sync":
        raise ValueError(f"grpo_rl.train is mode=sync, and mode is {settings['mode']}; use grpo-rl train")
    loss = settings.get("loss")
    given: dict[str, Any] = {"mode": "sync", "model.name": model, "env.path": _path(data, place / TRAIN)}
    if reward in TASKS if isinstance(reward, str) else inspect.isclass(reward):
        task = _named(reward)
    else:
        task, given["env.reward"] = "prompt_response", _named(reward)
    if held_out is not None:
        given["env.eval_path"] = path = _path(held_out, place / HELD_OUT)
        if path != str(held_out):
            given["evaluate.rows"] = len(Path(path).read_text().splitlines())
    cfg = compose_config(DEFAULT_CONFIG, [f"env.dataset={task}", *([f"loss={loss}"] if isinstance(loss, str) else [])])
    for key, value in [*given.items(), *settings.items()]:
        if not (key == "loss" and isinstance(value, str)):
            OmegaConf.update(cfg, key, _named(value), merge=isinstance(value, Mapping), force_add=True)
    if vars(own):
        cfg.env.isolated = False  # no other process can import them
    return Settings.read(cfg)


def _path(rows: Rows, file: Path) -> str:
    """The path of rows, which are written to a file where they are given themselves."""
    if isinstance(rows, str | Path):
        return str(rows)
    try:
        text = "".join(json.dumps(dict(row)) + "\n" for row in rows)
    except TypeError as error:
        raise ValueError(f"rows are mappings of what JSON can hold: {error}") from error
    if (file.parents[1] / "metrics.jsonl").exists() and file.exists() and file.read_text() != text:
        raise ValueError(f"{file.parents[1]} holds a run with other rows; give another folder")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return str(file)


def _named(value: Any) -> Any:
    """A value of the settings, with functions and classes by name: those of a script or notebook in :data:`own`."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _named(key): _named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    is_hook = hasattr(value, "on_step") and not inspect.isclass(value)
    if not (callable(value) or is_hook):
        return str(value) if isinstance(value, Path) else value
    # A bound method or a wrapper may have the name of another function, and an object has none.
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    found = functools.reduce(lambda at, part: getattr(at, part, None), name.split("."), sys.modules.get(module))
    if module != "__main__" and found is value:
        return f"{module}:{name}"
    name = getattr(value, "__name__", "")
    name = name if name.isidentifier() else type(value).__name__
    while hasattr(own, name):
        name += "_"
    setattr(own, name, (lambda: value) if is_hook else value)  # a hook is made without arguments
    return f"{__name__}:own.{name}"
