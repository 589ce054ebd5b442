"""The micro-batches of an optimizer step, scored with gradient, as `GRPOLoss` reads them. Letter: N response tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from jaxtyping import Bool, Float
from tensordict import TensorDict
from torch import Tensor

from grpo_rl.data.batching import MicroBatching, groups_to_score, micro_batches_of
from grpo_rl.data.group import Group
from grpo_rl.losses.aggregate import StepTotals, token_weights
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.policies.router_record import router_record


def scored_micro_batches(
    policy: TrainPolicy, groups: Sequence[Group], batching: MicroBatching, totals: StepTotals | None = None
) -> Iterator[TensorDict]:
    """The groups of one optimizer step, scored with gradient a micro-batch at a time.

    If several processes train the policy, each is given all groups and scores its share of them.

    Args:
        groups: all groups of the optimizer step, with advantages.
        totals: counts of the whole step, if ``groups`` are not all of it; by default those of ``groups``.

    Raises:
        ValueError: a group lacks a field that the loss needs, or processes were given different groups.
    """
    missing = [group.group_id for group in groups if group.advantages is None]
    if missing:
        raise ValueError(f"groups {missing} have no advantages; write them with AdvantageEstimator")
    totals = totals or step_totals(groups, batching.mask_truncated, batching.top_entropy_fraction)
    to_score = groups_to_score(groups, batching.skip_zero_advantage, batching.mask_truncated)
    if policy.peers:
        ids = policy.peers.gather([group.group_id for group in to_score])
        if any(of_rank != ids[0] for of_rank in ids):
            raise ValueError(f"processes were given different groups for one step: {ids}; broadcast them, in one order")
    micros, owned = micro_batches_of(policy.peers, to_score, batching.max_tokens, batching.count)
    record = router_record(getattr(policy, "model", None))  # what scores by a stored table has no model
    for i, micro in enumerate(micros):
        with record.recording() if record and i < owned else nullcontext():
            log_prob, entropy = policy.score(micro)
        trainable = torch.cat([group.trained_tokens(batching.mask_truncated) for group in micro])
        lengths, sizes = torch.cat([group.lengths for group in micro]), torch.tensor([group.size for group in micro])
        weight = token_weights(
            lengths, trainable, batching.aggregate, totals, sizes, batching.normalizer, log_prob.dtype
        )
        if i >= owned:
            trainable, weight = torch.zeros_like(trainable), torch.zeros_like(weight)
        yield training_tensordict(micro, weight, log_prob, entropy, trainable, totals.entropy_floor, batching.on_policy)


def step_totals(groups: Sequence[Group], mask_truncated: bool = False, top_entropy_fraction: float = 1.0) -> StepTotals:
    """The counts of the optimizer step that trains on ``groups``; for the arguments see `MicroBatching`.

    Raises:
        ValueError: entropies are needed and were not written.

    >>> from grpo_rl.testing import random_group
    >>> step_totals([random_group(lengths=[1, 3]), random_group(lengths=[2, 0])])
    StepTotals(sequences=4, tokens=6, prompts=2, entropy_floor=None)
    """
    trained = [group.trained_tokens(mask_truncated) for group in groups]
    floor = None
    if top_entropy_fraction < 1:
        missing = [group.group_id for group in groups if group.old_entropies is None]
        if missing:
            raise ValueError(
                f"groups {missing} have no entropies, which loss.top_entropy_fraction={top_entropy_fraction} selects "
                "tokens by; write them with TrainPolicy.add_log_probs"
            )
        floor = top_entropy_floor(
            torch.cat([group.old_entropies[tokens] for group, tokens in zip(groups, trained, strict=True)]),
            top_entropy_fraction,
        )
    return StepTotals(
        sequences=sum(group.size for group in groups),
        tokens=sum(int(tokens.sum()) for tokens in trained),
        prompts=len(groups),
        entropy_floor=floor,
    )


def top_entropy_floor(entropies: Float[Tensor, " N"], fraction: float) -> float:
    """The lowest entropy among the ``fraction`` of tokens with the highest: their (1 - fraction) quantile.

    Source: https://arxiv.org/abs/2506.01939, eq. 5; TRL's ``top_entropy_quantile``, without its interpolation, which
    keeps the same tokens.

    >>> top_entropy_floor(torch.tensor([0.1, 0.5, 0.2, 0.4, 0.3]), 0.4)
    0.4000000059604645
    """
    if not len(entropies):
        return math.inf
    kept = 1 + math.floor(fraction * (len(entropies) - 1))
    return float(entropies.kthvalue(len(entropies) - kept + 1).values)


def training_tensordict(
    groups: Sequence[Group],
    weight: Float[Tensor, " N"],
    log_prob: Float[Tensor, " N"],
    entropy: Float[Tensor, " N"],
    trainable: Bool[Tensor, " N"] | None = None,
    entropy_floor: float | None = None,
    on_policy: bool = False,
) -> TensorDict:
    """The entries that `GRPOLoss` reads, flat over the N response tokens of the groups.

    Args:
        groups: with advantages, and with the log-probabilities that the loss needs: the reference's for a KL term, the
            trainer's own for a correction.
        weight: of each token in the step's loss.
        log_prob: from :meth:`TrainPolicy.score`, like ``entropy``.
        trainable: the tokens that are trained on; by default those that the policy sampled.
        entropy_floor: tokens with a lower entropy get no advantage, and so no policy gradient.
        on_policy: see `MicroBatching`.
    """
    lengths = torch.cat([group.lengths for group in groups])
    entries = {
        "log_prob": log_prob,
        "entropy": entropy,
        "sampler_log_prob": torch.cat([group.log_probs for group in groups]),
        "advantage": torch.cat([group.advantages for group in groups]).repeat_interleave(lengths),
        "trainable": torch.cat([group.trainable for group in groups]) if trainable is None else trainable,
        "weight": weight,
        "response": torch.repeat_interleave(lengths),
        "group_id": torch.tensor([group.group_id for group in groups for _ in range(len(group.response_ids))]),
    }
    if all(group.ref_log_probs is not None for group in groups):
        entries["ref_log_prob"] = torch.cat([group.ref_log_probs for group in groups])
    if on_policy:
        entries["old_log_prob"] = log_prob.detach()
    elif all(group.old_log_probs is not None for group in groups):
        entries["old_log_prob"] = torch.cat([group.old_log_probs for group in groups])
    if entropy_floor is not None:
        low = torch.cat([group.old_entropies for group in groups]) < entropy_floor
        entries["advantage"] = entries["advantage"].masked_fill(low, 0.0)
    device = log_prob.device
    return TensorDict({name: value.to(device) for name, value in entries.items()}, batch_size=[len(log_prob)])
