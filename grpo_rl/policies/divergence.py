"""Divergence of policy and teacher over the whole vocabulary, some rows at a time.

Letters: N tokens, E and T hidden sizes of policy and teacher, V vocabulary, W tokens of a served teacher's; n rows of a
tile.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    """KL(policy || teacher) of each row, in nats: the mean that `grpo_rl.losses.kl.k1` estimates from one token.

    >>> reverse_kl(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log())  # ln 2 / 2 - ln 1.5 / 2
    tensor([0.1438])
    """
    # A token that the model masks out has no probability, and log 0 times 0 counts nothing.
    return (log_p.exp() * (log_p - log_q).masked_fill(log_p.isneginf(), 0.0)).sum(-1)


def forward_kl(log_p: Float[Tensor, "n V"], log_q: Float[Tensor, "n V"]) -> Float[Tensor, " n"]:
    """KL(teacher || policy) of each row, in nats: cross-entropy of the teacher's distribution, less its entropy."""
    return reverse_kl(log_q, log_p)


def jensen_shannon(log_p: Float[Tensor, "n V"], log_q: Float[Tensor, "n V"]) -> Float[Tensor, " n"]:
    """The mean KL of policy and teacher to the mean of both, in nats: at most ln 2. GKD, arXiv 2306.13649, beta 1/2."""
    neither = log_p.isneginf() & log_q.isneginf()  # where the gradient of their sum would be NaN
    middle = torch.logaddexp(log_p.masked_fill(neither, 0.0), log_q) - math.log(2)
    return (reverse_kl(log_p, middle) + reverse_kl(log_q, middle)) / 2


DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reverse": reverse_kl,
    "forward": forward_kl,
    "jensen_shannon": jensen_shannon,
}
"""Values of ``loss.kl`` that compare whole distributions."""


@dataclass(frozen=True)
class Head:
    """The head of a model: its weight, bias, and the steps from its product with hidden states to logits.

    Args:
        temperature, softcap: as of `grpo_rl.policies.head.log_prob_and_entropy`.
    """

    weight: Float[Tensor, "V E"]
    bias: Float[Tensor, " V"] | None
    temperature: float
    softcap: float | None

    def product(self, hidden: Float[Tensor, "n E"]) -> Float[Tensor, "n V"]:
        """The product of weight and hidden states, in their dtype."""
        return linear(hidden, self.weight, self.bias)

    def logits(self, product: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Logits over temperature, in fp32 at least, of such a product."""
        logits = product.to(torch.promote_types(product.dtype, torch.float32))
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature


Rows = slice | Tensor
"""Indices of tokens."""


@dataclass(frozen=True)
class WholeTeacher:
    """A teacher on the same device, by the hidden states of the same tokens. Vocabularies may be padded differently.

    Args:
        hidden: [N, T].
    """

    hidden: Float[Tensor, "N T"]
    head: Head

    def compare(self, log_p: Float[Tensor, "n V"], rows: Rows, kind: Callable[..., Tensor]) -> Float[Tensor, " n"]:
        """The divergence of these rows, over the smaller vocabulary."""
        size = min(log_p.shape[1], len(self.head.weight))
        with torch.no_grad():
            log_q = self.head.logits(self.head.product(self.hidden[rows]))[:, :size].log_softmax(-1).to(log_p)
        return kind(log_p[:, :size].log_softmax(-1) if size < log_p.shape[1] else log_p, log_q)


@dataclass(frozen=True)
class TopTeacher:
    """A teacher's likeliest tokens, and the sum of the rest as one: divergences have a lower bound by it.

    Args:
        ids: [N, W].
        log_probs: [N, W], in nats.
    """

    ids: Int[Tensor, "N W"]
    log_probs: Float[Tensor, "N W"]

    def compare(self, log_p: Float[Tensor, "n V"], rows: Rows, kind: Callable[..., Tensor]) -> Float[Tensor, " n"]:
        """The divergence of these rows over the teacher's tokens and the rest."""
        return kind(_with_rest(log_p.gather(1, self.ids[rows])), _with_rest(self.log_probs[rows].to(log_p)))


@dataclass(frozen=True)
class SeveralTeachers:
    """Teachers of some of the tokens each.

    Args:
        teachers: each of its own tokens alone.
        whose: [N] index of each token's teacher.
    """

    teachers: Sequence[WholeTeacher | TopTeacher]
    whose: Int[Tensor, " N"]

    def compare(self, log_p: Float[Tensor, "n V"], rows: Rows, kind: Callable[..., Tensor]) -> Float[Tensor, " n"]:
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
    """The same with the log-probability of all other tokens, at least 1e-6: sums are rounded.

    >>> _with_rest(torch.tensor([[0.5, 0.25]]).log()).exp()
    tensor([[0.5000, 0.2500, 0.2500]])
    """
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
        tiles = _tiles(hidden, len(head.weight))
        return torch.cat([_of_rows(ctx, head.product(hidden[rows]), rows) for rows in tiles])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor):  # pyrefly: ignore[bad-override]
        (hidden,) = ctx.saved_tensors
        head: Head = ctx.head
        grad_hidden = torch.zeros_like(hidden)
        # Sums over tiles are fp32: bf16 would lose small terms.
        wide = torch.promote_types(head.weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(head.weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(head.bias, dtype=wide) if ctx.needs_input_grad[2] else None
        for rows in _tiles(hidden, len(head.weight)):
            product = head.product(hidden[rows]).requires_grad_()
            with torch.enable_grad():
                value = _of_rows(ctx, product, rows)
            (grad,) = torch.autograd.grad(value, product, grad_out[rows])
            grad_hidden[rows] = grad @ head.weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=wide)
        grad_weight = None if grad_weight is None else grad_weight.to(ctx.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(head.weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _of_rows(ctx: Any, product: Tensor, rows: slice) -> Tensor:
    return ctx.teacher.compare(ctx.head.logits(product).log_softmax(-1), rows, ctx.kind)


def _tiles(hidden: Tensor, vocabulary: int) -> list[slice]:
    rows = max(1, TILE_LOGITS[hidden.device.type] // vocabulary)
    return [slice(first, first + rows) for first in range(0, max(len(hidden), 1), rows)]
