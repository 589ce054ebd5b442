"""Held-out evaluation: responses to held-out rows, judged, and pass@k."""

from __future__ import annotations

import math
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
        completions: the responses as text.
        lengths: tokens of each response.
        truncated: which responses reached the length limit.
    """

    rewards: list[float]
    parts: dict[str, float]
    measures: dict[str, float]
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
    their rows pair up for `grpo_rl.intervals.paired_gain`.

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
        completions=[trajectory.dialog.text for trajectory in trajectories],
        lengths=[sum(trajectory.trainable) for trajectory in trajectories],
        truncated=[trajectory.truncated for trajectory in trajectories],
    )


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}


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
