"""Groups from samples and rewards, built the same way for every collector."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from grpo_rl.data import keys
from grpo_rl.data.group import NO_ROUTE, Group, Kept, Trajectory
from grpo_rl.engines.base import Samples
from grpo_rl.envs.base import Prompt, Reward
from grpo_rl.envs.rows import Row, dialog_of, next_of


def group_of_samples(prompt: Prompt, samples: Samples) -> Group:
    """The responses to one prompt as a group, not yet rewarded.

    Raises:
        RuntimeError: none of the log-probabilities is a number. A few that are not are named when they are trained on.
    """
    _check(samples.log_probs, prompt.row)
    return Group(
        group_id=prompt.group_id,
        row=prompt.row,
        prompt_ids=prompt.ids,
        response_ids=samples.response_ids,
        log_probs=samples.log_probs,
        versions=samples.versions,
        trainable=torch.ones_like(samples.response_ids, dtype=torch.bool),
        offsets=samples.offsets,
        rewards=torch.zeros(len(samples.offsets) - 1),
        truncated=samples.truncated,
        routes=samples.routes,
        prompt_routes=samples.prompt_routes,
        kept_ids=samples.kept_ids,
        kept_counts=samples.kept_counts,
    )


def trajectory_of(rollout: Sequence[Row]) -> Trajectory:
    """The trajectory of a row's steps.

    Raises:
        ValueError: a step's prompt does not begin with the ids of the step before, as they were sampled.
    """
    made = Trajectory()
    for turn, later in zip(rollout, [*rollout[1:], None], strict=True):
        response = turn[keys.TOKENS_RESPONSE]
        kept = turn.get(keys.KEPT_IDS, None)
        kept = kept if kept is None else Kept(kept, turn[keys.KEPT_COUNTS])
        made.sampled(response, turn[keys.LOG_PROBS_RESPONSE], turn[keys.VERSIONS], kept)
        made.routes = turn.get(keys.ROUTES_FULL, made.routes)
        if later is not None:
            before = torch.cat([turn[keys.TOKENS_PROMPT], response])
            whole = later[keys.TOKENS_PROMPT]
            if not torch.equal(whole[: len(before)], before):
                raise ValueError(
                    "the environment's prompt does not begin with the ids of prompt and response; append to them"
                )
            made.read(whole[len(before) :])
    last = rollout[-1]
    made.truncated = bool(last.get(keys.TRUNCATED, False)) or bool(next_of(last).get("truncated", False))
    return made


def group_of_rollouts(rollouts: Sequence[Sequence[Row]]) -> Group | None:
    """The group of all rows of one prompt, with their rewards; None where fewer than two have one."""
    rollouts = [rollout for rollout in rollouts if not bool(next_of(rollout[-1]).get(keys.FAILED, False))]
    if len(rollouts) < 2:
        return None
    first, ends = rollouts[0][0], [next_of(rollout[-1]) for rollout in rollouts]
    group = group_of_trajectories(
        int(first[keys.GROUP_ID]),
        int(first[keys.ROW]),
        first[keys.TOKENS_PROMPT],
        [trajectory_of(rollout) for rollout in rollouts],
    )
    verdicts = [verdict_of(end) for end in ends]
    return replace(
        group,
        rewards=_numbers(float(end[keys.REWARD[-1]]) for end in ends),
        reward_parts=_by_name([_parts(end, verdict) for end, verdict in zip(ends, verdicts, strict=True)]),
        measures=_by_name([verdict.measures if verdict else {} for verdict in verdicts]),
    )


def verdict_of(end: Row) -> Any:
    """The scorer's reward or failure of a row that is done; None in an environment that is no `LLMEnv`."""
    return None if end.get(keys.HISTORY, None) is None else dialog_of(end).verdict


def _parts(end: Row, verdict: Reward | None) -> dict[str, float]:
    parts = end.get(keys.REWARD_PARTS[0], None)
    if parts is None:
        return {}
    names = verdict.parts if verdict else parts.keys()
    return {name: float(parts[name]) for name in names}


