"""A micro-batch of groups as one flat sequence in which what responses begin with in common stands once.

Prompts, a system message before several of them, the first words of responses: the micro-batch is a tree of nodes, laid
flat with every node's descendants right behind it. No padding.

Letters: T tokens of the micro-batch, N response tokens, M of them that differ, S tokens of the groups laid end to end,
L decoder layers, K experts of a token.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from grpo_rl.data.batching import Branch, Ids, prefix_tree
from grpo_rl.data.group import NO_ROUTE, Group

LAYOUT = "prefix_layout"
"""The keyword that passes the layout of a micro-batch through a model to its layers."""
NODE_COST = 8
"""Tokens that could be computed in the time that one more node takes."""
ROWS_PER_TOKEN = 32
"""Tokens that have one more part of their attention joined in the time that computing one token takes."""

ROUTES = "routes"
"""Key of a layout's cache: each flat token's experts by decoder layer, [T, L, K], where a sampler's are replayed."""


@dataclass(frozen=True)
class Node:
    """Tokens at [start, end) that have the same tokens before them; descendants, which see them, at [end, until).

    Args:
        position: of the first token.
        parent: index of the node that this one continues; -1 for a root.
    """

    start: int
    end: int
    until: int
    position: int
    parent: int


@dataclass(frozen=True)
class Layout:
    """The nodes of a micro-batch, parents before their children; built once, read by the attention of every layer."""

    nodes: tuple[Node, ...]
    cache: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    """Index tables that an attention implementation derives from the nodes and shares between layers."""

    @property
    def tokens(self) -> int:
        """T."""
        return self.nodes[-1].end

    @functools.cached_property
    def positions(self) -> Int[Tensor, " T"]:
        """Position of each token; a node continues the positions of its parent.

        >>> Layout((Node(0, 2, 5, 0, -1), Node(2, 3, 3, 2, 0), Node(3, 5, 5, 2, 0))).positions.tolist()
        [0, 1, 2, 2, 3]
        """
        return torch.cat([torch.arange(n.position, n.position + n.end - n.start) for n in self.nodes])

    def in_chunks(self, size: int) -> tuple[Int[Tensor, " T"], Layout]:
        """The order of tokens, and their layout in it, in which no token sees one of another chunk of its sequence.

        Nodes are cut where a chunk of ``size`` ends. Source: Llama 4's chunked attention, transformers' masking_utils.

        Two prompt tokens, and responses of one and three; the last token of all is in the second chunk:

        >>> whole = Layout((Node(0, 2, 6, 0, -1), Node(2, 3, 3, 2, 0), Node(3, 6, 6, 2, 0)))
        >>> order, cut = whole.in_chunks(4)
        >>> order.tolist(), [(node.start, node.until, node.position) for node in cut.nodes]
        ([0, 1, 2, 3, 4, 5], [(0, 5, 0), (2, 3, 2), (3, 5, 2), (5, 6, 4)])
        """
        if (known := self.cache.get(("chunks", size))) is not None:
            return known
        pieces: list[Node] = []
        last: list[int] = []  # each node's last piece
        for node in self.nodes:
            before, start, position = last[node.parent] if node.parent >= 0 else -1, node.start, node.position
            while start < node.end:
                end = min(node.end, start + size - position % size)
                pieces.append(Node(start, end, end, position, before if position % size else -1))
                before, position, start = len(pieces) - 1, position + end - start, end
            last.append(before)
        children: dict[int, list[int]] = {}
        for i, piece in enumerate(pieces):
            children.setdefault(piece.parent, []).append(i)
        nodes: list[Node] = []
        cursor, order, waiting = 0, [], [(i, -1) for i in reversed(children[-1])]
        while waiting:
            i, parent = waiting.pop()
            waiting += [(child, len(nodes)) for child in reversed(children.get(i, ()))]
            piece = pieces[i]
            order.append(torch.arange(piece.start, piece.end))
            end = cursor + piece.end - piece.start
            nodes.append(Node(cursor, end, end, piece.position, parent))
            cursor = end
        self.cache["chunks", size] = made = torch.cat(order), Layout(_with_descendants(nodes))
        return made


@dataclass(frozen=True)
class Packed:
    """A micro-batch of groups as one flat sequence.

    Args:
        input_ids: [T] tokens of the nodes.
        position_ids: [T] each token's position in its sequence.
        layout: where nodes lie.
        predict_index: [M] position whose hidden state predicts a response token.
        target_ids: [M] the response tokens that differ, or have different tokens before them.
        row: [N] which of the M each response token is, in the groups' own order; None: each is one of its own.
    """

    input_ids: Int[Tensor, " T"]
    position_ids: Int[Tensor, " T"]
    layout: Layout
    predict_index: Int[Tensor, " M"]
    target_ids: Int[Tensor, " M"]
    row: Int[Tensor, " N"] | None = None

    def by_token(self, values: Tensor) -> Tensor:
        """Values of the M rows, [M, ...], for each of the N response tokens, [N, ...]."""
        return values if self.row is None else values[self.row]


