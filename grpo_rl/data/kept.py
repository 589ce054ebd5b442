"""Kept sets: the ids that the sampler could draw from at each token, where top-k, top-p or min-p cut the others off.

Letters: N tokens, K ids of all their kept sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Kept:
    """The kept sets of N tokens, flat.

    Args:
        ids: [K] int32, token after token.
        counts: [N] int64, ids of each token's set; 0: nothing was cut off, or nothing was sampled (a tool's output).
    """

    ids: Int[Tensor, " K"]
    counts: Int[Tensor, " N"]

    @classmethod
    def from_lists(cls, sets: Sequence[Sequence[int]]) -> Kept:
        """The kept sets from one list per token.

        >>> kept = Kept.from_lists([[4, 7], [], [1]])
        >>> kept.ids.tolist(), kept.counts.tolist()
        ([4, 7, 1], [2, 0, 1])
        """
        ids = torch.from_numpy(np.fromiter(chain.from_iterable(sets), np.int32))
        return cls(ids, torch.tensor([len(of_token) for of_token in sets], dtype=torch.long))

    @classmethod
    def joined(cls, parts: Iterable[tuple[Kept | None, int]]) -> Kept | None:
        """The kept sets of several pieces, one after the other; None where no piece has any.

        Args:
            parts: the kept sets of each piece, if it has any, and its number of tokens.
        """
        parts = list(parts)
        if all(kept is None for kept, _ in parts):
            return None
        counts = [torch.zeros(tokens, dtype=torch.long) if kept is None else kept.counts for kept, tokens in parts]
        return cls(torch.cat([kept.ids for kept, _ in parts if kept is not None]), torch.cat(counts))

    def where(self, tokens: Bool[Tensor, " N"]) -> Kept:
        """The kept sets of the chosen tokens alone.

        >>> Kept.from_lists([[4, 7], [], [1]]).where(torch.tensor([False, True, True])).ids.tolist()
        [1]
        """
        return Kept(self.ids[tokens.repeat_interleave(self.counts)], self.counts[tokens])

    def to(self, device: torch.device | str) -> Kept:
        """The same on a device."""
        return Kept(self.ids.to(device), self.counts.to(device))
