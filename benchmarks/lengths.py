"""Ragged responses: many short ones and a few long, log-normally distributed."""

from __future__ import annotations

import math
import sys
from statistics import NormalDist

import torch


def log_normal_quantiles(count: int, median: int, p99_over_median: float, longest: int = sys.maxsize) -> list[int]:
    """``count`` evenly spaced quantiles of a log-normal distribution, at least 1 and at most ``longest``.

    The middle one of an odd count is the median; of 50, the last is the 99th percentile:

    >>> quantiles = log_normal_quantiles(50, median=50, p99_over_median=8.0)
    >>> quantiles[0], quantiles[-1]
    (6, 400)
    """
    sigma = math.log(p99_over_median) / NormalDist().inv_cdf(0.99)
    normal = NormalDist(math.log(median), sigma)
    return [min(longest, max(1, round(math.exp(normal.inv_cdf((i + 0.5) / count))))) for i in range(count)]


def dealt_lengths(
    groups: int, repeats: int, median: int, p99_over_median: float, longest: int = sys.maxsize
) -> list[list[int]]:
    """Lengths of each group's ``repeats`` responses: quantiles over all of them, so that a small batch has the shape
    of the distribution, dealt at random, the same each time.

    >>> [sorted(row) for row in dealt_lengths(groups=1, repeats=3, median=50, p99_over_median=8.0)]
    [[21, 50, 119]]
    """
    quantiles = log_normal_quantiles(groups * repeats, median, p99_over_median, longest)
    order = torch.randperm(len(quantiles), generator=torch.Generator().manual_seed(0)).tolist()
    dealt = [quantiles[i] for i in order]
    return [dealt[i : i + repeats] for i in range(0, len(dealt), repeats)]
