"""Shared-prefix attention: the prompt of a group is computed once, and each answer attends to it and to itself.

Tokens of a micro-batch lie flat, group after group: prompt, answer 1, …, answer G, next prompt, … No padding.
Letters: T tokens of the micro-batch, N response tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_rl.data.group import Group
from grpo_rl.policies.attention_cpu import Arrangement, Rules, TwoPartAttention
from grpo_rl.policies.attention_flex import PaddedLayout, flex_in_layer, flex_shared_prefix, whole_blocks
from grpo_rl.policies.mode import check_no_noise, switch_off_noise
from grpo_rl.policies.supported import LAYOUT, not_understood, windows_in_masks

ATTENTION_NAME = "grpo_rl_shared_prefix"
"""The name under which transformers models find the attention below (``config._attn_implementation``)."""
MASK_WINDOW = "grpo_rl_mask_window"
"""The attribute of an attention module whose window transformers draws into the mask alone."""

WINDOWS = "grpo_rl_windows"
"""The attribute of a model whose layers are compiled on CUDA: the windows that they ask for."""


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

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Borders of the prompt and of every answer that is not empty."""
        answers = zip(self.edges, self.edges[1:], strict=False)
        return ((self.start, self.prompt_end), *((start, end) for start, end in answers if end > start))

    @functools.cached_property
    def positions(self) -> Int[Tensor, " T"]:
        """Position of each token: an answer's go on from its prompt's.

        >>> Span(0, 2, (2, 3, 5)).positions.tolist()
        [0, 1, 2, 2, 3]
        """
        prompt = self.prompt_end - self.start
        answers = zip(self.edges, self.edges[1:], strict=False)
        return torch.cat(
            [torch.arange(prompt), *(torch.arange(prompt, prompt + end - start) for start, end in answers)]
        )


@dataclass(frozen=True)
class Layout:
    """What attention has to know of a micro-batch; made once, read by every layer."""

    spans: tuple[Span, ...]
    _arrangements: dict[tuple[int, int], Arrangement] = field(default_factory=dict, repr=False, compare=False)

    def arrangement(self, heads: int, kv_heads: int) -> Arrangement:
        """The sequences as tables, for so many heads."""
        if (heads, kv_heads) not in self._arrangements:
            self._arrangements[heads, kv_heads] = Arrangement.of(self.spans, heads, kv_heads)
        return self._arrangements[heads, kv_heads]


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
        prompt_end = cursor + len(group.prompt_ids)
        edges = (group.offsets + prompt_end).tolist()
        ids += [group.prompt_ids, group.response_ids]
        for start, end in zip(edges, edges[1:], strict=False):
            if end > start:
                # The first token of every answer is predicted by the last token of the prompt they share.
                predict += [torch.tensor([prompt_end - 1]), torch.arange(start, end - 1)]
        spans.append(Span(cursor, prompt_end, tuple(edges)))
        positions.append(spans[-1].positions)
        cursor = edges[-1]
    return Packed(
        input_ids=torch.cat(ids).to(device),
        position_ids=torch.cat(positions).to(device),
        layout=Layout(tuple(spans)),
        predict_index=(torch.cat(predict) if predict else torch.empty(0, dtype=torch.long)).to(device),
        target_ids=torch.cat([group.response_ids for group in groups]).to(device),
    )


def forward_hidden(model: PreTrainedModel, packed: Packed) -> Float[Tensor, "N E"]:
    """Hidden states (after the final norm) that predict each response token.

    Raises:
        ValueError: the model's attention was not set by :func:`use_shared_prefix`, or its mode was changed since.
    """
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ValueError("call use_shared_prefix(model) first: its attention does not know shared prefixes")
    check_no_noise(model)
    ids, positions, layout = packed.input_ids, packed.position_ids, packed.layout
    if windows := getattr(model, WINDOWS, None):
        tokens = whole_blocks(len(ids))
        ids, positions = (pad(x, (0, tokens - len(x))) for x in (ids, positions))
        layout = PaddedLayout.of(layout, tokens, windows, ids.device)
    hidden = model.base_model(
        input_ids=ids[None],
        position_ids=positions[None],
        use_cache=False,
        **{LAYOUT: layout},
    ).last_hidden_state[0]
    return hidden[packed.predict_index]


def use_shared_prefix(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its attention switched to shared prefixes, and its noise off (`switch_off_noise`).

    Raises:
        ValueError: the model would be scored wrongly, or keeps an attention of its own.
    """
    windows = windows_in_masks(model)
    model.set_attn_implementation(ATTENTION_NAME)
    assert model.config._attn_implementation == ATTENTION_NAME, model.config._attn_implementation
    for name, window in windows.items():
        setattr(model.get_submodule(name), MASK_WINDOW, window)
    return switch_off_noise(model)


@no_type_check  # traced: the tests' run-time type checks can't be
def dispatch(module, query, key, value, attention_mask, **keywords):
    """The attention that transformers calls: within a layer that is compiled on CUDA part of its graph."""
    layout = keywords[LAYOUT]
    if not isinstance(layout, PaddedLayout):
        return attention(module, query, key, value, attention_mask, **keywords)
    window = keywords.get("sliding_window") or getattr(module, MASK_WINDOW, None)
    scale = keywords.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = flex_in_layer(query, key, value, layout, scale, window, keywords.get("softcap"))
    return out.transpose(1, 2), None


@torch.compiler.disable
def attention(
    module: torch.nn.Module,
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 K T D"],
    value: Float[Tensor, "1 K T D"],
    attention_mask: object,
    *,
    prefix_layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **keywords: object,
) -> tuple[Float[Tensor, "1 T H D"], None]:
    """Attention of a flat micro-batch with shared prompts, in transformers' attention-function signature.

    Raises:
        ValueError: a layer asks for something that this attention has not. `windows_in_masks` finds that out before.
    """
    unknown = not_understood(keywords)
    if dropout or unknown or attention_mask is not None or query.shape[-1] != value.shape[-1]:
        raise ValueError(
            f"{type(module).__name__} asks for {', '.join(unknown) or 'dropout, a mask or values of another size'}, "
            "which shared-prefix attention has not"
        )
    sliding_window = sliding_window or getattr(module, MASK_WINDOW, None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.device.type == "cuda":
        out = flex_shared_prefix(query, key, value, prefix_layout, scale, sliding_window, softcap)
        return out.transpose(1, 2), None
    # [1, heads, T, D] in shape, but laid out by token: this way nothing is copied.
    by_token = (x[0].transpose(0, 1) for x in (query, key, value))
    return TwoPartAttention.apply(*by_token, prefix_layout, Rules(scale, sliding_window, softcap))[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, dispatch)
