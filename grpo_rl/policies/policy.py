"""The policy that learns: a transformers model that scores groups without padding and without [N, V] logits."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from grpo_rl.data.batching import RankInfo, micro_batches_of
from grpo_rl.data.group import Group, Kept
from grpo_rl.policies.attention import compile_model, forward_hidden, use_shared_prefix
from grpo_rl.policies.before_loading import keep_freed_memory
from grpo_rl.policies.divergence import Head, Teacher, WholeTeacher, divergence
from grpo_rl.policies.head import log_prob_and_entropy, logit_scaling, lookups_in
from grpo_rl.policies.loading import Quantization, assign, check_model, load_quantized, load_whole, placed_like
from grpo_rl.policies.lora import LoRA, adapters_off, add_adapters, has_adapters
from grpo_rl.policies.packing import Packed, pack

Policy = TypeVar("Policy", bound="TrainPolicy")
X = TypeVar("X")

CALL_WHOLE = "call_with_whole_weights"
"""Method of a sharded model: calls a function while the model's embedding, head and last norm are gathered."""

FIRST_GROUP = Group(
    group_id=0,
    row=0,
    prompt_ids=torch.zeros(64, dtype=torch.long),
    response_ids=torch.arange(64) // 16 % 2,  # the responses differ from their first token on
    log_probs=torch.zeros(64),
    versions=torch.zeros(64, dtype=torch.long),
    trainable=torch.ones(64, dtype=torch.bool),
    offsets=torch.tensor([0, 16, 64]),
    rewards=torch.zeros(2),
)
"""The group that kernels are compiled with: always the same, so that a resumed run has the kernels of the first."""


@runtime_checkable
class Peers(RankInfo, Protocol):
    """The processes that train one policy together, as one of them sees it: `grpo_rl.distributed.ranks.Ranks`."""

    device: torch.device

    def turn(self) -> AbstractContextManager[None]:
        """A context that the ranks of one machine enter one after the other."""

    def place(self, model: PreTrainedModel) -> None:
        """Moves the model, or this rank's shard of it, to the rank's device."""

    def gather(self, mine: X) -> list[X]:
        """The values that all ranks passed, in rank order."""


