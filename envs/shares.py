"""The shares of a mixture's tasks, from their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping


def shares(weights: Mapping[str, float]) -> dict[str, float]:
    """The probability of each task: its weight over the sum of all.

    >>> shares({"gsm8k": 3, "ifeval": 1})
    {'gsm8k': 0.75, 'ifeval': 0.25}
    """
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
