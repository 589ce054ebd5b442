"""Shared-prefix attention on CPU: descendants over each node, then every node over itself, as batched products.

PyTorch's own CPU kernel spends most of its backward pass in tiles too small for the processor's matrix units; the same
arithmetic in a few batched products is several times faster. Only one block of scores exists at a time, in fp32 (fp64
for fp64 input), and the backward pass recomputes it from the log-sum-exp.

The R = H / K query heads that share keys lie side by side in the rows of a block.
Letters: T tokens of the micro-batch, H query heads, K key-value heads, D head size of queries and keys, E that of
values; s sequences (times key-value heads), m = queries x R rows and n keys of a block.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_rl.policies.packing import Layout, Node, bucket

BLOCK_SCORES = 1 << 20
"""Scores of a block: few enough to stay in the cores' caches between operations."""
BLOCK_QUERIES = 256
"""Queries of a block: in a long sequence, keys after the block's last query are not computed."""
MASKED = -1e30
"""Score of a masked key: finite, so that a query that sees no key of a part yields no NaN."""


@dataclass(frozen=True)
class Rules:
    """The scale, sliding window and soft cap of an attention layer's scores, as `flex_shared_prefix` takes them."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Table:
    """A table of ``count`` sequences padded to ``length`` tokens; ``first`` tokens are in the tables before."""

    first: int
    count: int
    length: int

    def of(self, rows: Tensor, kv_heads: int, repeat: int) -> Float[Tensor, "s L R ..."]:
        """This table's part of arranged rows, of which each token and key-value head has ``repeat``."""
        per_token = kv_heads * repeat
        part = rows[self.first * per_token : (self.first + self.count * self.length) * per_token]
        return part.view(self.count * kv_heads, self.length, repeat, *rows.shape[1:])

    def blocks(self, kv_heads: int, repeat: int, window: int | None) -> Iterator[tuple[slice, slice, slice]]:
        """Sequences, queries and keys of each block; a block's last keys are at the positions of its queries."""
        for start in range(0, self.length, BLOCK_QUERIES):
            queries = slice(start, min(start + BLOCK_QUERIES, self.length))
            keys = slice(0 if window is None else max(0, start - window + 1), queries.stop)
            scores = repeat * (queries.stop - queries.start) * (keys.stop - keys.start)
            for sequences in _even_slices(0, self.count * kv_heads, BLOCK_SCORES // scores):
                yield sequences, queries, keys


@dataclass(frozen=True)
class Arrangement:
    """All nodes of a micro-batch as tables, with the indices to and from tensors laid out as [T, heads].

    Nodes are padded with copies of their last token: the causal mask hides these keys from every real query, and an
    infinite log-sum-exp removes these queries from the backward pass.

    Args:
        queries: rows of [T * H] by table, key-value head, sequence, position, R.
        keys: rows of [T * K] by table, key-value head, sequence, position.
        queries_back: index into ``queries`` of each row of [T * H], padding left aside.
        keys_back: likewise for ``keys``.
        padding: infinite for padding among ``queries``, 0 for the others.
    """

    tables: tuple[Table, ...]
    queries: Int[Tensor, " Q"]
    keys: Int[Tensor, " N"]
    queries_back: Int[Tensor, " TH"]
    keys_back: Int[Tensor, " TK"]
    padding: Float[Tensor, " Q"]

    @classmethod
    def of(cls, layout: Layout, heads: int, kv_heads: int) -> Arrangement:
        """The arrangement of a micro-batch for these numbers of heads, computed once, in the first layer."""
        if (known := layout.cache.get((heads, kv_heads))) is not None:
            return known
        total, repeat = layout.tokens, heads // kv_heads
        by_bucket: dict[int, list[tuple[int, int]]] = {}
        for node in layout.nodes:
            by_bucket.setdefault(bucket(node.end - node.start), []).append((node.start, node.end))
        tables, queries, keys, padded_queries, padded_keys, first = [], [], [], [], [], 0
        for nodes in by_bucket.values():
            starts, ends = torch.tensor(nodes).T[:, :, None]
            token = starts + torch.arange(int((ends - starts).max()))
            padded = (token >= ends).expand(kv_heads, -1, -1)
            token = torch.minimum(token, ends - 1)
            kv_head = torch.arange(kv_heads)[:, None, None]
            keys.append((token * kv_heads + kv_head).flatten())
            queries.append(((token * kv_heads + kv_head)[..., None] * repeat + torch.arange(repeat)).flatten())
            padded_keys.append(padded.flatten())
            padded_queries.append(padded_keys[-1].repeat_interleave(repeat))
            tables.append(Table(first, *token.shape))
            first += token.numel()
        all_queries, all_keys, padded = torch.cat(queries), torch.cat(keys), torch.cat(padded_queries)
        layout.cache[heads, kv_heads] = made = cls(
            tuple(tables),
            all_queries,
            all_keys,
            _way_back(all_queries, padded, total * heads),
            _way_back(all_keys, torch.cat(padded_keys), total * kv_heads),
            torch.zeros(len(padded)).masked_fill_(padded, torch.inf),
        )
        return made


def _even_slices(start: int, stop: int, most: int) -> list[slice]:
    """The range split into slices of at most ``most`` (at least 1), as even as possible.

    >>> _even_slices(0, 8, 5), _even_slices(3, 3, 5)
    ([slice(0, 4, None), slice(4, 8, None)], [])
    """
    count = -(-(stop - start) // max(1, most))
    edges = [start + (stop - start) * i // count for i in range(count + 1)] if count else []
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def _way_back(rows: Int[Tensor, " M"], padded: Bool[Tensor, " M"], size: int) -> Int[Tensor, " size"]:
    """Index of each of ``range(size)`` in ``rows``, ignoring padding."""
    places = (~padded).nonzero()[:, 0]
    return torch.empty(size, dtype=torch.long).index_copy_(0, rows[places], places)


class TwoPartAttention(torch.autograd.Function):
    """Attention of a packed micro-batch, forward and backward.

    Softmax over two sets of keys is the mean of the two softmaxes weighted by their partition sums, and the backward
    pass of each part is exact if it uses the joint output and the joint log-sum-exp. That holds for sinks too.
    Source of the identity: Ring Attention, https://arxiv.org/abs/2310.01889; Hydragen, https://arxiv.org/abs/2402.05099.
    """

    @staticmethod
    def forward(
        ctx,
        query: Float[Tensor, "T H D"],
        key: Float[Tensor, "T K D"],
        value: Float[Tensor, "T K E"],
        sinks: Float[Tensor, " H"] | None,
        layout: Layout,
        rules: Rules,
    ) -> Float[Tensor, "T H E"]:
        q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
        (total, heads, _), kv_heads = q.shape, k.shape[1]
        place, repeat = Arrangement.of(layout, heads, kv_heads), heads // kv_heads
        out = v.new_zeros(total, heads, v.shape[-1])
        lse = q.new_full((total, heads), MASKED, dtype=torch.promote_types(q.dtype, torch.float32))
        for node, rows, mask in _ancestor_blocks(layout, heads, repeat, rules.window):
            keys = slice(node.start, node.end)
            probs, block_lse = _softmax(_scores(_fold(q[rows], kv_heads), _fold(k[keys], kv_heads), rules)[0], mask)
            block_lse = _unfold(block_lse, heads)
            if node.parent < 0:
                out[rows] = _unfold(torch.bmm(probs.to(v.dtype), _fold(v[keys], kv_heads)), heads)
                lse[rows] = block_lse
                continue
            before = lse[rows]
            joint = torch.logaddexp(block_lse, before)
            probs *= _fold((block_lse - joint).exp_(), kv_heads)[..., None]
            carried = (out[rows] * (before - joint).exp_()[..., None]).to(v.dtype)
            joined = torch.baddbmm(_fold(carried, kv_heads), probs.to(v.dtype), _fold(v[keys], kv_heads))
            out[rows], lse[rows] = _unfold(joined, heads), joint

        # What tokens see of their ancestors, which the loop below makes the joint result.
        joint_out, joint_lse = _rows(out, place.queries), lse.view(-1)[place.queries]
        qa, ka, va = _rows(q, place.queries), _rows(k, place.keys), _rows(v, place.keys)
        for table in place.tables:
            qt, ot, lt = (table.of(x, kv_heads, repeat) for x in (qa, joint_out, joint_lse))
            kt, vt = (table.of(x, kv_heads, 1)[:, :, 0] for x in (ka, va))
            for seq, rows, keys in table.blocks(kv_heads, repeat, rules.window):
                scores, _ = _scores(qt[seq, rows].flatten(1, 2), kt[seq, keys], rules)
                probs, block_lse = _softmax(scores, _causal_mask(rows, keys, repeat, rules.window))
                before = lt[seq, rows].flatten(1, 2)
                joint = torch.logaddexp(block_lse, before)
                probs *= (block_lse - joint).exp_()[..., None]
                carried = (ot[seq, rows].flatten(1, 2) * (before - joint).exp_()[..., None]).to(v.dtype)
                joined = torch.baddbmm(carried, probs.to(v.dtype), vt[seq, keys])
                ot[seq, rows], lt[seq, rows] = joined.unflatten(1, (-1, repeat)), joint.unflatten(1, (-1, repeat))
        out, lse = _rows(joint_out, place.queries_back).view_as(out), joint_lse[place.queries_back].view_as(lse)
        if sinks is not None:
            without, lse = lse, torch.logaddexp(lse, sinks.to(lse.dtype))
            out *= (without - lse).exp_()[..., None]
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.layout, ctx.rules = layout, rules
        return out

    @staticmethod
    def backward(ctx, grad_out):  # pyrefly: ignore[bad-override]
        q, k, v, out, lse, sinks = ctx.saved_tensors
        layout, rules, g = ctx.layout, ctx.rules, grad_out.contiguous()
        heads, kv_heads = q.shape[1], k.shape[1]
        place, repeat = Arrangement.of(layout, heads, kv_heads), heads // kv_heads
        # In chunks that stay in the caches.
        delta = torch.cat([(a.to(lse.dtype) * b).sum(-1) for a, b in zip(g.split(256), out.split(256), strict=True)])

        qa, ga = _rows(q, place.queries), _rows(g, place.queries)
        ka, va = _rows(k, place.keys), _rows(v, place.keys)
        lse_a, delta_a = lse.view(-1)[place.queries] + place.padding, delta.view(-1)[place.queries]
        dqa = torch.zeros_like(qa)
        # Many blocks add to a key's gradient: bf16 would lose small terms.
        dka, dva = (torch.zeros_like(x, dtype=lse.dtype) for x in (ka, va))
        for table in place.tables:
            parts = [table.of(x, kv_heads, repeat) for x in (dqa, qa, ga, lse_a, delta_a)]
            dkt, dvt, kt, vt = (table.of(x, kv_heads, 1)[:, :, 0] for x in (dka, dva, ka, va))
            for seq, rows, keys in table.blocks(kv_heads, repeat, rules.window):
                block = (x[seq, rows].flatten(1, 2) for x in parts)
                mask = _causal_mask(rows, keys, repeat, rules.window)
                dq, dk, dv = _block_backward(*block, k=kt[seq, keys], v=vt[seq, keys], mask=mask, rules=rules)
                parts[0][seq, rows] = dq.unflatten(1, (-1, repeat))
                dkt[seq, keys] += dk
                dvt[seq, keys] += dv
        dq = _rows(dqa, place.queries_back).view_as(q)
        dk, dv = _rows(dka, place.keys_back).view_as(k), _rows(dva, place.keys_back).view_as(v)

        for node, rows, mask in _ancestor_blocks(layout, heads, repeat, rules.window):
            keys = slice(node.start, node.end)
            block = (_fold(x[rows], kv_heads) for x in (dq, q, g, lse, delta))
            k_block, v_block = _fold(k[keys], kv_heads), _fold(v[keys], kv_heads)
            grads = _block_backward(*block, k=k_block, v=v_block, mask=mask, rules=rules)
            dq[rows] = _unfold(grads[0], heads)
            for total, grad in zip((dk, dv), grads[1:], strict=True):
                total[keys] += _unfold(grad, kv_heads)
        dsinks = None
        if sinks is not None:
            # A sink's value is zero, so its score's gradient is -p_sink * delta.
            dsinks = (sinks.to(lse.dtype) - lse).exp_().mul_(delta).sum(0).neg_().to(sinks.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


class Mask(NamedTuple):
    """Mask of a block's last n keys: ``add`` is 0 and ``keep`` 1 for a visible key, else MASKED and 0."""

    add: Float[Tensor, "m n"]
    keep: Float[Tensor, "m n"]

    @classmethod
    def of(cls, distance: Int[Tensor, "queries n"], repeat: int, window: int | None) -> Mask:
        """The mask from the distances of queries to keys."""
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        keep = visible.float().repeat_interleave(repeat, 0)
        return cls((1 - keep) * MASKED, keep)

    def of_masked(self, scores: Float[Tensor, "s m k"]) -> Float[Tensor, "s m n"]:
        """The masked part of a block; the keys before it are visible to all queries."""
        return scores[..., -self.keep.shape[1] :]


@functools.lru_cache(maxsize=16)
def _mask_of_band(offset: int, queries: int, keys: int, repeat: int, window: int | None) -> Mask:
    return Mask.of(torch.arange(offset, offset + queries)[:, None] - torch.arange(keys), repeat, window)


def _causal_mask(queries: slice, keys: slice, repeat: int, window: int | None) -> Mask:
    length = queries.stop - queries.start
    if window is None or window >= queries.stop:
        # Only keys at the queries' own positions are hidden from any of them.
        return _mask_of_band(0, length, length, repeat, None)
    return _mask_of_band(queries.start - keys.start, length, keys.stop - keys.start, repeat, window)


def _ancestor_blocks(
    layout: Layout, heads: int, repeat: int, window: int | None
) -> Iterator[tuple[Node, slice, Mask | None]]:
    """Each node that has descendants with blocks of their rows, which attend to it, and the window's mask."""
    for node in layout.nodes:
        length = node.end - node.start
        for rows in _even_slices(node.end, node.until, BLOCK_SCORES // (heads * length)):
            mask = None
            if window is not None:
                keys = torch.arange(node.position, node.position + length)
                mask = Mask.of(layout.positions[rows, None] - keys, repeat, window)
            yield node, rows, mask


def _scores(
    q: Float[Tensor, "s m D"], k: Float[Tensor, "s n D"], rules: Rules
) -> tuple[Float[Tensor, "s m n"], Float[Tensor, "s m n"] | None]:
    """Scores in fp32 at least, and the slope of the soft cap if there is one."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.new_empty((), dtype=dtype).expand(len(q), q.shape[1], k.shape[1])  # not read at beta=0
    with _inputs_may_be_rounded(q.dtype):
        scores = torch.baddbmm(scores, q.to(dtype), k.to(dtype).transpose(1, 2), beta=0, alpha=rules.scale)
    if rules.softcap is None:
        return scores, None
    tanh = scores.div_(rules.softcap).tanh_()
    return tanh * rules.softcap, 1 - tanh * tanh


@contextlib.contextmanager
def _inputs_may_be_rounded(dtype: torch.dtype) -> Iterator[None]:
    """Lets PyTorch round inputs of fp32 products to bf16, if they came from bf16 (``dtype``) and so lose nothing.

    It then uses oneDNN instead of MKL, which is faster (docs/log.md) and as exact. The setting is process-wide:
    meanwhile no other thread may compute fp32 products of other numbers.
    """
    if dtype != torch.bfloat16:
        yield
        return
    settings = torch.backends.mkldnn.matmul  # pyrefly: ignore[missing-attribute]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _softmax(scores: Float[Tensor, "s m n"], mask: Mask | None) -> tuple[Float[Tensor, "s m n"], Float[Tensor, "s m"]]:
    """Softmax, and log-sum-exp from the largest score, whose probability is at least 1 / n."""
    if mask is not None:
        mask.of_masked(scores).add_(mask.add)
    probs = scores.softmax(-1)
    return probs, scores.amax(-1) - probs.amax(-1).log_()


def _block_backward(
    dq: Float[Tensor, "s m D"],
    q: Float[Tensor, "s m D"],
    g: Float[Tensor, "s m E"],
    lse: Float[Tensor, "s m"],
    delta: Float[Tensor, "s m"],
    k: Float[Tensor, "s n D"],
    v: Float[Tensor, "s n E"],
    mask: Mask | None,
    rules: Rules,
) -> tuple[Float[Tensor, "s m D"], Float[Tensor, "s n D"], Float[Tensor, "s n E"]]:
    """A block's gradients of keys and values, and of queries, to which ``dq`` of other blocks is added.

    ``g`` is the gradient of the joint output, and ``delta`` the dot product of both over E.
    """
    scores, slope = _scores(q, k, rules)
    scores -= lse[..., None]
    if mask is not None:
        # Hidden keys have scores of any size, and the exponential of a very low one takes six times as long: they are
        # clamped to 0 and zeroed afterwards.
        mask.of_masked(scores).clamp_(max=0)
    probs = scores.exp_()
    if mask is not None:
        mask.of_masked(probs).mul_(mask.keep)
    grad = torch.sub(torch.bmm(g, v.transpose(1, 2)), delta[..., None]).mul_(probs)
    if slope is not None:
        grad *= slope
    grad, probs = grad.to(q.dtype), probs.to(q.dtype)
    return (
        torch.baddbmm(dq, grad, k, alpha=rules.scale),
        torch.bmm(grad.transpose(1, 2), q).mul_(rules.scale),
        torch.bmm(probs.transpose(1, 2), g),
    )


def _rows(x: Tensor, index: Int[Tensor, " M"]) -> Tensor:
    """Rows of [T, heads, D] or [rows, D] by index; index_select is tens of times faster than indexing."""
    return x.view(-1, x.shape[-1]).index_select(0, index)


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """[l, K * R, ...] -> [K, l * R, ...]."""
    return x.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)


def _unfold(x: Tensor, heads: int) -> Tensor:
    """[K, l * R, ...] -> [l, K * R, ...], the inverse of :func:`_fold`."""
    return x.unflatten(1, (-1, heads // len(x))).transpose(0, 1).flatten(1, 2)
