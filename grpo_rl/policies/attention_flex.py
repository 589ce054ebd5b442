"""Shared-prefix attention on CUDA: FlexAttention over a whole micro-batch, skipping fully masked blocks.

A node's descendants lie right behind it, so a token is seen from its own place up to one that all tokens of its node
share. Three numbers per token describe that, windows included, so one compiled kernel serves all layouts and windows.
Letters: T tokens of the micro-batch, H query heads, K key-value heads, D head size of queries and keys, E that of
values; I, J blocks of queries and keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import astuple
from typing import NamedTuple, no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from grpo_rl.policies.compiler import why_uncompiled
from grpo_rl.policies.packing import Layout, Node, bucket

BLOCK = 128
"""Side of the blocks, which are skipped if no query in them sees a key."""
SMALLEST_HEAD = 16
"""PyTorch compiles no kernel for smaller heads."""
SHORTEST = 512
"""Smallest padded length: a kernel for fewer tokens would gain nothing."""
COMPILE = {"dynamic": False, "fullgraph": True, "recompile_limit": 64, "isolate_recompiles": True}
"""A long run has more lengths and modes than PyTorch's limit of 8 kernels. Past a limit PyTorch would silently compute
all T * T scores; with ``fullgraph`` that is an error."""


def flex_shared_prefix(
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 K T D"],
    value: Float[Tensor, "1 K T E"],
    layout: Layout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "1 H T E"]:
    """Attention of each token over its own node and the ancestors of that.

    Source: trees laid flat, Tree Training, https://arxiv.org/abs/2511.00413; FlexAttention,
    https://arxiv.org/abs/2412.05496. On CUDA compiled, once for each bucket of lengths, with and without gradient; on
    CPU, where it has no backward pass, PyTorch's reference implementation. That also serves a GPU without a compiler:
    it computes all T * T scores.

    Args:
        layout: the nodes, which cover all T tokens.
        scale: factor on the products of queries and keys.
        window: a token sees this many positions back, its own included; None: all.
        softcap: scaled scores become ``softcap * tanh(score / softcap)``.
        sinks: one extra logit a head in the softmax, with a value of zero.

    Raises:
        ValueError: heads are too small for a kernel.
    """
    check_head_size(min(query.shape[-1], value.shape[-1]), query.device)
    tokens = query.shape[2]
    padded = padded_length(tokens)
    # Contiguous also without padding: other strides would compile another kernel.
    query, key, value = (pad(x, (0, 0, 0, padded - tokens)).contiguous() for x in (query, key, value))
    plain = query.device.type == "cpu" or why_uncompiled(query.device)
    attend = flex_attention if plain else compiled()
    mask = block_mask(layout.nodes, padded, window, query.device)
    return _attended(attend, query, key, value, mask, scale, softcap, sinks)[:, :, :tokens]


@no_type_check  # traced: the tests' run-time type checks can't be
def _attended(attend, query, key, value, mask, scale, softcap, sinks):
    """Attention's output, where each head's sink has taken its share of the softmax."""
    out = attend(
        query,
        key,
        value,
        score_mod=None if softcap is None else _soft_cap(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        return out
    out, aux = out
    return (out * (aux.lse - sinks[:, None]).sigmoid()[..., None]).to(out.dtype)


def check_head_size(size: int, device: torch.device) -> None:
    """Raises ValueError for heads that are too small for a kernel."""
    if device.type == "cuda" and size < SMALLEST_HEAD:
        raise ValueError(f"heads of size {size} can't be trained on CUDA; {SMALLEST_HEAD} is the smallest")


def padded_length(tokens: int) -> int:
    """The length that this many tokens are padded to: few lengths, few compilations.

    >>> [padded_length(n) for n in (3, 513, 1025, 3000, 16384)]
    [512, 768, 1536, 3072, 16384]
    """
    return max(SHORTEST, bucket(tokens))


class BlockTables(NamedTuple):
    """The attention mask of a padded micro-batch, as tensors alone: other layouts of it need no other kernels."""

    reach: Int[Tensor, "3 T"]
    kv_count: Int[Tensor, "1 1 I"]
    kv_blocks: Int[Tensor, "1 1 I J"]
    full_kv_count: Int[Tensor, "1 1 I"]
    full_kv_blocks: Int[Tensor, "1 1 I J"]
    q_count: Int[Tensor, "1 1 J"]
    q_blocks: Int[Tensor, "1 1 J I"]
    full_q_count: Int[Tensor, "1 1 J"]
    full_q_blocks: Int[Tensor, "1 1 J I"]


class PaddedLayout(NamedTuple):
    """A layout of whole blocks as compiled layers read it: tables by window."""

    tables: dict[int | None, BlockTables]

    @classmethod
    def of(cls, layout: Layout, tokens: int, windows: Collection[int | None], device: torch.device) -> PaddedLayout:
        """The layout, with padding after its last node up to ``tokens``."""
        return cls({window: block_tables(layout.nodes, tokens, window, device) for window in windows})


def whole_blocks(tokens: int) -> int:
    """The length that a compiled layer's tokens are padded to.

    >>> [whole_blocks(n) for n in (3, 513, 16384)]
    [512, 640, 16384]
    """
    return max(SHORTEST, -(-tokens // BLOCK) * BLOCK)


@no_type_check  # traced: the tests' run-time type checks can't be
def flex_in_layer(query, key, value, layout: PaddedLayout, scale, window, softcap, sinks):
    """Computes what :func:`flex_shared_prefix` does, for a layer that is compiled as one."""
    tables = layout.tables[window]
    blocks = tables.kv_count.shape[2]
    # Whole blocks, by construction: the kernel needs no bounds.
    torch._check(query.shape[2] == blocks * BLOCK)
    until, position, earliest = tables.reach.unbind()

    def sees(batch, head, q, k):
        return (k <= q) & (q < until[k]) & (position[k] >= earliest[q])

    mask = BlockMask((query.shape[2], query.shape[2]), *tables[1:], BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees)
    return _attended(flex_attention, query, key, value, mask, scale, softcap, sinks)


@functools.cache
def compiled() -> Callable[..., Tensor]:
    """FlexAttention as fused kernels, compiled at the first call of each shape."""
    return torch.compile(flex_attention, **COMPILE)


@functools.lru_cache(maxsize=8)  # all layers share one or two masks, as does the backward pass
def block_mask(nodes: tuple[Node, ...], tokens: int, window: int | None, device: torch.device) -> BlockMask:
    """The mask of ``tokens``, padding after the last node included; a padding token sees only itself."""
    tables = block_tables(nodes, tokens, window, device)
    until, position, earliest = tables.reach

    @no_type_check  # traced: the tests' run-time type checks can't be
    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < until[k]) & (position[k] >= earliest[q])

    return BlockMask((tokens, tokens), *tables[1:], BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees)


@functools.lru_cache(maxsize=8)
def block_tables(nodes: tuple[Node, ...], tokens: int, window: int | None, device: torch.device) -> BlockTables:
    """Each token's :func:`reach`, and which blocks need not be computed or not be masked."""
    reaches = reach(nodes, tokens, window).to(device)
    first = torch.arange(0, tokens, BLOCK, device=device, dtype=torch.int32)
    seen = torch.zeros(len(first), len(first), device=device, dtype=torch.int32)
    for start, stop in seen_ranges(nodes, reaches):
        overlap = torch.minimum(stop[:, None], first + BLOCK) - torch.maximum(start[:, None], first)
        seen += overlap.clamp_(min=0).unflatten(0, (-1, BLOCK)).sum(1, dtype=torch.int32)
    full = seen == BLOCK * BLOCK
    partly = (seen > 0) & ~full
    return BlockTables(reaches, *_ordered(partly), *_ordered(full), *_ordered(partly.T), *_ordered(full.T))