def pack(groups: Sequence[Group], device: torch.device | str = "cpu") -> Packed:
    """The groups as a tree laid flat, with the index of the state that predicts each response token.

    A group's prompt stands once; so does whatever else sequences begin with in common, where it is long enough to be
    worth a node.

    >>> from grpo_rl.testing import random_group
    >>> packed = pack([random_group(prompt=2, lengths=[1, 2])])
    >>> packed.position_ids.tolist(), packed.predict_index.tolist()
    ([0, 1, 2, 2, 3], [1, 1, 3])
    """
    all_ids = torch.cat([ids for group in groups for ids in (group.prompt_ids, group.response_ids)]).cpu()
    places, group_of = _places(groups)
    ids = [all_ids.numpy()[place] for place in places]

    def worth(branch: Branch) -> bool:
        length, members = branch.stop - branch.start, branch.members
        if branch.start and length == 1:
            return False  # layers with a state step a single token in place, without a gradient
        for g, count in Counter(group_of[member] for member in members).items():
            if count == groups[g].size > 1 and branch.start < len(groups[g].prompt_ids) <= branch.stop:
                return True
        below = sum(len(ids[member]) - branch.stop for member in members)
        return length * (len(members) - 1) > NODE_COST + below / ROWS_PER_TOKEN

    nodes, source, flat = _laid_flat(prefix_tree(ids, worth), places)
    prompts = [len(groups[g].prompt_ids) for g in group_of]
    own = np.concatenate([x[prompt:] for x, prompt in zip(flat, prompts, strict=True)])
    before = np.concatenate([x[prompt - 1 : -1] for x, prompt in zip(flat, prompts, strict=True)])
    distinct, first, row = np.unique(own, return_index=True, return_inverse=True)
    if len(distinct) < len(own):
        own, before = distinct, before[first]
    else:
        row = None
    layout = Layout(nodes)
    if (routes := flat_routes(groups)) is not None:
        layout.cache[ROUTES] = routes[_with_a_route(source, flat, places, routes)].to(device)
    return Packed(
        input_ids=all_ids[source].to(device),
        position_ids=layout.positions.to(device),
        layout=layout,
        predict_index=torch.from_numpy(before).to(device),
        target_ids=all_ids[source[own]].to(device),
        row=None if row is None else torch.from_numpy(row).to(device),
    )


def _places(groups: Sequence[Group]) -> tuple[list[Ids], list[int]]:
    """The places of each sequence's tokens among the groups laid end to end, and the index of its group."""
    places, group_of, start = [], [], 0
    for g, group in enumerate(groups):
        end = start + len(group.prompt_ids)
        prompt, responses = np.arange(start, end), np.arange(end, start + group.num_tokens)
        places += [np.concatenate([prompt, own]) for own in np.split(responses, group.offsets[1:-1].tolist())]
        group_of += [g] * group.size
        start += group.num_tokens
    return places, group_of


def _laid_flat(root: Branch, places: Sequence[Ids]) -> tuple[tuple[Node, ...], Ids, list[Ids]]:
    """The tree's nodes, what each token was read from, and where each sequence's tokens are."""
    nodes: list[Node] = []
    source, flat = [], [np.empty_like(place) for place in places]
    cursor, waiting = 0, [(child, -1) for child in reversed(root.children)]
    while waiting:
        branch, parent = waiting.pop()
        waiting += [(child, len(nodes)) for child in reversed(branch.children)]
        tokens = slice(branch.start, branch.stop)
        end = cursor + branch.stop - branch.start
        for member in branch.members:
            flat[member][tokens] = np.arange(cursor, end)
        source.append(places[branch.members[0]][tokens])
        nodes.append(Node(cursor, end, end, branch.start, parent))
        cursor = end
    return _with_descendants(nodes), np.concatenate(source), flat


def _with_descendants(nodes: list[Node]) -> tuple[Node, ...]:
    """The nodes with ``until`` behind the last descendant of each."""
    for node in reversed(nodes):
        if node.parent >= 0:
            parent = nodes[node.parent]
            nodes[node.parent] = replace(parent, until=max(parent.until, node.until))
    return tuple(nodes)


def _with_a_route(source: Ids, flat: Sequence[Ids], places: Sequence[Ids], routes: Int[Tensor, "S L K"]) -> Ids:
    """The place that each token was read from, in the first of its sequences whose sampler computed it.

    A response's last token was sampled there, and not computed; in a sequence that goes on it was.
    """
    tokens, read = np.concatenate(flat), np.concatenate(places)
    known = (routes != NO_ROUTE).flatten(1).any(1).numpy()[read]
    chosen = source.copy()
    chosen[tokens[known][::-1]] = read[known][::-1]  # of several, the last that is written stays
    return chosen


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
