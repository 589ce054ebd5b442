"""The policy that learns: a transformers model that scores groups without padding and without [N, V] logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_rl.allocator import keep_freed_memory
from grpo_rl.losses.aggregate import Aggregation, token_weights
from grpo_rl.policies.compiled import can_compile, compile_pointwise
from grpo_rl.policies.embedding import Lookups
from grpo_rl.policies.head import log_prob_and_entropy
from grpo_rl.policies.prefix import forward_hidden, pack, use_shared_prefix
from grpo_rl.rollout import Group, groups_to_score, micro_batches

Policy = TypeVar("Policy", bound="TrainPolicy")

FIRST_GROUP = Group(
    group_id=0,
    row=0,
    prompt_ids=torch.zeros(64, dtype=torch.long),
    response_ids=torch.zeros(64, dtype=torch.long),
    log_probs=torch.zeros(64),
    versions=torch.zeros(64, dtype=torch.long),
    trainable=torch.ones(64, dtype=torch.bool),
    offsets=torch.tensor([0, 16, 64]),
    rewards=torch.zeros(2),
)
"""What kernels are compiled for: always the same, so that a resumed run has the kernels of the one before."""


class TrainPolicy:
    """Scores the response tokens of groups under a model, with gradient.

    Args:
        model: any decoder-only transformers model that `use_shared_prefix` accepts.
        temperature: of the sampler, so that log-probabilities are of the same distribution.

    Raises:
        ValueError: the model's attention or head is of a kind that would be scored wrongly.
    """

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        if temperature <= 0:
            raise ValueError(
                f"sampling.temperature is {temperature}; training needs more than 0 (greedy answers are equal)"
            )
        self.model = use_shared_prefix(model)
        self.temperature = temperature
        self.softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    @classmethod
    def load(
        cls: type[Policy],
        folder: str | Path,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        compile: bool | None = False,
    ) -> Policy:
        """The policy from a local model folder, ready to train.

        On CPU the whole process keeps the memory it frees from here on, see `grpo_rl.allocator`.

        Args:
            compile: norms and MLPs become fused kernels; None: where there is a compiler for it.

        Raises:
            ValueError: there is none, or the model would be scored wrongly.
        """
        if torch.device(device).type == "cpu":
            keep_freed_memory()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
        model.train()
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = cls(model, temperature)
        if can_compile(device) if compile is None else compile:
            compile_pointwise(model)
            policy.score([FIRST_GROUP])[0].sum().backward()
            model.zero_grad()
        return policy

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    def score(self, groups: Sequence[Group]) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Log-probability and entropy of every response token, flat in the groups' order, fp32, in nats."""
        packed = pack(groups, self.device)
        head = self.model.get_output_embeddings()
        with Lookups(self.model.get_input_embeddings().weight) as lookups:
            hidden = forward_hidden(self.model, packed)
        owner = lookups.stand_in if head.weight is self.model.get_input_embeddings().weight else None
        return log_prob_and_entropy(
            hidden, head.weight, packed.target_ids, head.bias, self.temperature, self.softcap, owner=owner
        )


class ReferencePolicy(TrainPolicy):
    """The frozen policy that the KL term holds on to."""

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        super().__init__(model.eval().requires_grad_(False), temperature)

    @torch.no_grad()
    def annotate(self, groups: Sequence[Group], max_tokens: int) -> list[Group]:
        """The groups with ``ref_log_probs`` written, once for all epochs; ``max_tokens`` are computed at a time."""
        by_id = {}
        for micro in micro_batches(groups, max_tokens):
            log_probs = self.score(micro)[0].cpu().split([len(group.response_ids) for group in micro])
            by_id |= {group.group_id: lp for group, lp in zip(micro, log_probs, strict=True)}
        return [group.with_ref_log_probs(by_id[group.group_id]) for group in groups]


def scored_micro_batches(
    policy: TrainPolicy,
    batch: Sequence[Group],
    max_tokens: int,
    count: int | None = None,
    aggregate: Aggregation = "sequence_mean",
    skip_zero_advantage: bool = False,
) -> Iterator[TensorDict]:
    """One optimizer step's groups, scored with gradient a micro-batch at a time, as `GRPOLoss` reads them.

    Args:
        batch: all groups of the optimizer step, with advantages.
        max_tokens: tokens of a micro-batch, prompts counted once.
        count: or exactly this many micro-batches.
        aggregate: how tokens weigh in the loss, see `grpo_rl.losses.aggregate.token_weights`.
        skip_zero_advantage: leave out groups whose answers were rewarded alike. They still count in the step's mean;
            with no KL and no entropy term their gradient is zero, so scoring them is work for nothing.

    Raises:
        ValueError: a group has no advantages.
    """
    missing = [group.group_id for group in batch if group.advantages is None]
    if missing:
        raise ValueError(f"groups {missing} have no advantages; write them with GroupBuffer or Group.with_advantages")
    num_sequences = sum(group.size for group in batch)
    num_tokens = sum(int(group.trainable.sum()) for group in batch)
    scored = groups_to_score(batch, skip_zero_advantage)
    for micro in micro_batches(scored, max_tokens, count and min(count, len(scored))) if scored else []:
        lengths, trainable = torch.cat([g.lengths for g in micro]), torch.cat([g.trainable for g in micro])
        weight = token_weights(lengths, trainable, aggregate, num_sequences, num_tokens)
        yield training_tensordict(micro, weight, *policy.score(micro))


def training_tensordict(
    groups: Sequence[Group], weight: Float[Tensor, " N"], log_prob: Float[Tensor, " N"], entropy: Float[Tensor, " N"]
) -> TensorDict:
    """What `GRPOLoss` reads, flat over the N response tokens of the groups.

    Args:
        groups: with advantages, and with reference log-probabilities where there is a KL term.
        weight: of each token in the step's loss.
        log_prob: from :meth:`TrainPolicy.score`, like ``entropy``.
    """
    entries = {
        "log_prob": log_prob,
        "entropy": entropy,
        "old_log_prob": torch.cat([group.log_probs for group in groups]),
        "advantage": torch.cat([group.advantages.repeat_interleave(group.lengths) for group in groups]),
        "trainable": torch.cat([group.trainable for group in groups]),
        "weight": weight,
    }
    if all(group.ref_log_probs is not None for group in groups):
        entries["ref_log_prob"] = torch.cat([group.ref_log_probs for group in groups])
    device = log_prob.device
    return TensorDict({name: value.to(device) for name, value in entries.items()}, batch_size=[len(log_prob)])