def reach(nodes: tuple[Node, ...], tokens: int, window: int | None) -> Int[Tensor, "3 T"]:
    """Three rows for all tokens: the end of those that see it, its position, and the earliest position that it sees.

    >>> from grpo_rl.policies.packing import Node
    >>> reach((Node(0, 3, 6, 0, -1), Node(3, 5, 5, 3, 0), Node(5, 6, 6, 3, 0)), tokens=7, window=3)
    tensor([[ 6,  6,  6,  5,  5,  6,  7],
            [ 0,  1,  2,  3,  4,  3,  0],
            [-2, -1,  0,  1,  2,  1,  0]], dtype=torch.int32)
    """
    real = nodes[-1].end
    starts, ends, untils, positions, _ = torch.tensor([astuple(node) for node in nodes], dtype=torch.int32).T
    until, offset = (x.repeat_interleave(ends - starts) for x in (untils, positions - starts))
    index = torch.arange(tokens, dtype=torch.int32)
    # Each padding token is a sequence of its own.
    until, position = torch.cat([until, index[real:] + 1]), pad(offset, (0, tokens - real)) + index
    position[real:] = 0
    earliest = torch.zeros_like(index) if window is None else position - window + 1
    earliest[real:] = 0
    return torch.stack([until, position, earliest])


def seen_ranges(
    nodes: tuple[Node, ...], reaches: Int[Tensor, "3 T"]
) -> Iterator[tuple[Int[Tensor, " T"], Int[Tensor, " T"]]]:
    """The ranges of keys that each token sees, nearest first: of its own node, of that one's parent, and so on."""
    _, position, earliest = reaches
    index = torch.arange(len(position), device=position.device, dtype=torch.int32)
    # One entry more: padding is of no node, and roots have no parent. Its range is empty.
    table = torch.tensor([*(astuple(node) for node in nodes), (0, 0, 0, 0, -1)], dtype=torch.int32)
    starts, ends, _, positions, parents = table.T.to(position.device)
    lengths = (ends - starts)[:-1]
    owner = torch.arange(len(nodes), device=position.device).repeat_interleave(lengths)
    node = pad(owner, (0, len(position) - len(owner)), value=len(nodes))
    own_start = torch.where(node < len(nodes), starts[node], index)
    yield torch.maximum(own_start, index - (position - earliest)), index + 1
    parents = torch.where(parents < 0, len(nodes), parents).long()
    while bool((node := parents[node]).lt(len(nodes)).any()):
        yield starts[node] + (earliest - positions[node]).clamp_(min=0), ends[node]


def _ordered(blocks: Bool[Tensor, "I J"]) -> tuple[Int[Tensor, "1 1 I"], Int[Tensor, "1 1 I J"]]:
    """The number of set blocks in each row, and the blocks in order, set ones first."""
    blocks = blocks.contiguous()  # argsort keeps strides, and the kernels read a row as contiguous
    count = blocks.sum(-1, dtype=torch.int32)
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return count[None, None], order[None, None]


@functools.cache
def _soft_cap(softcap: float) -> Callable[..., Tensor]:
    @no_type_check
    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
