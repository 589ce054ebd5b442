"""Embedding lookups whose gradient shares the gradient table of a tied head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding
from torch.overrides import TorchFunctionMode


def grad_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that the weight's gradient is kept in: fp32 if an optimizer with fp32 masters requests it."""
    return (weight.grad_dtype if weight.is_leaf else None) or weight.dtype


class Lookups(TorchFunctionMode):
    """Replaces the lookups in an embedding weight while a model runs.

    PyTorch allocates a gradient as large as the table in the weight's dtype, another in the dtype that the gradient is
    kept in, and adds that to the gradient of a tied head: for a small model more memory than all else in a step. Here
    the rows' gradients are added to the kept table directly.

    >>> weight = torch.nn.Parameter(torch.eye(3))
    >>> with Lookups(weight) as lookups:
    ...     rows = embedding(torch.tensor([1, 1]), weight)
    >>> (rows.sum() + 10 * lookups.stand_in.sum()).backward()
    >>> weight.grad
    tensor([[10., 10., 10.],
            [12., 12., 12.],
            [10., 10., 10.]])
    """

    def __init__(self, weight: Float[Tensor, "V E"]) -> None:
        super().__init__()
        self._weight = weight
        self.stand_in: Tensor | None = None
        """[V, E] after a lookup: a placeholder without data, the owner of a tied head's gradient."""

    @no_type_check  # it is called for every operation, and a run-time type check would take longer
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is embedding and args[1] is self._weight and self.stand_in is None and torch.is_grad_enabled():
            rows, self.stand_in = _Lookup.apply(self._weight, args[0], kwargs["padding_idx"])
            return rows
        return func(*args, **kwargs)


@contextmanager
def lookups_in(module: torch.nn.Module) -> Iterator[Lookups]:
    """Takes over an embedding's lookups in its weight, in a mode that is on while the module runs and at no other time.

    What compiles under a mode is compiled for it, and anew where the mode's state changes.
    """
    lookups = Lookups(module.weight)
    before = module.register_forward_pre_hook(lambda *_: lookups.__enter__() and None)
    after = module.register_forward_hook(lambda *_: lookups.__exit__(None, None, None), always_call=True)
    try:
        yield lookups
    finally:
        before.remove()
        after.remove()


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Float[Tensor, "V E"], ids: Int[Tensor, " *T"], padding_idx: int | None):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.padding_idx, ctx.shape, ctx.dtype = padding_idx, weight.shape, grad_dtype(weight)
        return embedding(ids, weight), weight.new_zeros((), dtype=ctx.dtype).expand(weight.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows, grad_weight):  # pyrefly: ignore[bad-override]
        if grad_rows is None:
            return grad_weight, None, None
        (ids,) = ctx.saved_tensors
        if grad_weight is None:
            grad_weight = grad_rows.new_zeros(ctx.shape, dtype=ctx.dtype)
        if ctx.padding_idx is not None:
            grad_rows = grad_rows.masked_fill((ids == ctx.padding_idx)[..., None], 0)
        # In place: nothing else uses the placeholder's gradient. Not `index_add_`, whose order varies on CUDA.
        grad_weight = grad_weight.contiguous()
        grad_weight.index_put_((ids,), grad_rows.to(ctx.dtype), accumulate=True)
        return grad_weight, None, None