@runtime_checkable
class Reference(Protocol):
    """The model that the KL is measured to: in the process, on a server, or one for each task."""

    def add_log_probs(self, groups: Sequence[Group], max_tokens: int) -> list[Group]:
        """The groups with ``ref_log_probs``."""

    def distributions(self, groups: Sequence[Group], device: torch.device) -> Teacher:
        """Its distributions at the groups' response tokens."""

    def refresh(self, model: PreTrainedModel, decay: float = 0.0) -> None:
        """Moves it towards ``model``, where it can be moved."""
        raise NotImplementedError(f"{type(self).__name__} is never refreshed")

    def state(self) -> dict[str, Tensor]:
        """The weights that :meth:`refresh` has changed; none where it can't."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        assert not state, state.keys()


class TrainPolicy:
    """Scores the response tokens of groups under a model, with gradient.

    Args:
        model: any decoder-only transformers model that `use_shared_prefix` accepts. It is trained in evaluation mode,
            without dropout or other noise; gradient checkpointing has to be enabled before.
        temperature: the sampler's, more than 0: log-probabilities belong to the distribution that was sampled from.

    Raises:
        ValueError: the model's attention or head is of a kind that would be scored wrongly.
    """

    compile_s: float | None = None
    """Seconds in which the kernels with gradient were compiled; None where nothing is."""
    _has_compiled = False
    """True if the kernels without gradient have been compiled."""
    peers: Peers | None = None
    """The processes that train the policy together: each scores a share of the groups that all are given."""
    distillation: tuple["Reference", str] | None = None
    """The reference, and the divergence from its whole distribution that is trained on."""

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        self.model = use_shared_prefix(model)
        self.temperature = temperature
        self.logit_factor, self.softcap = logit_scaling(model)

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
        router_replay: bool = False,
    ) -> Policy:
        """The policy from a local model folder, ready to train.

        On CPU the whole process keeps freed memory from then on (`grpo_rl.policies.before_loading.keep_freed_memory`).

        Args:
            compile: compile to fused kernels: layers on one GPU; norms and MLPs elsewhere, in hybrids and mixtures of
                experts; None: if a compiler works for the device.
            lora: adapters that are trained instead of the model, if their rank is more than 0.
            peers: the processes that train the policy together; each has its own device, and ``device`` is ignored.
            router_replay: a mixture's routers take the experts of groups that have ``routes``.

        Raises:
            ValueError: there is no compiler, the model would be scored wrongly, the adapters' targets do not exist, the
                folder lacks weights, or routers can't replay.
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
            if router_replay:
                use_shared_prefix(model, router_replay=True)
            policy = cls(model, temperature)
            policy.peers = peers
            if peers and not quantization:
                peers.place(model)
        if compile_model(model, compile, policy.device, alone=peers is None):
            start = time.perf_counter()
            policy.score([FIRST_GROUP])[0].sum().backward()
            model.zero_grad()
            policy.compile_s = time.perf_counter() - start
        return policy

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return self.peers.device if self.peers else self.model.device

    def score(self, groups: Sequence[Group], teacher: Teacher | None = None) -> tuple[Float[Tensor, " N"], ...]:
        """Log-probability and entropy of every response token, flat in the groups' order, fp32, in nats.

        Where the sampler cut its distribution they are those of the model's, restricted to the same kept sets.

        Args:
            teacher: of :attr:`distillation`, at these tokens: the divergence from it comes third.
        """
        packed = pack(groups, self.device)
        kept = Kept.joined((group.kept, len(group.response_ids)) for group in groups)
        call_whole = getattr(self.model, CALL_WHOLE, None)
        arguments = packed, kept and kept.to(self.device), teacher
        return call_whole(self._score, *arguments) if call_whole else self._score(*arguments)

    def _score(self, packed: Packed, kept: Kept | None, teacher: Teacher | None) -> tuple[Float[Tensor, " N"], ...]:
        head = self.head
        with lookups_in(self.model.get_input_embeddings()) as lookups:
            hidden = forward_hidden(self.model, packed)
        owner = lookups.stand_in if head.weight is self.model.get_input_embeddings().weight else None
        more = ()
        if teacher is not None and self.distillation is not None:
            more = (divergence(packed.by_token(hidden), head, teacher, self.distillation[1], owner),)
        targets = packed.target_ids
        if kept is not None:  # equal tokens may have sets that differ by rounding
            hidden, targets = packed.by_token(hidden), packed.by_token(targets)
        scored = log_prob_and_entropy(
            hidden, head.weight, targets, head.bias, head.temperature, head.softcap, owner=owner, kept=kept
        )
        log_probs, entropies = map(packed.by_token, scored) if kept is None else scored
        return log_probs, entropies, *more

    @property
    def head(self) -> Head:
        """The model's head, with the temperature by which its product with hidden states is divided."""
        layer: torch.nn.Linear = self.model.get_output_embeddings()  # pyrefly: ignore[bad-assignment]
        return Head(layer.weight, layer.bias, self.temperature / self.logit_factor, self.softcap)

    def add_log_probs(self, groups: Sequence[Group], max_tokens: int) -> list[Group]:
        """The groups with ``old_log_probs`` and ``old_entropies``, computed in micro-batches of ``max_tokens``.

        Call it before the first optimizer step on the groups: the values belong to the weights that training starts
        from.
        """
        scored = self._scored(groups, max_tokens)
        return [group.with_old_log_probs(*values) for group, values in zip(groups, scored, strict=True)]

    @torch.no_grad()
    def _scored(self, groups: Sequence[Group], max_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Log-probabilities and entropies of each group's response tokens, on the CPU."""
        if not self._has_compiled:
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                # A process that resumes a run would draw dropout here, and one that goes on would not.
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


class ReferencePolicy(TrainPolicy, Reference):
    """The frozen reference policy of the KL term.

    Args:
        model: a frozen model of its own; or the policy's model, if that has adapters: with them off it is the
            reference.
    """

    reads: Callable[[Group], Group] | None = None
    """Gives the group that it reads in the place of one: the same responses behind another prompt."""

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        self._shared = has_adapters(model)
        self._averages: dict[str, Tensor] = {}
        super().__init__(model if self._shared else model.requires_grad_(False), temperature)

    @override
    def score(self, groups: Sequence[Group], teacher: Teacher | None = None) -> tuple[Float[Tensor, " N"], ...]:
        with adapters_off(self.model) if self._shared else nullcontext():
            return super().score([self._read(group) for group in groups], teacher)

    @torch.no_grad()
    def distributions(self, groups: Sequence[Group], device: torch.device) -> WholeTeacher:
        """Its distributions at the response tokens, by the hidden states that its head reads; on its own device."""
        packed = pack([self._read(group) for group in groups], self.device)
        with adapters_off(self.model) if self._shared else nullcontext():
            return WholeTeacher(packed.by_token(forward_hidden(self.model, packed)), self.head)

    def _read(self, group: Group) -> Group:
        group = replace(group, routes=None, prompt_routes=None)  # its routers choose by themselves
        return self.reads(group) if self.reads else group

    def add_log_probs(self, groups: Sequence[Group], max_tokens: int) -> list[Group]:
        """The groups with ``ref_log_probs``, computed once for all epochs, in micro-batches of ``max_tokens``."""
        scored = self._scored(groups, max_tokens)
        return [replace(group, ref_log_probs=log_probs) for group, (log_probs, _) in zip(groups, scored, strict=True)]

    @torch.no_grad()
    def refresh(self, model: PreTrainedModel, decay: float = 0.0) -> None:
        """Moves the reference towards ``model``, by default all the way.

        Args:
            decay: share of itself that the reference keeps. If it is not 0, the weights are also held in fp32, as such
                small updates vanish in bfloat16.
        """
        assert not self._shared, "without its adapters the policy never changes"
        for (name, mine), parameter in zip(self.model.named_parameters(), model.parameters(), strict=True):
            if decay:
                average = self._averages.setdefault(name, mine.float())
                average.lerp_(parameter.to(average), 1 - decay)
            mine.copy_(self._averages[name] if decay else parameter)

    def state(self) -> dict[str, Tensor]:
        """The reference's weights, in fp32 if they are moving averages."""
        return dict(self._averages) or {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores the weights that :meth:`state` returned."""
        for name, parameter in self.model.named_parameters():
            assign(parameter, state[name])
            if state[name].dtype != parameter.dtype:
                self._averages[name] = placed_like(state[name].to(parameter.device, copy=True), parameter)
