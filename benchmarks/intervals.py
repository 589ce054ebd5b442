"""Share of null simulations whose 95 % interval of the paired gain covers zero: `python benchmarks/intervals.py`.

Rewards before and after are exchangeable, so that the true gain is zero: a row is drawn, and with the probability of
the column it is drawn again after training. The interval should cover zero in 93 to 97 % of cases. Shapes of rewards:

- binary: 0 or 1, each as likely; a row that changes goes from one to the other.
- sums: GSM8K's 0, 0.5, 1, 2, 2.5 and 3, weighted as an early run has them.
- continuous: normal; a row that changes is drawn anew.

Columns are shares of rows whose reward changes. A number in brackets is of a cell where the rows that change are too
few, on average, for any test: `attainable` says by enumeration what is possible with binary rewards. With
`--compare`, also BCa and studentized bootstraps, on fewer simulations: they take minutes.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from math import comb

import numpy as np
from scipy import stats

from grpo_rl.intervals import paired_gain

ROWS, DENSITIES = (20, 50, 200), (0.05, 0.1, 0.2, 0.5, 1.0)
SHAPES = ("binary", "sums", "continuous")
SUMS, SHARES = np.array([0.0, 0.5, 1.0, 2.0, 2.5, 3.0]), np.array([0.45, 0.25, 0.1, 0.1, 0.05, 0.05])
FEW = 6
"""The fewest changed rows that can decide at 5 %: all of one sign, a sign test gives them p = 0.03, and five 0.06."""
Interval = Callable[[Sequence[float], Sequence[float]], tuple[float, float]]


def paired_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """The ends of the interval of `paired_gain`."""
    gain = paired_gain(before, after)
    return gain.low, gain.high


def null_pairs(shape: str, rows: int, density: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rewards before and after, [count, rows] each, exchangeable; ``density`` of the rows change on average."""
    rng = np.random.default_rng(seed)
    changes = rng.random((count, rows)) < density
    if shape == "continuous":
        before, other = rng.normal(0.5, 1.0, (2, count, rows))
    elif shape == "binary":
        before = rng.integers(0, 2, (count, rows)).astype(float)
        other = 1.0 - before
    else:
        before = rng.choice(SUMS, (count, rows), p=SHARES)
        other = rng.choice(SUMS, (count, rows), p=SHARES)
        while (same := other == before).any():  # rejection keeps the pair exchangeable only if both are drawn anew
            before[same], other[same] = rng.choice(SUMS, (2, int(same.sum())), p=SHARES)
    return before, np.where(changes, other, before)


def coverage(interval: Interval, shape: str, rows: int, density: float, count: int, seed: int = 0) -> float:
    """Share of ``count`` null simulations whose interval contains zero."""
    before, after = null_pairs(shape, rows, density, count, seed)
    ends = np.array([interval(b, a) for b, a in zip(before, after, strict=True)])
    return float(((ends[:, 0] <= 0) & (ends[:, 1] >= 0)).mean())


def attainable(rows: int, density: float, fewest: int) -> float:
    """Coverage of zero, by enumeration, of an interval for binary rewards that excludes zero on the strongest evidence.

    That is: ``fewest`` or more rows change, and all in one direction.
    """
    chance = (
        comb(rows, m) * density**m * (1 - density) ** (rows - m) * 0.5 ** (m - 1) for m in range(fewest, rows + 1)
    )
    return 1 - sum(chance)


def bootstrap(method: str) -> Interval:
    """The bootstrap's interval by scipy; where it is undefined, the one point of the mean."""

    def interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
        difference = np.asarray(after) - np.asarray(before)
        if np.ptp(difference) == 0:
            return difference[0], difference[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if method == "studentized":
                return studentized(difference)
            found = stats.bootstrap(
                (difference,), np.mean, n_resamples=999, method=method, rng=np.random.default_rng(0)
            )
        low, high = found.confidence_interval
        return (low, high) if np.isfinite([low, high]).all() else (difference.mean(), difference.mean())

    return interval


def studentized(difference: np.ndarray) -> tuple[float, float]:
    """The bootstrap-t interval of a mean."""
    rng, n, mean = np.random.default_rng(0), len(difference), difference.mean()
    samples = difference[rng.integers(0, n, (999, n))]
    errors = samples.std(axis=1, ddof=1) / np.sqrt(n)
    t = (samples.mean(axis=1)[errors > 0] - mean) / errors[errors > 0]
    low, high = np.quantile(t, [0.975, 0.025])
    own = difference.std(ddof=1) / np.sqrt(n)
    return mean - low * own, mean - high * own


def table(name: str, interval: Interval, count: int) -> list[float]:
    """Prints the coverage of each cell, and returns those of the cells where enough rows change."""
    print(f"\n{name}: share of {count} null simulations that cover zero, in per cent")
    print(f"{'rewards':<12}{'rows':>5}" + "".join(f"{density:>10.0%}" for density in DENSITIES))
    judged = []
    for shape in SHAPES:
        for rows in ROWS:
            cells = []
            for density in DENSITIES:
                value = 100 * coverage(interval, shape, rows, density, count)
                few = rows * density < FEW
                judged += [] if few else [value]
                cells.append(f"{f'({value:.1f})' if few else f'{value:.1f} ':>10}")
            print(f"{shape:<12}{rows:>5}" + "".join(cells), flush=True)
    print(f"where {FEW} rows or more change on average: {min(judged):.1f} to {max(judged):.1f}")
    return judged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--count", type=int, default=2000, help="simulations in each cell")
    parser.add_argument("--compare", action="store_true", help="bootstraps too, on a tenth of the simulations")
    args = parser.parse_args()
    table("Student's t (paired_interval)", paired_interval, args.count)
    print(
        "\nbinary rewards, 20 rows, by enumeration: an interval that excludes zero when all of at least m changed rows"
    )
    for fewest in (3, 4):
        values = ", ".join(f"{100 * attainable(20, d, fewest):.1f} % where {d:.0%} change" for d in DENSITIES[:3])
        print(f"go one way, m = {fewest}, covers at most {values}")
    for method in ("BCa", "studentized") if args.compare else ():
        table(method, bootstrap(method), max(args.count // 10, 1))


if __name__ == "__main__":
    main()
