"""95 % intervals of means over rows, and of paired gains: the one source of every interval that the project states."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95
ROUNDING = 1e-6
"""Numbers that differ by no more than this share of the rewards' range are equal: they may have been float32."""


@dataclass(frozen=True)
class Estimate:
    """A mean over rows and its 95 % interval.

    >>> print(Estimate(0.5, 0.4, 0.6))
    0.500 (95 % interval 0.400 to 0.600)
    """

    mean: float
    low: float
    high: float

    @property
    def ci95(self) -> list[float]:
        """The interval as ``summary.json`` and ``eval.json`` hold it."""
        return [self.low, self.high]

    def __str__(self) -> str:
        return f"{self.mean:.3f} (95 % interval {self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Gain(Estimate):
    """The mean of a paired difference and its 95 % interval."""

    def __str__(self) -> str:
        return f"{self.mean:+.3f} (95 % interval {self.low:+.3f} to {self.high:+.3f})"

    @property
    def verdict(self) -> str:
        """The interval's verdict on the second evaluation against the first.

        >>> Gain(0.1, 0.02, 0.18).verdict, Gain(0.1, -0.02, 0.22).verdict, Gain(-0.1, -0.2, -0.01).verdict
        ('better', 'no difference shown', 'worse')
        """
        return "better" if self.low > 0 else "worse" if self.high < 0 else "no difference shown"


def paired_gain(before: Sequence[float], after: Sequence[float]) -> Gain:
    """The mean of ``after - before`` over the same rows, with a 95 % interval.

    The interval is Student's t of the differences: some rows are hard before and after, and the spread between rows is
    no spread of the gain. It covers a true gain of zero in 93 to 97 % of cases, from 20 rows on, where six rows change
    on average or more, and more often where fewer do: five of one direction decide nothing by a sign test, either
    (`benchmarks/intervals.py`; docs/log.md has what bootstraps cover).

    Where all rows gain the same, mostly nothing, there is no spread to judge by. Then up to 1 - 0.025^(1/n) of the rows
    could change otherwise without any of n doing so in 2.5 % of cases (the "rule of three" at this level); each by up
    to the range of the rewards seen, or 1 if that is more. Rows without a reward before or after (NaN) are left out.

    Raises:
        ValueError: the lengths differ, a reward is infinite, or there are fewer than two rows.

    The differences 0, 1, 2 have the mean 1 and the standard error 1 / sqrt(3); t at 97.5 % with 2 degrees is 4.303:

    >>> paired_gain([0.0, 1.0, 0.5], [0.0, 2.0, 2.5])
    Gain(mean=1.0, low=-1.484..., high=3.484...)
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} rewards before and {len(after)} after; a paired gain needs the same rows")
    pair = np.asarray([before, after], dtype=float)
    if np.isinf(pair).any():
        raise ValueError(f"{int(np.isinf(pair).sum())} of {pair.size} rewards are infinite")
    pair = pair[:, ~np.isnan(pair).any(axis=0)]
    if pair.shape[1] < 2:
        raise ValueError(f"{pair.shape[1]} row(s) were judged both times; an interval needs at least 2 (evaluate.rows)")
    difference = pair[1] - pair[0]
    mean, half = float(difference.mean()), _half_width(difference, max(float(np.ptp(pair)), 1.0))
    return Gain(mean, mean - half, mean + half)


def mean_interval(values: Sequence[float], bounds: tuple[float, float] = (-math.inf, math.inf)) -> Estimate:
    """The mean of one number per row, with a 95 % interval inside ``bounds``.

    Between the bounds 0 and 1, numbers that are all 0 or 1 get Wilson's interval (https://doi.org/10.2307/2276774),
    which holds up where nearly all are the same; others get Student's t, as :func:`paired_gain`. NaN is left out.

    Raises:
        ValueError: fewer than two rows have a number.

    Of 10 rows none is right; Wilson's upper end is z^2 / (n + z^2) = 3.841 / 13.841:

    >>> print(mean_interval([0.0] * 10, (0.0, 1.0)))
    0.000 (95 % interval 0.000 to 0.278)
    """
    numbers = np.asarray(values, dtype=float)
    numbers = numbers[~np.isnan(numbers)]
    if len(numbers) < 2:
        raise ValueError(f"{len(numbers)} row(s) were judged; an interval needs at least 2")
    mean = float(numbers.mean())
    if bounds == (0, 1) and np.isin(numbers, (0.0, 1.0)).all():
        interval = stats.binomtest(int(numbers.sum()), len(numbers)).proportion_ci(LEVEL, method="wilson")
        return Estimate(mean, float(interval.low), float(interval.high))
    span = bounds[1] - bounds[0]
    half = _half_width(numbers, span if math.isfinite(span) else max(float(np.abs(numbers).max()), 1.0))
    return Estimate(mean, max(mean - half, bounds[0]), min(mean + half, bounds[1]))


def _half_width(numbers: np.ndarray, span: float) -> float:
    """Half the width of the interval of a mean; ``span`` is how far a number may lie from others that are all equal."""
    rows, tail = len(numbers), (1 - LEVEL) / 2
    if np.ptp(numbers) <= ROUNDING * span:
        return span * (1 - tail ** (1 / rows))
    return float(stats.t.ppf(1 - tail, rows - 1) * numbers.std(ddof=1) / math.sqrt(rows))
