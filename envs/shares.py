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
        check_positive(f"{name}.weight", weight)
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def check_positive(name: str, value: object) -> None:
    """Raises ValueError unless a weight or scale of ``env.mixture`` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"env.mixture.{name} is {value!r}; it must be a finite number above 0")
