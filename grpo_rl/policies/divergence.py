"""Divergence of policy and teacher over the whole vocabulary, some rows at a time.

Letters: N tokens, E and T hidden sizes of policy and teacher, V vocabulary, W tokens of a served teacher's; n rows of a
tile.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from grpo_rl.policies.head import grad_dtype

TILE_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits of a tile of whole rows, of which the backward pass holds about ten copies in fp32."""


def reverse_kl(log_p: Float[Tensor, "n V"], log_q: Float[Tensor, "n V"]) -> Float[Tensor, " n"]:
    """KL(policy || teacher) of each row, in nats: the mean that `grpo_rl.losses.kl.k1` estimates from one token."""
    # A token that the model masks out has no probability, and log 0 times 0 counts nothing.
    return (log_p.exp() * (log_p - log_q).masked_fill(log_p.isneginf(), 0.0)).sum(-1)


def jensen_shannon(log_p: Float[Tensor, "n V"], log_q: Float[Tensor, "n V"]) -> Float[Tensor, " n"]:
    """The mean KL of policy and teacher to the mean of both, in nats: at most ln 2. GKD, arXiv 2306.13649, beta 1/2."""
    neither = log_p.isneginf() & log_q.isneginf()  # where the gradient of their sum would be NaN
    middle = torch.logaddexp(log_p.masked_fill(neither, 0.0), log_q) - math.log(2)
    return (reverse_kl(log_p, middle) + reverse_kl(log_q, middle)) / 2


Divergence = Callable[[Tensor, Tensor], Tensor]
DIVERGENCES: Mapping[str, Divergence] = {
    "reverse": reverse_kl,
    "forward": lambda log_p, log_q: reverse_kl(log_q, log_p),
    "jensen_shannon": jensen_shannon,
}
"""Values of ``loss.kl`` that compare whole distributions."""


