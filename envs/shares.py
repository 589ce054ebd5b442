"""The shares of a mixture's tasks, from their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping


def shares(weights: Mapping[str, float]) -> dict[str, float]:
    """The probability of each task: its weight over the sum of all.

    Raises:
        ValueError: there are none, or one is no finite number above 0.

    >>> shares({"gsm8k": 3, "ifeval": 1})
    {'gsm8k': 0.75, 'ifeval': 0.25}
    """
    if not weights:
        raise ValueError("env.mixture is empty; give at least one task with its weight: {gsm8k: 0.5, ifeval: 0.5}")
    for name, weight in weights.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)
        if not number or weight <= 0:
            raise ValueError(
                f"env.mixture.{name}: the weight is {weight!r}; it must be a finite number above 0. Leave out a task "
                "that is not to be drawn"
            )
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def check_scale(name: str, scale: object) -> None:
    """Raises ValueError unless the factor of a task's rewards is a finite number above 0.

    >>> check_scale("gsm8k", 0)
    Traceback (most recent call last):
    ...
    ValueError: env.mixture.gsm8k.scale is 0; it must be a finite number above 0, a factor of its rewards
    """
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not math.isfinite(scale) or scale <= 0:
        raise ValueError(
            f"env.mixture.{name}.scale is {scale!r}; it must be a finite number above 0, a factor of its rewards"
        )
