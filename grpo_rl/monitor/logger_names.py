"""The names that ``logger.backend`` takes, without the libraries of the loggers."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_rl.by_name import is_name

NONE = "none"
BUILT_IN = {
    "wandb": ("grpo_rl.monitor.wandb:WandbLog", "wandb"),
    "tensorboard": ("grpo_rl.monitor.tensorboard:TensorBoardLog", "torch.utils.tensorboard"),
    "trackio": ("grpo_rl.monitor.trackio:TrackioLog", "trackio"),
    "mlflow": ("grpo_rl.monitor.mlflow:MLflowLog", "mlflow"),
}
"""The built-in loggers by name: class, and required library."""


def logger_names(backend: str | Sequence[str]) -> list[str]:
    """The loggers that `logger.backend` names, each once.

    Raises:
        ValueError: there is no logger of that name.

    >>> logger_names("tensorbord")
    Traceback (most recent call last):
    ...
    ValueError: logger.backend=tensorbord: choose wandb, tensorboard, trackio, mlflow, package.module:Class, or none
    """
    names = dict.fromkeys([backend] if isinstance(backend, str) else backend)
    for name in names:
        if not (name in (*BUILT_IN, NONE) or is_name(name)):
            raise ValueError(f"logger.backend={name}: choose {', '.join(BUILT_IN)}, package.module:Class, or none")
    return [name for name in names if name != NONE]
