"""The names that ``logger.backend`` takes, without the libraries of the loggers."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from grpo_rl.by_name import is_name

NONE = "none"
BUILT_IN = {
    "wandb": ("grpo_rl.monitor.wandb:WandbLog", "wandb"),
    "tensorboard": ("grpo_rl.monitor.tensorboard:TensorBoardLog", "torch.utils.tensorboard"),
    "trackio": ("grpo_rl.monitor.trackio:TrackioLog", "trackio"),
    "mlflow": ("grpo_rl.monitor.mlflow:MLflowLog", "mlflow"),
}
"""The loggers that have a name: their class, and the library that it needs."""


def logger_names(backend: str | Sequence[str]) -> list[str]:
    """The loggers that `logger.backend` names, each once.

    Raises:
        ValueError: there is no logger of that name; names the nearest.

    >>> logger_names("none"), logger_names(["wandb", "tensorboard", "wandb"])
    ([], ['wandb', 'tensorboard'])
    >>> logger_names("tensorbord")
    Traceback (most recent call last):
    ...
    ValueError: logger.backend names 'tensorbord'; did you mean tensorboard?
    """
    names = list(dict.fromkeys([backend] if isinstance(backend, str) else backend))
    for name in names:
        if name in (*BUILT_IN, NONE) or is_name(name):
            continue
        close = difflib.get_close_matches(name, [*BUILT_IN, NONE], n=1)
        known = f"it takes {', '.join(BUILT_IN)}, package.module:Class, or none"
        raise ValueError(f"logger.backend names {name!r}; " + (f"did you mean {close[0]}?" if close else known))
    if NONE in names and len(names) > 1:
        raise ValueError(f"logger.backend={names} has loggers and none; take out one or the other")
    return [name for name in names if name != NONE]


def settings_name(name: str) -> str:
    """The key of a logger in `logger.settings`: its name, or that of its class.

    >>> settings_name("wandb"), settings_name("my.module:CsvLog")
    ('wandb', 'CsvLog')
    """
    return name.rpartition(":")[2]
