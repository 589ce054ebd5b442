"""Held-out evaluation: greedy rewards, the gain between two evaluations with its interval, and pass@k."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from grpo_rl.collectors.multi_turn import begin, judge, play
from grpo_rl.engines.base import Sampler, Sampling
from grpo_rl.envs.base import LLMEnv, Reward


@dataclass(frozen=True)
class Evaluation:
    """One response to each held-out row, judged.

    Args:
        rewards: total reward of each row; NaN where its scorer failed.
        parts: mean of each named part of the reward.
        measures: mean of each number beside the reward, over the rows that have it.
        prompts: as text, the way the policy read them.
        completions: the responses as text.
        lengths: tokens of each response.
        truncated: which responses reached the length limit.
    """

    rewards: list[float]
    parts: dict[str, float]
    measures: dict[str, float]
    prompts: list[str]
    completions: list[str]
    lengths: list[int]
    truncated: list[bool]

    @property
    def reward(self) -> float:
        """Mean reward over the rows that were judged."""
        return float(np.nanmean(self.rewards))

    def metrics(self) -> dict[str, float]:
        """The evaluation as one line of metrics: ``eval/reward`` and its standard error, parts, length, truncation."""
        judged = np.asarray(self.rewards)[~np.isnan(self.rewards)]
        return {
            "eval/reward": self.reward,
            "eval/standard_error": float(stats.sem(judged)) if len(judged) > 1 else 0.0,
            **{f"eval/{name}": value for name, value in self.parts.items()},
            **{f"eval/measure/{name}": value for name, value in self.measures.items()},
            "eval/mean_length": float(np.mean(self.lengths)),
            "eval/truncated_fraction": float(np.mean(self.truncated)),
            "eval/failed": float(np.isnan(self.rewards).sum()),
        }


def evaluate(env: LLMEnv, engine: Sampler, rows: Sequence[dict[str, Any]], sampling: Sampling) -> Evaluation:
    """Rewards of one response to each row.

    With ``Sampling(temperature=0.0)`` responses are greedy, so that two evaluations differ by their weights alone and
    their rows pair up for :func:`paired_gain`.

    Args:
        env: prompts, replies and scores; the rows need not be its own.

    Raises:
        ValueError: there is no row, or no response could be judged.
    """
    if not rows:
        raise ValueError("no row to evaluate; give a held-out file with rows (env.eval_path) or set evaluate.rows=0")
    trajectories = [begin(env, row, f"held-out row {i}", env.encode(row)) for i, row in enumerate(rows)]
    if env.max_turns > 1:
        play(env, engine, sampling, trajectories)
    else:
        samples = engine.generate([trajectory.prompt_ids for trajectory in trajectories], 1, sampling)
        for trajectory, sample in zip(trajectories, samples, strict=True):
            trajectory.add_turn(sample, env.decode(sample.response_ids))
    results = [judge(env, [trajectory])[0] for trajectory in trajectories]
    judged = [result for result in results if isinstance(result, Reward)]
    if not judged:
        raise ValueError(f"none of the {len(rows)} held-out responses could be judged; the last: {results[-1]}")
    return Evaluation(
        rewards=[result.total if isinstance(result, Reward) else math.nan for result in results],
        parts=_means([reward.parts for reward in judged]),
        measures=_means([reward.measures for reward in judged]),
        prompts=[env.decode(trajectory.prompt_ids) for trajectory in trajectories],
        completions=[trajectory.dialog.text for trajectory in trajectories],
        lengths=[sum(trajectory.trainable) for trajectory in trajectories],
        truncated=[trajectory.truncated for trajectory in trajectories],
    )


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}


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
    its place; where every row gained the same, resampling can show no spread, and the interval is that one point. Rows
    that could not be judged before or after (NaN) are left out.

    Raises:
        ValueError: the lengths differ, a reward is infinite, or there are fewer than two rows.

    >>> paired_gain([0.0, 1.0, 0.5], [0.5, 1.5, 1.0])
    Gain(mean=0.5, low=0.5, high=0.5)
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} rewards before and {len(after)} after; a paired gain needs the same rows")
    if len(before) < 2:
        raise ValueError(f"{len(before)} row(s) give no interval; evaluate at least 2 (evaluate.rows)")
    pair = np.asarray([before, after], dtype=float)
    if np.isinf(pair).any():
        raise ValueError(f"{int(np.isinf(pair).sum())} of {pair.size} rewards are infinite")
    difference = pair[1] - pair[0]
    difference = difference[~np.isnan(difference)]
    if len(difference) < 2:
        raise ValueError(f"{len(difference)} row(s) were judged before and after; an interval needs at least 2")
    mean = float(difference.mean())
    if np.ptp(difference) == 0:
        return Gain(mean, mean, mean)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # an undefined BCa interval comes back as NaN
        for method in ("BCa", "percentile"):
            result = stats.bootstrap(
                (difference,), np.mean, n_resamples=9999, batch=1000, method=method, rng=np.random.default_rng(seed)
            )
            low, high = map(float, result.confidence_interval)
            if np.isfinite([low, high]).all():
                break
    return Gain(mean, low, high)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of ``k`` responses is right: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1. The obvious 1 - (1 - c/n)^k is too low.

    Raises:
        ValueError: unless 0 <= num_correct <= num_samples and 1 <= k <= num_samples.

    Of 5 responses 2 are right; of the 10 ways to pick 3 of them, 1 has no right one:

    >>> pass_at_k(5, 2, 3)
    0.9
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"pass@{k} of {num_samples} responses with {num_correct} correct: "
            "needs 0 <= correct <= responses and 1 <= k <= responses"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
