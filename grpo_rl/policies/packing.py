"""A micro-batch of groups as one flat sequence: group after group, prompt, response 1, …, response G. No padding.

Letters: T tokens of the micro-batch, N response tokens, L decoder layers, K experts of a token.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from grpo_rl.data.group import NO_ROUTE, Group

LAYOUT = "prefix_layout"
"""The keyword that passes the layout of a micro-batch through a model to its layers."""

ROUTES = "routes"
"""Key of a layout's cache: each flat token's experts by decoder layer, [T, L, K], where a sampler's are replayed."""


@dataclass(frozen=True)
class Span:
    """One group's place in the flat micro-batch: prompt at [start, prompt_end), responses at [prompt_end, end)."""

    start: int
    prompt_end: int
    edges: tuple[int, ...]
    """Borders of the responses; response g is at [edges[g], edges[g + 1]). Empty responses have equal borders."""

    @property
    def end(self) -> int:
        return self.edges[-1]

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Borders of the prompt and of every response that is not empty."""
        responses = zip(self.edges, self.edges[1:], strict=False)
        return ((self.start, self.prompt_end), *((start, end) for start, end in responses if end > start))

    @functools.cached_property
    def positions(self) -> Int[Tensor, " T"]:
        """Position of each token; every response continues the positions of the prompt.

        >>> Span(0, 2, (2, 3, 5)).positions.tolist()
        [0, 1, 2, 2, 3]
        """
        prompt = self.prompt_end - self.start
        responses = (torch.arange(prompt, prompt + end - start) for start, end in self.sequences[1:])
        return torch.cat([torch.arange(prompt), *responses])


@dataclass(frozen=True)
class Layout:
    """The places of a micro-batch's groups; built once, read by the attention of every layer."""

    spans: tuple[Span, ...]
    cache: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    """Index tables that an attention implementation derives from the spans and shares between layers."""


@dataclass(frozen=True)
class Packed:
    """A micro-batch of groups as one flat sequence.

    Args:
        input_ids: [T] every prompt once, then its responses.
        position_ids: [T] every response continues the positions of its prompt.
        layout: where groups and responses lie.
        predict_index: [N] position whose hidden state predicts each response token.
        target_ids: [N] the response tokens, in the groups' own order.
    """

    input_ids: Int[Tensor, " T"]
    position_ids: Int[Tensor, " T"]
    layout: Layout
    predict_index: Int[Tensor, " N"]
    target_ids: Int[Tensor, " N"]


def pack(groups: Sequence[Group], device: torch.device | str = "cpu") -> Packed:
    """The groups laid flat, with positions and the index of the state that predicts each response token.

    >>> from grpo_rl.testing import random_group
    >>> packed = pack([random_group(prompt=2, lengths=[1, 2])])
    >>> packed.position_ids.tolist(), packed.predict_index.tolist()
    ([0, 1, 2, 2, 3], [1, 1, 3])
    """
    ids, positions, predict, spans = [], [], [], []
    cursor = 0
    for group in groups:
        prompt_end = cursor + len(group.prompt_ids)
        span = Span(cursor, prompt_end, tuple((group.offsets + prompt_end).tolist()))
        ids += [group.prompt_ids, group.response_ids]
        for start, end in span.sequences[1:]:
            # The first token of every response is predicted by the last token of the prompt they share.
            predict += [torch.tensor([prompt_end - 1]), torch.arange(start, end - 1)]
        spans.append(span)
        positions.append(span.positions)
        cursor = span.end
    layout = Layout(tuple(spans))
    if (routes := flat_routes(groups)) is not None:
        layout.cache[ROUTES] = routes.to(device)
    return Packed(
        input_ids=torch.cat(ids).to(device),
        position_ids=torch.cat(positions).to(device),
        layout=layout,
        predict_index=(torch.cat(predict) if predict else torch.empty(0, dtype=torch.long)).to(device),
        target_ids=torch.cat([group.response_ids for group in groups]).to(device),
    )


def flat_routes(groups: Sequence[Group]) -> Int[Tensor, "T L K"] | None:
    """The sampler's experts of each group's prompt and responses, one group after the other; None where none has any.

    Tokens of groups without any are left to the router.
    """
    some = next((group.routes for group in groups if group.routes is not None), None)
    if some is None:
        return None
    parts = []
    for group in groups:
        for routes, tokens in ((group.prompt_routes, group.prompt_ids), (group.routes, group.response_ids)):
            parts.append(some.new_full((len(tokens), *some.shape[1:]), NO_ROUTE) if routes is None else routes)
    return torch.cat(parts)


def bucket(length: int) -> int:
    """The length rounded up to one of 16, 24, 32, 48, 64, 96, …: at most a third of the rounded length is padding.

    >>> [bucket(n) for n in (3, 17, 33, 100)]
    [16, 24, 48, 128]
    """
    power = max(16, 1 << (length - 1).bit_length())
    return power * 3 // 4 if power > 16 and length <= power * 3 // 4 else power
