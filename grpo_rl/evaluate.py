"""Held-out evaluation: greedy rewards, the gain between two evaluations with its interval, and pass@k."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from grpo_rl.engines.base import Engine, Sampling
    from grpo_rl.envs.base import Reward


@dataclass(frozen=True)
class Evaluation:
    """One answer to each held-out row, judged.

    Args:
        rewards: total reward of each row.
        parts: mean of each named part of the reward.
        completions: the answers as text.
        lengths: tokens of each answer.
        truncated: which answers met the length limit.
    """

    rewards: list[float]
    parts: dict[str, float]
    completions: list[str]
    lengths: list[int]
    truncated: list[bool]

    @property
    def reward(self) -> float:
        """Mean reward over the rows."""
        return float(np.mean(self.rewards))

    def metrics(self) -> dict[str, float]:
        """The evaluation as one line of metrics: ``eval/reward``, ``eval/<part>``, length and truncation."""
        return {
            "eval/reward": self.reward,
            **{f"eval/{name}": value for name, value in self.parts.items()},
            "eval/mean_length": float(np.mean(self.lengths)),
            "eval/truncated_fraction": float(np.mean(self.truncated)),
        }


def evaluate(
    engine: Engine,
    rows: Iterable[dict[str, Any]],
    encode: Callable[[dict[str, Any]], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    score: Callable[[dict[str, Any], str], Reward],
    sampling: Sampling,
) -> Evaluation:
    """Rewards of one answer to each row.

    With ``Sampling(temperature=0.0)`` answers are greedy, so that two evaluations differ by their weights alone and
    their rows pair up for :func:`paired_gain`.

    Args:
        encode: a row -> the ids of its prompt.
        decode: the ids of an answer -> the text that is judged.
        score: a row and the answer's text -> its reward.

    Raises:
        ValueError: there is no row.
    """
    rows = list(rows)
    if not rows:
        raise ValueError("no row to evaluate; give a held-out file with rows (env.eval_path) or set evaluate.rows=0")
    samples = engine.generate([list(encode(row)) for row in rows], n=1, sampling=sampling)
    assert len(samples) == len(rows), (len(samples), len(rows))
    answers = [sample.response_ids.tolist() for sample in samples]
    completions = [decode(ids) for ids in answers]
    scores = [score(row, text) for row, text in zip(rows, completions, strict=True)]
    return Evaluation(
        rewards=[float(reward.total) for reward in scores],
        parts={name: float(np.mean([reward.parts[name] for reward in scores])) for name in scores[0].parts},
        completions=completions,
        lengths=[len(ids) for ids in answers],
        truncated=[bool(sample.truncated[0]) for sample in samples],
    )


@dataclass(frozen=True)
class Gain:
    """Mean of the paired difference and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def ci95(self) -> list[float]:
        """The interval as ``summary.json`` holds it."""
        return [self.low, self.high]

    def __str__(self) -> str:
        return f"{self.mean:+.3f} (95 % interval {self.low:+.3f} to {self.high:+.3f})"


def paired_gain(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Gain:
    """Mean of ``after - before`` over the same rows, with a bootstrap 95 % interval.

    Rows are resampled as pairs: some rows are hard before and after, and the spread between rows is not spread of the
    gain. The interval is BCa (bias-corrected and accelerated; Efron 1987, https://doi.org/10.2307/2289144), which
    allows for the skew of rewards that are mostly 0 or 1. Where BCa is undefined, the plain percentile interval takes
    its place; where every row gained the same, resampling can show no spread, and the interval is that one point.

    Raises:
        ValueError: the lengths differ, a reward is not finite, or there are fewer than two rows.

    >>> paired_gain([0.0, 1.0, 0.5], [0.5, 1.5, 1.0])
    Gain(mean=0.5, low=0.5, high=0.5)
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} rewards before and {len(after)} after; a paired gain needs the same rows")
    if len(before) < 2:
        raise ValueError(f"{len(before)} row(s) give no interval; evaluate at least 2 (evaluate.rows)")
    difference = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    if not np.isfinite(difference).all():
        raise ValueError(f"{int((~np.isfinite(difference)).sum())} of {len(difference)} rewards are not finite")
    mean = float(difference.mean())
    if np.ptp(difference) == 0:
        return Gain(mean, mean, mean)
    interval = _bootstrap(difference, "BCa", seed)
    if not np.isfinite(interval).all():
        interval = _bootstrap(difference, "percentile", seed)
    return Gain(mean, *interval)


def _bootstrap(difference: np.ndarray, method: str, seed: int) -> tuple[float, float]:
    with warnings.catch_warnings():
        # An undefined BCa interval comes back as NaN, which the caller looks at.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        result = stats.bootstrap(
            (difference,), np.mean, n_resamples=9999, batch=1000, method=method, rng=np.random.default_rng(seed)
        )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of ``k`` answers is right: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1. The obvious 1 - (1 - c/n)^k is too low.

    Raises:
        ValueError: unless 0 <= num_correct <= num_samples and 1 <= k <= num_samples.

    Of 5 answers 2 are right; of the 10 ways to pick 3 of them, 1 has no right one:

    >>> pass_at_k(5, 2, 3)
    0.9
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"pass@{k} of {num_samples} answers with {num_correct} correct: "
            "needs 0 <= correct <= answers and 1 <= k <= answers"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
