"""The tree of what sequences of tokens begin with in common: no branch's tokens need to be computed twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Integer

Ids = Integer[np.ndarray, "_"]
"""Tokens of a sequence, or their places; each sequence has a length of its own."""


@dataclass(eq=False)
class Branch:
    """Tokens from ``start`` up to ``stop`` of all ``members``, which are equal up to there.

    Args:
        members: indices of sequences, in ascending order.
        children: branches that go on from here, in the order of their first members.
    """

    start: int
    stop: int
    members: list[int]
    children: list[Branch] = field(default_factory=list)

    def __iter__(self) -> Iterator[Branch]:
        """The branch, then each child's whole tree."""
        waiting = [self]
        while waiting:
            branch = waiting.pop()
            yield branch
            waiting += reversed(branch.children)


def prefix_tree(sequences: Sequence[Ids], worth: Callable[[Branch], bool] | None = None) -> Branch:
    """The tree of the sequences; its root has no tokens, and all of them as members.

    Args:
        worth: True if several sequences' common tokens become a branch; those of a refused branch are left to
            each of its children. It reads all but ``children``. None: all do.

    >>> root = prefix_tree([np.array(ids) for ids in ([1, 2, 3], [1, 2, 4, 5], [7], [1, 2, 3])])
    >>> [(branch.start, branch.stop, branch.members) for branch in root if branch.stop]
    [(0, 2, [0, 1, 3]), (2, 3, [0, 3]), (2, 4, [1]), (0, 1, [2])]
    """
    root = Branch(0, 0, list(range(len(sequences))))
    # Sorted, the sequences that begin alike lie side by side; bytes in this order sort as the numbers do.
    keys = [ids.astype(">u4").tobytes() for ids in sequences]
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    shared = [common_length(sequences[a], sequences[b]) for a, b in zip(order, order[1:], strict=False)]
    waiting = [(root, 0, len(order))]
    while waiting:
        parent, first, last = waiting.pop()
        borders = shared[first : last - 1]
        stop = min(borders) if borders else len(sequences[order[first]]) if first < last else 0
        branch = Branch(parent.stop, stop, sorted(order[first:last]))
        if stop > parent.stop and (not borders or worth is None or worth(branch)):
            parent.children.append(branch)
            parent = branch
        if borders:
            cuts = [first, *(first + i + 1 for i, length in enumerate(borders) if length == stop), last]
            waiting += [(parent, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    for branch in root:
        branch.children.sort(key=lambda child: child.members)
    return root


def common_length(a: Ids, b: Ids) -> int:
    """The number of tokens that two sequences begin with in common."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
