"""The policy that learns: a transformers model that scores groups without padding and without [N, V] logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from grpo_rl.data.group import Group, groups_to_score, micro_batches
from grpo_rl.losses.aggregate import Aggregation, StepTotals, token_weights
from grpo_rl.policies.allocator import keep_freed_memory
from grpo_rl.policies.compiled import can_compile, compile_layers, compile_pointwise
from grpo_rl.policies.embedding import lookups_in
from grpo_rl.policies.head import log_prob_and_entropy
from grpo_rl.policies.lora import (
    LoRA,
    Quantization,
    adapters_off,
    add_adapters,
    has_adapters,
    load_quantized,
    load_whole,
    skeleton,
    targeted,
)
from grpo_rl.policies.packing import Packed, forward_hidden, pack, use_shared_prefix
from grpo_rl.policies.shards import assign, placed_like
from grpo_rl.policies.supported import refuse_unsupported

Policy = TypeVar("Policy", bound="TrainPolicy")
X = TypeVar("X")

CALL_WHOLE = "call_with_whole_weights"
"""The method that a sharded model has: calls a function while its embedding, head and last norm are gathered."""

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


@runtime_checkable
class Seat(Protocol):
    """One of several processes: its number, how many there are, and whether they have to compute in step."""

    rank: int
    size: int
    in_step: bool


@runtime_checkable
class Peers(Seat, Protocol):
    """The processes that train one policy together, as one of them sees it: `grpo_rl.distributed.ranks.Ranks`."""

    device: torch.device

    def turn(self) -> AbstractContextManager[None]:
        """What one machine's ranks do in turns."""
        ...

    def place(self, model: PreTrainedModel) -> None:
        """Moves the model to the rank's device, or the rank's part of it."""
        ...

    def gather(self, mine: X) -> list[X]:
        """What each rank gave."""
        ...


def check_model(folder: str | Path, lora: LoRA | None = None) -> None:
    """Checks that :meth:`TrainPolicy.load` can train the folder's model; reads its config and none of its weights.

    Args:
        lora: the adapters that are trained in the place of the model, where its rank is more than 0.

    Raises:
        ValueError: the model would be scored wrongly, or the adapters' targets are not there or not all of it.
    """
    model = skeleton(folder)
    refuse_unsupported(model)
    if lora and lora.rank:
        targeted(model, lora.targets)


