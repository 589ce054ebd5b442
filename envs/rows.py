"""The rows that steps lead to, and the TorchRL specs of a batch of rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, NonTensor, StackedComposite, Unbounded

from grpo_rl.data import keys
from grpo_rl.envs.chat import Dialog
from grpo_rl.envs.guards.guard import Failure
from grpo_rl.envs.task import Reward

DONE = ("done", "terminated", "truncated")


def dialog_of(row: TensorDictBase) -> Dialog:
    """The conversation of a row of an `LLMEnv`."""
    return cast(Dialog, row[keys.HISTORY])


def next_of(row: TensorDictBase) -> TensorDictBase:
    """The result of a row's step."""
    return cast(TensorDictBase, row["next"])


def row_specs(
    rows: int, vocabulary: int, reward_parts: Sequence[str]
) -> tuple[StackedComposite, StackedComposite, Composite, Composite]:
    """The specs of observations, actions, rewards and ends, by the keys of `grpo_rl.data.keys`.

    Rows differ in length, so specs with tokens are stacked lazily: one dense spec would ask to stack the rows.
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


def led_to(
    rows: Sequence[TensorDictBase],
    dialogs: Mapping[int, Dialog],
    cut: Collection[int],
    prompts: Mapping[int, Tensor],
    reward_parts: Sequence[str],
) -> list[TensorDictBase]:
    """The results of the rows' steps, each as it stands under ``next``.

    Args:
        dialogs: conversations of the rows that were stepped, with the turn and what followed; the others were over.
        cut: rows whose conversation met a limit before the policy was done.
        prompts: of the next turns, of the rows that go on.
    """
    after: list[TensorDictBase] = []
    for i, row in enumerate(rows):
        dialog = dialogs.get(i) or dialog_of(row)
        verdict = dialog.verdict if i in dialogs else None  # a conversation that was over had its reward
        reward, failed = verdict if isinstance(verdict, Reward) else None, isinstance(dialog.verdict, Failure)
        total = reward.total if reward else math.nan if failed and verdict else 0.0
        flags = (failed, dialog.over, dialog.over and i not in cut, i in cut)
        parts = {name: torch.tensor([reward.parts.get(name, 0.0) if reward else 0.0]) for name in reward_parts}
        after.append(
            TensorDict(
                {
                    keys.HISTORY: NonTensorData(dialog),
                    keys.TOKENS_PROMPT[0]: {keys.TOKENS_PROMPT[1]: prompts.get(i, row[keys.TOKENS_PROMPT])},
                    keys.REWARD[-1]: torch.tensor([total]),
                    keys.REWARD_PARTS[0]: parts,
                    **{name: torch.tensor([flag]) for name, flag in zip((keys.FAILED, *DONE), flags, strict=True)},
                    **{key: row.get(key) for key in (keys.QUERY, keys.GROUP_ID, keys.ROW)},
                }
            )
        )
    return after