@dataclass(frozen=True)
class Head:
    """The head of a model, with the temperature and soft cap of `grpo_rl.policies.head.log_prob_and_entropy`."""

    weight: Float[Tensor, "V E"]
    bias: Float[Tensor, " V"] | None
    temperature: float
    softcap: float | None

    def log_probs(self, hidden: Float[Tensor, "n E"]) -> Float[Tensor, "n V"]:
        """Log-probabilities of all tokens, in nats, fp32 at least."""
        logits = linear(hidden, self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return (logits / self.temperature).log_softmax(-1)


@dataclass(frozen=True)
class WholeTeacher:
    """A teacher on the same device, by the hidden states of the same tokens. Vocabularies may be padded differently."""

    hidden: Float[Tensor, "N T"]
    head: Head

    def compare(self, log_p: Float[Tensor, "n V"], rows: slice | Tensor, kind: Divergence) -> Float[Tensor, " n"]:
        """The divergence of these rows, over the smaller vocabulary."""
        size = min(log_p.shape[1], len(self.head.weight))
        with torch.no_grad():
            log_q = self.head.log_probs(self.hidden[rows]).to(log_p)
        return kind(*(each if each.shape[1] == size else each[:, :size].log_softmax(-1) for each in (log_p, log_q)))


@dataclass(frozen=True)
class TopTeacher:
    """A teacher's likeliest tokens, in nats, and the sum of the rest as one: divergences have a lower bound by it."""

    ids: Int[Tensor, "N W"]
    log_probs: Float[Tensor, "N W"]

    def compare(self, log_p: Float[Tensor, "n V"], rows: slice | Tensor, kind: Divergence) -> Float[Tensor, " n"]:
        """The divergence of these rows over the teacher's tokens and the rest."""
        return kind(_with_rest(log_p.gather(1, self.ids[rows])), _with_rest(self.log_probs[rows].to(log_p)))


@dataclass(frozen=True)
class SeveralTeachers:
    """Teachers, each of its own tokens alone, and the index of each token's teacher."""

    teachers: Sequence[WholeTeacher | TopTeacher]
    whose: Int[Tensor, " N"]

    def compare(self, log_p: Float[Tensor, "n V"], rows: slice | Tensor, kind: Divergence) -> Float[Tensor, " n"]:
        """The divergence of these rows, each from its own teacher."""
        whose, found = self.whose[rows], log_p.new_zeros(len(log_p))
        for i, teacher in enumerate(self.teachers):
            own = whose == i
            if own.any():
                place = (self.whose == i).cumsum(0)[rows][own] - 1  # among the teacher's own tokens
                found = found.masked_scatter(own, teacher.compare(log_p[own], place, kind))
        return found


Teacher = WholeTeacher | TopTeacher | SeveralTeachers


def _with_rest(log_p: Float[Tensor, "n W"]) -> Float[Tensor, "n W1"]:
    """The same with the log-probability of all other tokens, at least 1e-6: sums are rounded."""
    rest = (1 - log_p.exp().sum(-1, keepdim=True)).clamp(min=1e-6).log()
    return torch.cat([log_p, rest], -1)


def divergence(
    hidden: Float[Tensor, "N E"],
    head: Head,
    teacher: Teacher,
    kind: str,
    owner: Float[Tensor, "V E"] | None = None,
) -> Float[Tensor, " N"]:
    """A divergence of :data:`DIVERGENCES` of each token's two distributions, differentiable in the policy's.

    Logits are computed for some rows at a time, and again in the backward pass.

    Args:
        owner: the tensor that gets the gradient of the policy's head instead (`head.Lookups.stand_in`).

    A vocabulary of two, of which the teacher prefers neither:

    >>> head = Head(torch.eye(2), None, 1.0, None)
    >>> even = WholeTeacher(torch.zeros(2, 2), head)
    >>> divergence(torch.tensor([[0.0, 0.0], [9.0, 0.0]]), head, even, "reverse")
    tensor([0.0000, 0.6919])
    """
    return _RowTiled.apply(hidden, head.weight if owner is None else owner, head.bias, head, teacher, kind)


class _RowTiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, owner, bias, head, teacher, kind):
        ctx.save_for_backward(hidden)
        ctx.head, ctx.teacher, ctx.kind, ctx.dtype = head, teacher, DIVERGENCES[kind], grad_dtype(owner)
        tiles = _tiles(hidden, head)
        return torch.cat([teacher.compare(head.log_probs(hidden[rows]), rows, ctx.kind) for rows in tiles])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor):  # pyrefly: ignore[bad-override]
        (hidden,), head, needed = ctx.saved_tensors, ctx.head, ctx.needs_input_grad[1:3]
        weight = head.weight.detach().requires_grad_(needed[0])
        bias = None if head.bias is None else head.bias.detach().requires_grad_(needed[1])
        leaves = [leaf for leaf in (weight, bias) if leaf is not None and leaf.requires_grad]
        # Sums over tiles are fp32: bf16 would lose small terms.
        sums = [torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32)) for leaf in leaves]
        grad_hidden = torch.zeros_like(hidden)
        for rows in _tiles(hidden, head):
            own = hidden[rows].detach().requires_grad_()
            with torch.enable_grad():
                value = ctx.teacher.compare(replace(head, weight=weight, bias=bias).log_probs(own), rows, ctx.kind)
            grad_hidden[rows], *grads = torch.autograd.grad(value, (own, *leaves), grad_out[rows])
            for total, grad in zip(sums, grads, strict=True):
                total += grad
        found, dtypes = iter(sums), (ctx.dtype, weight.dtype)
        of_head = (next(found).to(dtype) if need else None for need, dtype in zip(needed, dtypes, strict=True))
        return grad_hidden, *of_head, None, None, None


def _tiles(hidden: Tensor, head: Head) -> list[slice]:
    rows = max(1, TILE_LOGITS[hidden.device.type] // len(head.weight))
    return [slice(first, first + rows) for first in range(0, max(len(hidden), 1), rows)]