def group_of_trajectories(
    group_id: int, row: int, prompt_ids: torch.Tensor, trajectories: Sequence[Trajectory]
) -> Group:
    """The trajectories of one prompt as a group, not yet rewarded.

    Raises:
        RuntimeError: none of the log-probabilities is a number.

    >>> t = Trajectory()
    >>> t.sampled(torch.tensor([5]), torch.tensor([-0.5]), torch.tensor([3])); t.read(torch.tensor([8, 9]))
    >>> group = group_of_trajectories(0, 0, torch.tensor([1]), [t, t])
    >>> group.response_ids.tolist(), group.trainable.tolist(), group.offsets.tolist(), group.versions.tolist()
    ([5, 8, 9, 5, 8, 9], [True, False, False, True, False, False], [0, 3, 6], [3, 3, 3, 3, 3, 3])
    """
    log_probs = torch.cat([piece for t in trajectories for piece in t.log_probs])
    _check(log_probs, row)
    kept = Kept.joined(part for t in trajectories for part in t.kept)
    lengths = [sum(len(piece) for piece in t.ids) for t in trajectories]
    return Group(
        group_id=group_id,
        row=row,
        prompt_ids=prompt_ids,
        response_ids=torch.cat([piece for t in trajectories for piece in t.ids]),
        log_probs=log_probs,
        versions=torch.cat([piece for t in trajectories for piece in t.versions]),
        trainable=torch.cat([piece for t in trajectories for piece in t.trainable]),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        rewards=torch.zeros(len(trajectories)),
        truncated=torch.tensor([t.truncated for t in trajectories]),
        kept_ids=kept and kept.ids,
        kept_counts=kept and kept.counts,
        **_routes(len(prompt_ids), lengths, trajectories),
    )


def _routes(prompt: int, lengths: Sequence[int], trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """The group's routes, if they were recorded; the sampler may not have read the end of a conversation."""
    known = [t.routes for t in trajectories if t.routes is not None]
    if not known:
        return {}
    whole = []
    for length, t in zip(lengths, trajectories, strict=True):
        routes = known[0][:0] if t.routes is None else t.routes[prompt:]
        whole.append(torch.cat([routes, known[0].new_full((length - len(routes), *known[0].shape[1:]), NO_ROUTE)]))
    return {"routes": torch.cat(whole), "prompt_routes": known[0][:prompt]}


def rewarded(group: Group, rewards: Sequence[Reward]) -> Group:
    """The group with the rewards of its responses.

    >>> from grpo_rl.testing import random_group
    >>> rewarded(random_group(lengths=[1, 3]), [Reward({"right": 1.0}), Reward({"right": 0.0})]).rewards.tolist()
    [1.0, 0.0]
    """
    return replace(
        group,
        rewards=_numbers(reward.total for reward in rewards),
        reward_parts=_by_name([reward.parts for reward in rewards]),
        measures=_by_name([reward.measures for reward in rewards]),
    )


def has_zero_variance(group: Group, clip: float = math.inf, by_part: bool = False) -> bool:
    """True if all responses have the same reward, and so no advantage over each other.

    Args:
        clip: rewards are compared within plus and minus this.
        by_part: each part of the reward is compared, not their sum.
    """
    rewards = torch.stack(list(group.reward_parts.values())) if by_part else group.rewards.clamp(-clip, clip)[None]
    # A response without a part differs in it from none.
    most, least = rewards.nan_to_num(-math.inf).amax(1), rewards.nan_to_num(math.inf).amin(1)
    return bool((most <= least).all())


def _check(log_probs: torch.Tensor, row: int) -> None:
    if len(log_probs) and not log_probs.isfinite().any():
        raise RuntimeError(
            f"the engine sampled row {row} with log-probabilities none of which is a finite number: its model's "
            "arithmetic fails. Try inference_model.engine=transformers, or another dtype"
        )


def _by_name(numbers: Sequence[Mapping[str, float]]) -> dict[str, torch.Tensor]:
    """The named numbers of each response; NaN where it has none of a name."""
    names = dict.fromkeys(name for own in numbers for name in own)
    return {name: _numbers(own.get(name, math.nan) for own in numbers) for name in names}


def _numbers(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float32)
