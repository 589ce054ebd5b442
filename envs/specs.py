"""The TorchRL specs of a batch of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrl.data import Bounded, Categorical, Composite, NonTensor, StackedComposite, Unbounded

from grpo_rl.data import keys
from grpo_rl.envs.chat import Dialog

DONE = ("done", "terminated", "truncated")


def row_specs(
    rows: int, vocabulary: int, reward_parts: Sequence[str]
) -> tuple[StackedComposite, StackedComposite, Composite, Composite]:
    """The specs of observations, actions, rewards and ends, by the keys of `grpo_rl.data.keys`.

    Rows differ in length, so that those of tokens are stacked lazily: one dense spec would ask to stack them.
    """
    number, flag = Unbounded((1,), dtype=torch.long), Categorical(2, (rows, 1), dtype=torch.bool)
    observation = {
        keys.QUERY: NonTensor(shape=(), example_data="a question"),
        keys.HISTORY: NonTensor(shape=(), example_data=Dialog([])),
        keys.TOKENS_PROMPT[0]: Composite({keys.TOKENS_PROMPT[1]: Unbounded((-1,), dtype=torch.long)}),
        keys.GROUP_ID: number,
        keys.ROW: number.clone(),
        keys.FAILED: Categorical(2, (1,), dtype=torch.bool),
    }
    response = Bounded(0, vocabulary - 1, (-1,), dtype=torch.long)
    action = {keys.TOKENS_RESPONSE[0]: Composite({keys.TOKENS_RESPONSE[1]: response})}
    parts = Composite({name: Unbounded((rows, 1)) for name in reward_parts}, shape=(rows,))
    reward = Composite({keys.REWARD[-1]: Unbounded((rows, 1)), keys.REWARD_PARTS[0]: parts}, shape=(rows,))
    return (
        StackedComposite(*[Composite(observation)] * rows, dim=0),
        StackedComposite(*[Composite(action)] * rows, dim=0),
        reward,
        Composite({name: flag.clone() for name in DONE}, shape=(rows,)),
    )
