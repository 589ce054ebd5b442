"""Tensors of which every rank holds a part (DTensors, cut along their first dimension), beside plain ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, which every rank has to ask for at the same time; a plain one as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory; a plain tensor as it is.

    >>> local(torch.ones(2))
    tensor([1., 1.])
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def assign(target: Tensor, source: Tensor) -> None:
    """Writes ``source`` into ``target``, or this rank's part of it.

    Args:
        source: whole, or sharded as ``target`` is, on whatever device.

    >>> weight = torch.zeros(2)
    >>> assign(weight, torch.tensor([1.0, 2.0])); weight
    tensor([1., 2.])
    """
    if isinstance(target, DTensor) and not isinstance(source, DTensor):
        mesh = target.device_mesh
        parts, rank = source.chunk(mesh.size()), mesh.get_local_rank()
        # Of fewer rows than ranks the last ranks hold none.
        source = parts[rank] if rank < len(parts) else source[:0]
    there, part = local(target), local(source)
    assert there.shape == part.shape, f"{list(part.shape)} is not what belongs into {list(there.shape)}"
    there.copy_(part)  # which would repeat a single row


def placed_like(source: Tensor, like: Tensor) -> Tensor:
    """``source`` sharded as ``like`` is; itself where that is plain."""
    if not isinstance(like, DTensor):
        return source
    out = torch.empty_like(like, dtype=source.dtype, requires_grad=False)
    assign(out, source)
    return out
