"""The micro-batches of an optimizer step, scored with gradient; where memory runs out, smaller ones.

Letter: N response tokens.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from tensordict import TensorDict
from torch import Tensor

from grpo_rl.data.advantages import token_advantages
from grpo_rl.data.batching import MicroBatching, groups_to_score, micro_batches_of
from grpo_rl.data.group import Group
from grpo_rl.engines.base import OutOfMemoryError, free_memory, is_out_of_memory, reason
from grpo_rl.losses.aggregate import StepTotals, token_weights
from grpo_rl.losses.covariance import Covariance
from grpo_rl.losses.factors import COVARIANCE
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.policies.routing import router_record
from grpo_rl.training.checkpoint import rng_state, set_rng_state


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
    totals = totals or step_totals(groups, batching)
    to_score = groups_to_score(groups, batching.skip_zero_advantage, batching.mask_truncated)
    if policy.peers:
        ids = policy.peers.gather([group.group_id for group in to_score])
        if any(of_rank != ids[0] for of_rank in ids):
            raise ValueError(f"processes were given different groups for one step: {ids}; broadcast them, in one order")
    micros, owned = micro_batches_of(policy.peers, to_score, batching.max_tokens, batching.count)
    record = router_record(getattr(policy, "model", None))  # what scores by a stored table has no model
    distillation = getattr(policy, "distillation", None)
    for i, micro in enumerate(micros):
        teachers = [distillation[0].distributions(micro, policy.device)] if distillation else []
        with record.recording() if record and i < owned else nullcontext():
            log_prob, entropy, *more = policy.score(micro, *teachers)
        trainable = torch.cat([group.trained_tokens(batching.mask_truncated) for group in micro])
        lengths, sizes = torch.cat([group.lengths for group in micro]), torch.tensor([group.size for group in micro])
        weight = token_weights(lengths, trainable, batching.aggregate, totals, sizes, log_prob.dtype)
        if i >= owned:
            trainable, weight = torch.zeros_like(trainable), torch.zeros_like(weight)
        yield training_tensordict(micro, weight, log_prob, entropy, trainable, totals, batching.on_policy, *more)


def step_totals(groups: Sequence[Group], batching: MicroBatching) -> StepTotals:
    """The counts of the optimizer step that trains on ``groups``.

    Raises:
        ValueError: entropies are needed and were not written.

    >>> from grpo_rl.testing import random_group
    >>> step_totals([random_group(lengths=[1, 3]), random_group(lengths=[2, 0])], MicroBatching(max_tokens=64))
    StepTotals(sequences=4, tokens=6, prompts=2, entropy_floor=None, covariance=None)
    """
    trained = [group.trained_tokens(batching.mask_truncated) for group in groups]
    floor = covariance = None
    if (fraction := batching.top_entropy_fraction) < 1:
        missing = [group.group_id for group in groups if group.old_entropies is None]
        if missing:
            raise ValueError(
                f"groups {missing} have no entropies, which loss.top_entropy_fraction={fraction} selects "
                "tokens by; write them with TrainPolicy.add_log_probs"
            )
        floor = top_entropy_floor(
            torch.cat([group.old_entropies[tokens] for group, tokens in zip(groups, trained, strict=True)]),
            fraction,
        )
    if batching.covariance:
        tokens = torch.cat(trained)
        log_probs, advantages, draws = (values[tokens] for values in _for_covariance(groups))
        covariance = Covariance(log_probs, advantages, draws, batching.covariance)
    return StepTotals(
        sequences=sum(group.size for group in groups),
        tokens=sum(int(tokens.sum()) for tokens in trained),
        prompts=len(groups),
        entropy_floor=floor,
        covariance=covariance,
    )


def _for_covariance(groups: Sequence[Group]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, advantage and draw of each token; draws are those of the group, however the step is split."""
    own = [torch.rand(len(g.response_ids), generator=torch.Generator().manual_seed(g.group_id)) for g in groups]
    return (
        torch.cat([group.log_probs for group in groups]).double(),
        torch.cat([token_advantages(group) for group in groups]).double(),
        torch.cat(own),
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
    totals: StepTotals | None = None,
    on_policy: bool = False,
    teacher_kl: Float[Tensor, " N"] | None = None,
) -> TensorDict:
    """The entries that `GRPOLoss` reads, flat over the N response tokens of the groups.

    Args:
        groups: with advantages, and with the log-probabilities that the loss needs: the reference's for a KL term, the
            trainer's own for a correction.
        weight: of each token in the step's loss.
        log_prob: from :meth:`TrainPolicy.score`, like ``entropy``.
        trainable: the tokens that are trained on; by default those that the policy sampled.
        totals: of the step; tokens below its entropy floor get no advantage, and so no policy gradient.
        on_policy: see `MicroBatching`.
        teacher_kl: from :meth:`TrainPolicy.score`, where the policy has a teacher.
    """
    lengths = torch.cat([group.lengths for group in groups])
    entries = {
        "log_prob": log_prob,
        "entropy": entropy,
        "sampler_log_prob": torch.cat([group.log_probs for group in groups]),
        "advantage": torch.cat([token_advantages(group) for group in groups]),
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
    if teacher_kl is not None:
        entries["teacher_kl"] = teacher_kl
    if totals and totals.covariance:
        entries |= zip(COVARIANCE, totals.covariance.ranks(*_for_covariance(groups)), strict=True)
    if totals and totals.entropy_floor is not None:
        low = torch.cat([group.old_entropies for group in groups]) < totals.entropy_floor
        entries["advantage"] = entries["advantage"].masked_fill(low, 0.0)
    device = log_prob.device
    return TensorDict({name: value.to(device) for name, value in entries.items()}, batch_size=[len(log_prob)])


REMEDY = (
    "set train_model.gradient_checkpointing=true or give the engine less (inference_model.gpu_memory_utilization); a "
    "new run may also have a lower sampling.max_new_tokens or env.repeats"
)


@dataclass(frozen=True)
class _RanOut:
    """A micro-batch that did not fit: the ids and the tokens of its groups, and torch's message."""

    group_ids: list[int]
    tokens: int
    why: str


class WithinMemory:
    """Splits optimizer steps into micro-batches, and begins a step again with smaller ones where memory runs out.

    The smaller size is kept for the steps that follow. A step's gradient is then that of the smaller split, to the
    bit: what had been added up is thrown away, and each token is weighted by the counts of the whole step. Other
    processes that train the same policy (``ddp``) begin again too; with ``fsdp``, where they wait for each other within
    a pass, the run ends.

    Args:
        batching: as configured; :attr:`batching` is what is used now.
        discard: throws away the gradients that the step has added up.
    """

    def __init__(self, policy: TrainPolicy, batching: MicroBatching, discard: Callable[[], None]) -> None:
        self.batching = self._configured = batching
        self._policy, self._discard = policy, discard
        self._why = ""

    @property
    def max_tokens(self) -> int:
        """The tokens that are scored at a time: as configured, or fewer once memory has run out."""
        return min(self._configured.max_tokens, self.batching.max_tokens)

    def state(self) -> dict[str, Any]:
        """The sizes as configured and as used now, for a checkpoint."""
        return {name: [of.max_tokens, of.count] for name, of in (("set", self._configured), ("used", self.batching))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with a checkpoint's sizes, unless others have been configured since."""
        if state["set"] == [self._configured.max_tokens, self._configured.count]:
            max_tokens, count = state["used"]
            self.batching = replace(self.batching, max_tokens=max_tokens, count=count)

    def micro_batches(
        self, groups: Sequence[Group], began_again: Callable[[str], None]
    ) -> Iterator[AbstractContextManager[TensorDict]]:
        """The optimizer step's micro-batches, scored, each as a block that computes its loss and goes back from it.

        Inside the block the gradient goes back to the policy's outputs, as ``log_prob``; it goes through the model
        at the end of the block, so that no variable of the caller holds on to the memory that is lacking.

        Args:
            began_again: called with a sentence that the step's results until now do not count.

        Raises:
            OutOfMemoryError: a group alone does not fit, or processes would have to begin again within a pass.
        """
        record = router_record(getattr(self._policy, "model", None))
        routed, random = record.sums() if record else {}, rng_state()
        while True:
            self._why, at = "", -1
            scored = scored_micro_batches(self._policy, groups, self.batching)
            while not self._why:
                at += 1
                block = None
                with self._watched():
                    tokens = next(scored, None)
                    if tokens is None:
                        break
                    block = self._given(tokens)
                    del tokens
                if block:
                    yield block
                del block
            found = self._failed(groups, at) if self._why else None
            del scored  # what it holds of the pass that broke off
            if found:  # before the ranks exchange it, which takes memory, too
                self._discard()
                free_memory()
            peers = self._policy.peers
            if not (lacking := [one for one in (peers.gather(found) if peers else [found]) if one]):
                return
            self._discard()
            if record:
                record.put_back(routed)
            set_rng_state(random)  # dropout's masks are those of a step that began with the smaller ones
            began_again(self._shrink(lacking))

    @contextmanager
    def _given(self, tokens: TensorDict) -> Iterator[TensorDict]:
        scored = [name for name in ("log_prob", "entropy", "teacher_kl") if name in tokens.keys()]
        outputs = {name: tokens[name] for name in scored if tokens[name].requires_grad}
        leaves = {name: output.detach().requires_grad_() for name, output in outputs.items()}
        with self._watched():
            yield tokens.update(leaves)
            reached = [name for name, leaf in leaves.items() if leaf.grad is not None]
            if reached:
                torch.autograd.backward([outputs[name] for name in reached], [leaves[name].grad for name in reached])

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Notes that memory ran out, and lets the code behind the block go on."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._why = reason(error)

    def _failed(self, groups: Sequence[Group], at: int) -> _RanOut:
        """The micro-batch that did not fit."""
        peers, batching = self._policy.peers, self.batching
        to_score = groups_to_score(groups, batching.skip_zero_advantage, batching.mask_truncated)
        micro = micro_batches_of(peers, to_score, batching.max_tokens, batching.count)[0][at]
        found = _RanOut([group.group_id for group in micro], sum(group.num_tokens for group in micro), self._why)
        if getattr(peers, "in_step", False):
            raise OutOfMemoryError(
                f"memory ran out ({self._why}), and with train_model.parallel=fsdp ranks wait for each other within a "
                f"pass, so the step can't begin again; set {self._setting(self._half(found))}"
            )
        return found

    def _half(self, micro: _RanOut) -> int:
        tokens = micro.tokens if self.batching.count else min(micro.tokens, self.batching.max_tokens)
        return max(1, tokens // 2)

    def _setting(self, size: int) -> str:
        """The settings of this size; a number of micro-batches would count instead of it."""
        given = self._configured.count is not None
        return f"train.micro_batch_tokens={size}{' and train.gradient_accumulation_steps=null' if given else ''}"

    def _shrink(self, lacking: Sequence[_RanOut]) -> str:
        """The sentence on the new size, half of the smallest that did not fit."""
        for micro in lacking:
            if len(micro.group_ids) == 1:
                raise OutOfMemoryError(
                    f"group {micro.group_ids[0]} with its {micro.tokens} tokens does not fit into memory alone "
                    f"({micro.why}); {REMEDY}"
                )
        smallest = min(lacking, key=lambda micro: micro.tokens)
        size = self._half(smallest)
        self.batching = replace(self.batching, max_tokens=size, count=None)
        return (
            f"Memory ran out with a micro-batch of {len(smallest.group_ids)} groups and {smallest.tokens} tokens "
            f"({smallest.why}); the optimizer step begins again, and the run goes on, with micro-batches of {size} "
            f"tokens. The gradient is the same; {self._setting(size)} saves the attempt"
        )
