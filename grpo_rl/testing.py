"""Small real objects for tests, doctests and users who test their own parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_rl.rollout import Group


def random_group(
    prompt: int = 4,
    lengths: Sequence[int] = (3, 2),
    vocab: int = 32,
    group_id: int = 0,
    seed: int = 0,
    rewards: Sequence[float] | None = None,
) -> Group:
    """A group of random ids with the given prompt length and answer lengths.

    >>> random_group(lengths=[1, 2, 0]).lengths.tolist()
    [1, 2, 0]
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    return Group(
        group_id=group_id,
        row=group_id,
        prompt_ids=torch.randint(vocab, (prompt,), generator=generator),
        response_ids=torch.randint(vocab, (tokens,), generator=generator),
        log_probs=-torch.rand(tokens, generator=generator) * 3,
        versions=torch.zeros(tokens, dtype=torch.long),
        trainable=torch.ones(tokens, dtype=torch.bool),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        rewards=torch.rand(len(lengths), generator=generator) if rewards is None else torch.tensor(rewards),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
    )
