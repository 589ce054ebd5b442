"""Shared-prefix attention: the prompt of a group is computed once, and each answer attends to it and to itself.

Tokens of a micro-batch lie flat, group after group: prompt, answer 1, …, answer G, next prompt, … No padding.
Letters: T tokens of the micro-batch, N response tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_rl.rollout import Group

ATTENTION_NAME = "grpo_rl_shared_prefix"
"""The name under which transformers models find the attention below (``config._attn_implementation``)."""


BUCKET = 16
"""Answers whose lengths round up to the same multiple go through one call of the kernel."""


@dataclass(frozen=True)
class Span:
    """Where one group lies in the flat micro-batch: prompt at [start, prompt_end), answers at [prompt_end, end)."""

    start: int
    prompt_end: int
    edges: tuple[int, ...]
    """Borders of the answers; answer g is at [edges[g], edges[g + 1]). Empty answers have equal borders."""

    @property
    def end(self) -> int:
        return self.edges[-1]


@dataclass(frozen=True)
class Table:
    """Answers of about the same length, of any groups: B answers, L tokens.

    Args:
        index: [B, L] positions in the micro-batch; past an answer's end its last one is repeated.
        valid: [B, L] False there. A causal mask keeps those rows out of every real one.
        where: ``index[valid]``.
    """

    index: Int[Tensor, "B L"]
    valid: Bool[Tensor, "B L"]
    where: Int[Tensor, " M"]


@dataclass(frozen=True)
class Layout:
    """What attention has to know of a micro-batch; made once, read by every layer."""

    spans: tuple[Span, ...]
    tables: tuple[Table, ...]

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Layout:
        """The layout of these groups.

        >>> layout = Layout.of([Span(0, 2, (2, 5, 7))])
        >>> layout.tables[0].index.tolist(), layout.tables[0].valid.tolist()
        ([[2, 3, 4], [5, 6, 6]], [[True, True, True], [True, True, False]])
        """
        buckets: dict[int, list[tuple[int, int]]] = {}
        for span in spans:
            for start, end in zip(span.edges, span.edges[1:], strict=False):
                if end > start:
                    buckets.setdefault(-(-(end - start) // BUCKET), []).append((start, end))
        tables = []
        for answers in buckets.values():
            starts, ends = torch.tensor(answers).T
            index = starts[:, None] + torch.arange(int((ends - starts).max()))
            valid = index < ends[:, None]
            index = torch.minimum(index, ends[:, None] - 1)
            tables.append(Table(index, valid, index[valid]))
        return cls(tuple(spans), tuple(tables))


@dataclass(frozen=True)
class Packed:
    """A micro-batch of groups as one flat sequence.

    Args:
        input_ids: [T] every prompt once, then its answers.
        position_ids: [T] an answer's positions go on from its prompt's.
        layout: where groups and answers lie.
        predict_index: [N] position whose hidden state predicts each response token.
        target_ids: [N] the response tokens, in the groups' own order.
    """

    input_ids: Int[Tensor, " T"]
    position_ids: Int[Tensor, " T"]
    layout: Layout
    predict_index: Int[Tensor, " N"]
    target_ids: Int[Tensor, " N"]


def pack(groups: Sequence[Group], device: torch.device | str = "cpu") -> Packed:
    """The groups laid flat, with positions and the index of what predicts each response token.

    >>> from grpo_rl.testing import random_group
    >>> packed = pack([random_group(prompt=2, lengths=[1, 2])])
    >>> packed.position_ids.tolist(), packed.predict_index.tolist()
    ([0, 1, 2, 2, 3], [1, 1, 3])
    """
    ids, positions, predict, spans = [], [], [], []
    cursor = 0
    for group in groups:
        prompt = len(group.prompt_ids)
        prompt_end = cursor + prompt
        edges = (group.offsets + prompt_end).tolist()
        ids += [group.prompt_ids, group.response_ids]
        positions.append(torch.arange(prompt))
        for start, end in zip(edges, edges[1:], strict=False):
            positions.append(torch.arange(prompt, prompt + end - start))
            if end > start:
                # The first token of every answer is predicted by the last token of the prompt they share.
                predict += [torch.tensor([prompt_end - 1]), torch.arange(start, end - 1)]
        spans.append(Span(cursor, prompt_end, tuple(edges)))
        cursor = edges[-1]
    return Packed(
        input_ids=torch.cat(ids).to(device),
        position_ids=torch.cat(positions).to(device),
        layout=Layout.of(spans),
        predict_index=(torch.cat(predict) if predict else torch.empty(0, dtype=torch.long)).to(device),
        target_ids=torch.cat([group.response_ids for group in groups]).to(device),
    )


def forward_hidden(model: PreTrainedModel, packed: Packed) -> Float[Tensor, "N E"]:
    """Hidden states (after the final norm) that predict each response token.

    Raises:
        ValueError: the model's attention was not set by :func:`use_shared_prefix`.
    """
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ValueError("call use_shared_prefix(model) first: its attention does not know shared prefixes")
    hidden = model.base_model(
        input_ids=packed.input_ids[None],
        position_ids=packed.position_ids[None],
        use_cache=False,
        prefix_layout=packed.layout,
    ).last_hidden_state[0]
    return hidden[packed.predict_index]


def use_shared_prefix(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its attention switched to shared prefixes.

    Raises:
        ValueError: the model needs what this attention does not compute (a sliding window, soft-capped scores).
    """
    config = model.config.get_text_config()
    # Models with a window switched off still carry its width; only a layer that uses it is refused.
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"{type(model).__name__} has layers of type {sorted(kinds - {'full_attention'})}; "
            "shared-prefix attention supports full_attention only"
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(f"{type(model).__name__} soft-caps its attention scores, which is not supported")
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def attention(
    module: torch.nn.Module,
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 K T D"],
    value: Float[Tensor, "1 K T D"],
    attention_mask: None,
    *,
    prefix_layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Float[Tensor, "1 T H D"], None]:
    """Attention of a flat micro-batch with shared prompts, in transformers' attention-function signature."""
    if dropout or sliding_window or softcap:
        raise ValueError(
            f"shared-prefix attention has no dropout ({dropout}), sliding window ({sliding_window}) "
            f"or soft cap ({softcap})"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.device.type == "cpu":
        out = _TwoPartAttention.apply(query, key, value, prefix_layout, scale)
    else:
        out = torch.cat([_masked(query, key, value, span, scale) for span in prefix_layout.spans], dim=2)
    return out.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attention)


