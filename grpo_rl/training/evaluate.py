"""Held-out evaluation: responses to held-out rows, judged, and the scores of each row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
from scipy import stats

from grpo_rl.collectors.base import unchanged
from grpo_rl.collectors.engine_policy import EnginePolicy, play_all, reset_rows
from grpo_rl.data import keys
from grpo_rl.engines.base import Sampler, Sampling, seeded
from grpo_rl.envs.base import Failure, LLMEnv, Reward, Task
from grpo_rl.envs.rows import dialog_of, next_of
from grpo_rl.envs.task import last_said


@dataclass(frozen=True)
class Evaluation:
    """Responses to held-out rows, judged; lists have the responses to one row side by side.

    Args:
        rewards: total reward of each response; NaN where its scorer failed.
        parts: mean of each named part of the reward.
        measures: mean of each number beside the reward, over the responses that have it.
        prompts: as text, the way the policy read them, without special tokens.
        completions: the responses as text.
        lengths: tokens of each response.
        truncated: which responses reached the length limit.
        samples: responses to each row.
        correct: whether each response is right; None where that can't be told.
        answers: the final answer of each response, equal ones written alike; empty if the task knows none.
    """

    rewards: list[float]
    parts: dict[str, float]
    measures: dict[str, float]
    prompts: list[str]
    completions: list[str]
    lengths: list[int]
    truncated: list[bool]
    samples: int = 1
    correct: Sequence[bool | None] = ()
    answers: Sequence[str | None] = ()

    @property
    def reward(self) -> float:
        """Mean reward over the responses that were judged; NaN where none was."""
        return float(np.nanmean(self.rewards)) if not np.isnan(self.rewards).all() else math.nan

    def metrics(self) -> dict[str, float]:
        """The evaluation as one line of metrics: ``eval/reward`` and its standard error, parts, length, truncation."""
        judged = np.asarray(self.rewards)[~np.isnan(self.rewards)]
        return {
            "eval/reward": self.reward,
            "eval/standard_error": float(stats.sem(judged)) if len(judged) > 1 else math.nan,
            **{f"eval/{name}": value for name, value in self.parts.items()},
            **{f"eval/measure/{name}": value for name, value in self.measures.items()},
            "eval/mean_length": float(np.mean(self.lengths)),
            "eval/truncated_fraction": float(np.mean(self.truncated)),
            "eval/failed": float(np.isnan(self.rewards).sum()),
        }

    def of_rows(self, rows: Sequence[int]) -> Evaluation:
        """The evaluation of some of the rows alone, whose parts and measures the whole one has."""
        n = self.samples
        at = [row * n + i for row in rows for i in range(n)]
        lists = ("rewards", "prompts", "completions", "lengths", "truncated", "correct", "answers")
        chosen = {name: [values[i] for i in at] for name in lists if (values := getattr(self, name))}
        return replace(self, parts={}, measures={}, **chosen)

    def row_rewards(self) -> list[float]:
        """The mean reward of each row's responses that were judged; NaN where none was."""
        rows = np.reshape(self.rewards, (-1, self.samples))
        return [float(np.nanmean(row)) if not np.isnan(row).all() else math.nan for row in rows]

    def row_scores(self) -> dict[str, list[float]]:
        """One number per row for each score: ``accuracy`` of one response; of several ``pass@k`` and ``maj@k``.

        NaN stands for a row of which less than k responses were judged. Tasks that don't tell what is right have no
        score, and those without final answers no majority; ``tied`` is 1 where answers tied for it.
        """
        if all(known is None for known in self.correct):
            return {}
        n, scores = self.samples, {}
        for at in range(0, len(self.rewards), n):
            known = [i for i in range(at, at + n) if self.correct[i] is not None]
            right = [bool(self.correct[i]) for i in known]
            row = {f"pass@{k}": pass_at_k(len(right), sum(right), k) if len(right) >= k else math.nan for k in ks(n)}
            if n == 1:
                row = {"accuracy": row["pass@1"]}
            elif self.answers:
                votes = self.answers[at : at + n]
                value, tied = majority(votes, right) if len(known) == n else (math.nan, math.nan)
                row |= {f"maj@{n}": value, "tied": float(tied)}
            for name, value in row.items():
                scores.setdefault(name, []).append(value)
        return scores


class Sessions(Protocol):
    """Sessions of agents in the place of responses: `grpo_rl.assembly.agents.HeldOutSessions`."""

    def evaluate(
        self, env: LLMEnv, engine: Sampler, rows: Sequence[dict[str, Any]], sampling: Sampling, samples: int
    ) -> Evaluation:
        """The judged sessions about each row."""

    def for_now(self) -> AbstractContextManager[None]:
        """A context at whose end the processes that evaluations inside it started are ended."""


def row_scores(greedy: Evaluation, sampled: Evaluation | None) -> dict[str, list[float]]:
    """All scores of each row: ``reward`` and ``accuracy`` of the greedy response, ``sampled_reward``, pass@k, maj@k.

    A single sampled response has ``sampled_accuracy``.
    """
    scores = {"reward": greedy.row_rewards(), **greedy.row_scores()}
    if sampled is None:
        return scores
    more = {f"sampled_{name}" if name == "accuracy" else name: row for name, row in sampled.row_scores().items()}
    return scores | {"sampled_reward": sampled.row_rewards()} | more


