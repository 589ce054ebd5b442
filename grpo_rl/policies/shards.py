"""The same functions for plain tensors and for sharded ones (DTensors, split along their first dimension)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, a collective call of all ranks; a plain tensor as it is."""
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
        source: whole, or sharded like ``target``, on any device.

    >>> weight = torch.zeros(2)
    >>> assign(weight, torch.tensor([1.0, 2.0])); weight
    tensor([1., 2.])
    """
    if isinstance(target, DTensor) and not isinstance(source, DTensor):
        mesh = target.device_mesh
        parts, rank = source.chunk(mesh.size()), mesh.get_local_rank()
        # With fewer rows than ranks the last ranks have none.
        source = parts[rank] if rank < len(parts) else source[:0]
    there, part = local(target), local(source)
    assert there.shape == part.shape, f"a source of {list(part.shape)} for a target of {list(there.shape)}"
    there.copy_(part)  # alone it would broadcast a single row


def placed_like(source: Tensor, like: Tensor) -> Tensor:
    """``source`` sharded like ``like``; unchanged if that is a plain tensor."""
    if not isinstance(like, DTensor):
        return source
    out = torch.empty_like(like, dtype=source.dtype, requires_grad=False)
    assign(out, source)
    return out