def _masked(query: Tensor, key: Tensor, value: Tensor, span: Span, scale: float) -> Tensor:
    """One group by a boolean mask over its own tokens, for devices whose kernels return no log-sum-exp here."""
    part = slice(span.start, span.end)
    position = torch.arange(span.start, span.end, device=query.device)
    edges = torch.tensor(span.edges, device=query.device)
    answer = torch.searchsorted(edges, position, right=True)  # 0 on the prompt, g + 1 on answer g
    same = (answer[:, None] == answer[None, :]) | (answer[None, :] == 0)
    mask = same & (position[:, None] >= position[None, :])
    return scaled_dot_product_attention(
        query[:, :, part],
        key[:, :, part],
        value[:, :, part],
        attn_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _TwoPartAttention(torch.autograd.Function):
    """Answers attend to the prompt in one call and to themselves in another; a log-sum-exp joins the two exactly.

    Softmax over two sets of keys is the mean of the two softmaxes weighted by their partition sums, and the flash
    backward of each part is right as it stands when it is given the joint output and the joint log-sum-exp.
    Source of the identity: Ring Attention, https://arxiv.org/abs/2310.01889; Hydragen, https://arxiv.org/abs/2402.05099.
    """

    @staticmethod
    def forward(ctx, query, key, value, layout, scale):
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        repeat = query.shape[1] // key.shape[1]
        for span in layout.spans:
            prompt, answers = slice(span.start, span.prompt_end), slice(span.prompt_end, span.end)
            out[:, :, prompt], lse[:, :, prompt] = _flash(
                query[:, :, prompt],
                _heads(key[:, :, prompt], repeat),
                _heads(value[:, :, prompt], repeat),
                0.0,
                True,
                scale=scale,
            )
            if span.end > span.prompt_end:
                shared_out, shared_lse = _flash(
                    _fold(query[:, :, answers], repeat), key[:, :, prompt], value[:, :, prompt], 0.0, False, scale=scale
                )
                out[:, :, answers] = shared_out.reshape(out[:, :, answers].shape)
                lse[:, :, answers] = shared_lse.reshape(lse[:, :, answers].shape)
        for table in layout.tables:
            own_out, own_lse = _flash(
                _take(query, table),
                _heads(_take(key, table), repeat),
                _heads(_take(value, table), repeat),
                0.0,
                True,
                scale=scale,
            )
            shared_out, shared_lse = _take(out, table), _take(lse, table)
            joint = torch.logaddexp(own_lse, shared_lse)
            joined = torch.lerp(
                own_out.to(joint.dtype), shared_out.to(joint.dtype), (shared_lse - joint).exp()[..., None]
            )
            _put(out, table, joined.to(out.dtype))
            _put(lse, table, joint)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx, grad_out):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, lse = ctx.saved_tensors
        repeat = query.shape[1] // key.shape[1]
        grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
        for table in ctx.layout.tables:
            # Rows past an answer's end are repeats: without a gradient they add nothing.
            grads = _flash_backward(
                _take(grad_out, table) * table.valid[:, None, :, None],
                _take(query, table),
                _heads(_take(key, table), repeat),
                _heads(_take(value, table), repeat),
                _take(out, table),
                _take(lse, table),
                0.0,
                True,
                scale=ctx.scale,
            )
            _put(grad_query, table, grads[0])
            _put(grad_key, table, _sum_heads(grads[1], repeat))
            _put(grad_value, table, _sum_heads(grads[2], repeat))
        for span in ctx.layout.spans:
            prompt, answers = slice(span.start, span.prompt_end), slice(span.prompt_end, span.end)
            grads = _flash_backward(
                grad_out[:, :, prompt],
                query[:, :, prompt],
                _heads(key[:, :, prompt], repeat),
                _heads(value[:, :, prompt], repeat),
                out[:, :, prompt],
                lse[:, :, prompt],
                0.0,
                True,
                scale=ctx.scale,
            )
            grad_query[:, :, prompt] = grads[0]
            grad_key[:, :, prompt] = _sum_heads(grads[1], repeat)
            grad_value[:, :, prompt] = _sum_heads(grads[2], repeat)
            if span.end > span.prompt_end:
                folded = [_fold(x[:, :, answers], repeat) for x in (grad_out, query, out, lse)]
                grads = _flash_backward(
                    folded[0],
                    folded[1],
                    key[:, :, prompt],
                    value[:, :, prompt],
                    folded[2],
                    folded[3],
                    0.0,
                    False,
                    scale=ctx.scale,
                )
                grad_query[:, :, answers] += grads[0].reshape(query[:, :, answers].shape)
                grad_key[:, :, prompt] += grads[1]
                grad_value[:, :, prompt] += grads[2]
        return grad_query, grad_key, grad_value, None, None


def _take(x: Tensor, table: Table) -> Tensor:
    """[1, H, T, ...] -> [B, H, L, ...] at the table's positions."""
    return x[0][:, table.index].transpose(0, 1).contiguous()


def _put(x: Tensor, table: Table, rows: Tensor) -> None:
    """The inverse of :func:`_take`, in place, real tokens only."""
    x[0][:, table.where] = rows.transpose(0, 1)[:, table.valid]


def _heads(x: Float[Tensor, "B K L D"], repeat: int) -> Float[Tensor, "B H L D"]:
    return x.repeat_interleave(repeat, dim=1) if repeat > 1 else x


def _sum_heads(x: Float[Tensor, "B H L D"], repeat: int) -> Float[Tensor, "B K L D"]:
    return x.unflatten(1, (-1, repeat)).sum(2) if repeat > 1 else x


def _fold(x: Tensor, repeat: int) -> Tensor:
    """[1, H, L, ...] -> [1, K, repeat * L, ...]: without a causal mask, heads that share keys are just more queries."""
    return x.unflatten(1, (-1, repeat)).flatten(2, 3).contiguous()