class TrainPolicy:
    """Scores the response tokens of groups under a model, with gradient.

    Args:
        model: any decoder-only transformers model that `use_shared_prefix` accepts. It is trained in evaluation mode,
            without dropout or other noise; gradient checkpointing has to be enabled before.
        temperature: of the sampler, so that log-probabilities are of the same distribution.

    Raises:
        ValueError: the model's attention or head is of a kind that would be scored wrongly.
    """

    _has_compiled = False
    """Whether kernels without gradients are there."""
    peers: Peers | None = None
    """Where several processes train it: each scores a share of the groups that all of them are given."""

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
        lora: LoRA | None = None,
        quantization: Quantization | None = None,
        peers: Peers | None = None,
    ) -> Policy:
        """The policy from a local model folder, ready to train.

        On CPU the whole process keeps the memory it frees from here on, see `grpo_rl.policies.allocator`.

        Args:
            compile: norms and MLPs become fused kernels; None: where there is a compiler for it.
            lora: adapters that are trained in the place of the model, where its rank is more than 0.
            quantization: of the base under the adapters.
            peers: the processes that train it together, each on a device of its own, whatever ``device`` is.

        Raises:
            ValueError: there is no compiler, the model would be scored wrongly, the adapters' targets are not there, or
                the folder lacks weights.
        """
        check_model(folder, lora)
        device = peers.device if peers else device
        if torch.device(device).type == "cpu":
            keep_freed_memory()
        with peers.turn() if peers else nullcontext():
            if quantization:
                model = load_quantized(folder, quantization, dtype, device)
                compile = compile or False
            else:
                model = load_whole(folder, dtype=dtype)
                model = model if peers else model.to(device)
            if lora and lora.rank:
                add_adapters(model, lora)
            if gradient_checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            policy = cls(model, temperature)
            policy.peers = peers
            if peers and not quantization:
                peers.place(model)
        if can_compile(device) if compile is None else compile:
            in_layers = torch.device(device).type == "cuda" and not peers if compile is not LAYERS else True
            (compile_layers if in_layers else compile_pointwise)(model)
            policy.score([FIRST_GROUP])[0].sum().backward()
            model.zero_grad()
        return policy

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.peers.device if self.peers else self.model.device

    def score(self, groups: Sequence[Group]) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Log-probability and entropy of every response token, flat in the groups' order, fp32, in nats."""
        packed = pack(groups, self.device)
        call_whole = getattr(self.model, CALL_WHOLE, None)
        return call_whole(self._score, packed) if call_whole else self._score(packed)

    def _score(self, packed: Packed) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        head = self.model.get_output_embeddings()
        with lookups_in(self.model.get_input_embeddings()) as lookups:
            hidden = forward_hidden(self.model, packed)
        owner = lookups.stand_in if head.weight is self.model.get_input_embeddings().weight else None
        return log_prob_and_entropy(
            hidden, head.weight, packed.target_ids, head.bias, self.temperature, self.softcap, owner=owner
        )

    def annotate(self, groups: Sequence[Group], max_tokens: int) -> list[Group]:
        """The groups with ``old_log_probs`` and ``old_entropies`` written; ``max_tokens`` are computed at a time.

        To be called before the first optimizer step on them: these are of the weights that training starts from.
        """
        return [group.with_old(*scored) for group, scored in zip(groups, self._scored(groups, max_tokens), strict=True)]

    @torch.no_grad()
    def _scored(self, groups: Sequence[Group], max_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Log-probabilities and entropies of each group's response tokens, on the CPU."""
        if not self._has_compiled:
            self.score([FIRST_GROUP])  # the same kernels whatever comes first
            self._has_compiled = True
        by_id = {}
        micros, _ = micro_batches_of(self.peers, groups, max_tokens)
        for micro in micros:
            sizes = [len(group.response_ids) for group in micro]
            log_probs, entropies = (x.cpu().split(sizes) for x in self.score(micro))
            by_id |= {group.group_id: scored for group, *scored in zip(micro, log_probs, entropies, strict=True)}
        for scored in self.peers.gather(by_id) if self.peers else ():
            by_id |= scored
        return [tuple(by_id[group.group_id]) for group in groups]


class ReferencePolicy(TrainPolicy):
    """The frozen policy that the KL term holds on to.

    Args:
        model: a frozen one of its own; or the policy's, where that has adapters: without them it is the reference.
    """

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        self._shared = has_adapters(model)
        self._averages: dict[str, Tensor] = {}
        super().__init__(model if self._shared else model.requires_grad_(False), temperature)

    def score(self, groups: Sequence[Group]) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """See :meth:`TrainPolicy.score`."""
        with adapters_off(self.model) if self._shared else nullcontext():
            return super().score(groups)

    def annotate(self, groups: Sequence[Group], max_tokens: int) -> list[Group]:
        """The groups with ``ref_log_probs`` written, once for all epochs; ``max_tokens`` are computed at a time."""
        scored = self._scored(groups, max_tokens)
        return [group.with_ref_log_probs(log_probs) for group, (log_probs, _) in zip(groups, scored, strict=True)]

    @torch.no_grad()
    def refresh(self, model: PreTrainedModel, decay: float = 0.0) -> None:
        """Moves towards ``model``, of which it becomes a copy unless it keeps something of itself.

        Args:
            decay: what it keeps. Its weights are then held in fp32 too, as steps that small vanish in bfloat16.
        """
        assert not self._shared, "without its adapters the policy is always what it was"
        for (name, mine), parameter in zip(self.model.named_parameters(), model.parameters(), strict=True):
            if decay:
                average = self._averages.setdefault(name, mine.float())
                average.lerp_(parameter.to(average), 1 - decay)
            mine.copy_(self._averages[name] if decay else parameter)

    def state(self) -> dict[str, Tensor]:
        """Its weights, in fp32 where they are averages."""
        return dict(self._averages) or {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` returned."""
        for name, parameter in self.model.named_parameters():
            assign(parameter, state[name])
            if state[name].dtype != parameter.dtype:
                self._averages[name] = placed_like(state[name].to(parameter.device, copy=True), parameter)


def scored_micro_batches(
    policy: TrainPolicy,
    batch: Sequence[Group],
    max_tokens: int,
    count: int | None = None,
    aggregate: Aggregation = "sequence_mean",
    skip_zero_advantage: bool = False,
    normalizer: int | float | None = None,
    mask_truncated: bool = False,
    top_entropy_fraction: float = 1.0,
    on_policy: bool = False,
    totals: StepTotals | None = None,
) -> Iterator[TensorDict]:
    """One optimizer step's groups, scored with gradient a micro-batch at a time, as `GRPOLoss` reads them.

    Of a policy that several processes train, each is given all groups and scores its share of them.

    Args:
        batch: all groups of the optimizer step, with advantages.
        max_tokens: tokens of a micro-batch, prompts counted once.
        count: or exactly this many micro-batches, in each process.
        aggregate: how tokens weigh in the loss, see `grpo_rl.losses.aggregate.token_weights`.
        skip_zero_advantage: leave out groups whose answers were rewarded alike. They still count in the step's mean;
            with no KL and no entropy term their gradient is zero, so scoring them is work for nothing.
        normalizer: of ``aggregate="constant"``.
        mask_truncated: leave answers that met the length limit out of the loss.
        top_entropy_fraction: share of the step's trained tokens, those of highest entropy, that the policy gradient is
            of; KL and entropy terms are of all.
        on_policy: this is the only optimizer step on these groups, so that what the policy says now is also what it
            said before the update, and no group needs ``old_log_probs``.
        totals: counts of the whole step, where other ranks score other groups of it; by default those of ``batch``.

    Raises:
        ValueError: a group lacks what is asked of it.
    """
    missing = [group.group_id for group in batch if group.advantages is None]
    if missing:
        raise ValueError(f"groups {missing} have no advantages; write them with GroupBuffer or Group.with_advantages")
    totals = totals or step_totals(batch, mask_truncated, top_entropy_fraction)
    scored = groups_to_score(batch, skip_zero_advantage, mask_truncated)
    if policy.peers:
        ids = policy.peers.gather([group.group_id for group in scored])
        if any(of_rank != ids[0] for of_rank in ids):
            raise ValueError(f"processes were given other groups for one step: {ids}; broadcast them, in one order")
    micros, real = micro_batches_of(policy.peers, scored, max_tokens, count)
    for i, micro in enumerate(micros):
        log_prob, entropy = policy.score(micro)
        trainable = torch.cat([group.trained_tokens(mask_truncated) for group in micro])
        lengths, sizes = torch.cat([group.lengths for group in micro]), torch.tensor([group.size for group in micro])
        weight = token_weights(lengths, trainable, aggregate, totals, sizes, normalizer, log_prob.dtype)
        if i >= real:
            trainable, weight = torch.zeros_like(trainable), torch.zeros_like(weight)
        yield training_tensordict(micro, weight, log_prob, entropy, trainable, totals.entropy_floor, on_policy)


def micro_batches_of(
    seat: Seat | None, groups: Sequence[Group], max_tokens: int, count: int | None = None
) -> tuple[list[list[Group]], int]:
    """This process's micro-batches of the groups, and how many of them are its own.

    Every process plans those of all and takes every so many: loads are alike, as `micro_batches` balances them. Where
    processes compute in step, the smallest group stands in for what one has less than another; nothing must come of it.

    Args:
        seat: which of the processes this is; None: it is alone.
        max_tokens: of a micro-batch.
        count: or exactly this many micro-batches in each process, as far as there are groups.

    Three groups for two processes:

    >>> from types import SimpleNamespace
    >>> from grpo_rl.testing import random_group
    >>> groups = [random_group(prompt=2, lengths=[n], group_id=n) for n in (8, 3, 4)]
    >>> for rank in range(2):
    ...     micros, real = micro_batches_of(SimpleNamespace(rank=rank, size=2, in_step=True), groups, max_tokens=10)
    ...     print([[g.group_id for g in micro] for micro in micros], real)
    [[8], [3]] 2
    [[4], [3]] 1
    """
    if not groups:
        return [], 0
    if seat is None:
        micros = micro_batches(groups, max_tokens, count and min(count, len(groups)))
        return micros, len(micros)
    each = count or -(-len(micro_batches(groups, max_tokens)) // seat.size)
    micros = micro_batches(groups, max_tokens, min(each * seat.size, len(groups)))
    own = micros[seat.rank :: seat.size]
    longest = -(-len(micros) // seat.size)
    smallest = min(groups, key=lambda group: group.num_tokens)
    return own + [[smallest]] * (longest - len(own) if seat.in_step else 0), len(own)


def step_totals(groups: Sequence[Group], mask_truncated: bool = False, top_entropy_fraction: float = 1.0) -> StepTotals:
    """What is counted over the optimizer step that trains on ``groups``, see :func:`scored_micro_batches`.

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
                f"groups {missing} have no entropies, and loss.top_entropy_fraction={top_entropy_fraction} chooses by "
                "them; write them with TrainPolicy.annotate"
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
    """The lowest entropy among the ``fraction`` of tokens that have the highest: their (1 - fraction) quantile.

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
    """What `GRPOLoss` reads, flat over the N response tokens of the groups.

    Args:
        groups: with advantages, and with what the loss asks for beside them: reference log-probabilities where there is
            a KL term, the trainer's own where there is a correction.
        weight: of each token in the step's loss.
        log_prob: from :meth:`TrainPolicy.score`, like ``entropy``.
        trainable: the tokens that are trained on; by default those that the policy chose.
        entropy_floor: tokens of less entropy than this get no advantage, and so no policy gradient.
        on_policy: see :func:`scored_micro_batches`.
    """
    lengths = torch.cat([group.lengths for group in groups])
    entries = {
        "log_prob": log_prob,
        "entropy": entropy,
        "sampler_log_prob": torch.cat([group.log_probs for group in groups]),
        "advantage": torch.cat([group.advantages for group in groups]).repeat_interleave(lengths),
        "trainable": torch.cat([group.trainable for group in groups]) if trainable is None else trainable,
        "weight": weight,
        "answer": torch.repeat_interleave(lengths),
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