def score_names(task: Task, samples: int) -> list[str]:
    """The names of all scores that :func:`row_scores` can give, with so many sampled responses to each row.

    Whether a task tells what is right can depend on its responses: then a score that is named may be missing.
    """
    tells = task.tells_right
    names = ["reward", *(["accuracy"] if tells else []), *(["sampled_reward"] if samples else [])]
    if not (tells and samples):
        return names
    if samples == 1:
        return [*names, "sampled_accuracy"]
    has_answers = bool(task.final_answers([""]))
    return [*names, *(f"pass@{k}" for k in ks(samples)), *([f"maj@{samples}", "tied"] if has_answers else [])]


def evaluate(
    env: LLMEnv,
    engine: Sampler,
    rows: Sequence[dict[str, Any]],
    sampling: Sampling,
    samples: int = 1,
    seed: int = 0,
    sessions: Sessions | None = None,
) -> Evaluation:
    """The judged responses to each row.

    With ``Sampling(temperature=0.0)`` responses are greedy, so that two evaluations differ by their weights alone and
    their rows pair up for `grpo_rl.intervals.paired_gain`. At other temperatures an engine in this process draws with
    ``seed``, the same in every evaluation, and its generators are put back behind it; engines in other processes draw
    with their own. Agents' calls come in the order of the clock, so their sessions draw otherwise in each evaluation.

    Args:
        env: prompts, replies and scores; the rows need not be its own.
        sessions: agents' sessions in the place of responses.

    Raises:
        ValueError: there is no row, or no response could be judged.
    """
    if not rows:
        raise ValueError("no row to evaluate; give a held-out file with rows (env.eval_path) or set evaluate.rows=0")
    draws = seeded(seed if sampling.temperature else None)
    if sessions is not None:
        with draws:
            return sessions.evaluate(env, engine, rows, sampling, samples)
    with draws, unchanged(env):
        policy = EnginePolicy(engine, sampling)
        asked = reset_rows(env, policy, rows=rows, repeats=samples)
        rollouts, _ = play_all(env, policy, asked)
    dialogs = [dialog_of(next_of(rollout[-1])) for rollout in rollouts]
    return judged(
        env.task,
        [dialog.verdict for dialog in dialogs],
        [env.decode_prompt(row[keys.TOKENS_PROMPT]) for row in asked],
        [dialog.messages for dialog in dialogs],
        [dialog.text for dialog in dialogs],
        [sum(len(turn[keys.TOKENS_RESPONSE]) for turn in rollout) for rollout in rollouts],
        [bool(next_of(rollout[-1])["truncated"]) for rollout in rollouts],
        samples,
    )


def judged(
    task: Task,
    results: Sequence[Reward | Failure],
    prompts: list[str],
    dialogs: Sequence[list[dict[str, str]]],
    texts: list[str],
    lengths: list[int],
    truncated: list[bool],
    samples: int,
) -> Evaluation:
    """The evaluation of responses with their rewards, however sampled; a ValueError where none could be judged."""
    rewards = [result for result in results if isinstance(result, Reward)]
    if not rewards:
        raise ValueError(f"none of the {len(results)} held-out responses could be judged; the last: {results[-1]}")
    answers: list[str | None] = []
    for at in range(0, len(dialogs), samples):
        answers += task.final_answers([last_said(messages) for messages in dialogs[at : at + samples]]) or []
    return Evaluation(
        rewards=[result.total if isinstance(result, Reward) else math.nan for result in results],
        parts=_means([reward.parts for reward in rewards]),
        measures=_means([reward.measures for reward in rewards]),
        prompts=prompts,
        completions=texts,
        lengths=lengths,
        truncated=truncated,
        samples=samples,
        correct=[task.is_right(result) if isinstance(result, Reward) else None for result in results],
        answers=answers,
    )


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of ``k`` responses is right: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1. The obvious 1 - (1 - c/n)^k is too low.

    Of 5 responses 2 are right; of the 10 ways to pick 3 of them, 1 has no right one:

    >>> pass_at_k(5, 2, 3)
    0.9
    """
    return float(1 - Fraction(math.comb(num_samples - num_correct, k), math.comb(num_samples, k)))


def ks(samples: int) -> list[int]:
    """The k of pass@k that are reported for so many responses to a row: powers of two, and all.

    >>> ks(8), ks(6), ks(1)
    ([1, 2, 4, 8], [1, 2, 4, 6], [1])
    """
    return [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> tuple[float, bool]:
    """The chance that the answer that most responses state is right, and whether several answers tie.

    Among answers that tie one is drawn: the chance is the share of right ones. Responses that state no answer have no
    vote; if none does, the majority is wrong. Responses that are right in one form and wrong in another, with one
    answer, count by their share.

    Args:
        answers: the final answer of each response, equal ones written alike.

    >>> majority(["7", "7", "8", None], [True, True, False, False]), majority(["7", "8"], [True, False])
    ((1.0, False), (0.5, True))
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0, False
    most = max(votes.values())
    leading = [answer for answer, count in votes.items() if count == most]
    right = [sum(c for a, c in zip(answers, correct, strict=True) if a == answer) / most for answer in leading]
    return sum(right) / len(leading), len(leading) > 1
