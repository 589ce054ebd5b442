"""Credit within conversations, by turns of a group that follow the same reply. Letters: G responses, R tokens."""

import re
from collections import defaultdict
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_rl.data.group import Group
from grpo_rl.losses.advantage import group_advantages

_TURN = re.compile(r"(?:^|/)turn_reward_(\d+)$")
"""A measure that is a turn's reward; in a mixture its task's name is before it."""


def turn_advantages(
    group: Group, rewards: Float[Tensor, " G"], discount: float, kind: Callable[..., Any] | str = "zscore"
) -> Float[Tensor, " R"]:
    r"""Advantage of each turn's tokens among all turns of the group behind the same reply; 0 where there is no other.

    A turn's return is its reward, and those of the turns to come times $\gamma$ for each turn until then. The last turn
    has the response's reward and the others none, unless the task gives the rewards of turns, as the measures
    ``turn_reward_0``, ``turn_reward_1`` and so on. The first turns, behind the prompt, are compared with one another.

    Source: GiGPO, https://arxiv.org/abs/2505.10978, eq. 6 to 8, whose anchor states are the replies here.

    Args:
        discount: gamma.
        kind: of the advantage, from the returns of one state, see `grpo_rl.losses.advantage.group_advantages`.

    Two conversations of two turns with one reply, 9; returns are 1/2 and 0, then 1 and 0:

    >>> from grpo_rl.testing import random_group
    >>> from dataclasses import replace
    >>> group = random_group(lengths=[3, 3], rewards=[1.0, 0.0])
    >>> replied = torch.tensor([True, False, True, True, False, True])
    >>> group = replace(group, response_ids=torch.tensor([1, 9, 2, 3, 9, 4]), trainable=replied)
    >>> turn_advantages(group, group.rewards, discount=0.5, kind="no_std")
    tensor([ 0.2500,  0.0000,  0.5000, -0.2500,  0.0000, -0.5000])
    """
    states: dict[tuple[int, ...], list[tuple[slice, float]]] = defaultdict(list)
    given = {int(found[1]): values for name, values in group.measures.items() if (found := _TURN.search(name))}
    for g, (start, end) in enumerate(pairwise(group.offsets.tolist())):
        chosen, ids = group.trainable[start:end].tolist(), group.response_ids[start:end].tolist()
        turns: list[tuple[tuple[int, ...], slice]] = []
        reply: tuple[int, ...] = ()
        for own, run in groupby(range(end - start), key=chosen.__getitem__):
            places = list(run)
            if own:
                turns.append((reply, slice(start + places[0], start + places[-1] + 1)))
            else:
                reply = tuple(ids[place] for place in places)
        value = 0.0 if given else float(rewards[g]) / discount
        for i, (state, span) in reversed([*enumerate(turns)]):
            value = discount * value + (float(given[i][g].nan_to_num()) if i in given else 0.0)
            states[state].append((span, value))
    advantages = torch.zeros(len(group.response_ids))
    for turns_of_state in states.values():
        if len(turns_of_state) > 1:
            returns = torch.tensor([value for _, value in turns_of_state])
            for (span, _), advantage in zip(turns_of_state, group_advantages(returns[None], kind)[0], strict=True):
                advantages[span] = advantage
    return advantages
