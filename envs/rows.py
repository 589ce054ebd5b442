"""Rows of a batch, by the keys of `grpo_rl.data.keys`, the rows that steps lead to, and the TorchRL specs of a batch.

Between an `LLMEnv` and an `EnginePolicy` a row is a dict with Python's numbers and flags, as tensors for them would
take longer than the step itself; elsewhere it is a TensorDict. ``row[key]`` reads both, :func:`next_of` their ``next``.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_tensor_collection, lazy_stack
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, NonTensor, StackedComposite, Unbounded

from grpo_rl.data import keys
from grpo_rl.envs.chat import Dialog
from grpo_rl.envs.guards.guard import Failure
from grpo_rl.envs.task import Reward

DONE = ("done", "terminated", "truncated")
Row = dict[Any, Any] | TensorDictBase
"""One trajectory's entries, by the keys of `grpo_rl.data.keys`."""


def stacked(rows: Sequence[Row]) -> TensorDictBase:
    """The rows as TensorDicts, lazily stacked.

    Numbers and flags become tensors of shape [1]; anything else that is no tensor is stored as `NonTensorData`.
    """
    return lazy_stack(
        [
            TensorDict({key: _entry(value) for key, value in row.items()}) if isinstance(row, dict) else row
            for row in rows
        ]
    )


def _entry(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: torch.tensor([number]) for name, number in value.items()}
    if isinstance(value, bool | int | float):
        return torch.tensor([value])
    return value if isinstance(value, Tensor) or is_tensor_collection(value) else NonTensorData(value)


def dialog_of(row: Row) -> Dialog:
    """The conversation of a row of an `LLMEnv`."""
    return cast(Dialog, row[keys.HISTORY])


def next_of(row: Row) -> Row:
    """The result of a row's step."""
    return cast(Row, row["next"])


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
    rows: Sequence[Row],
    dialogs: Mapping[int, Dialog],
    cut: Collection[int],
    prompts: Mapping[int, Tensor],
    reward_parts: Sequence[str],
) -> list[Row]:
    """The results of the rows' steps, each as it stands under ``next``, as dicts.

    Args:
        dialogs: conversations of the rows that were stepped, with the turn and what followed; the others were over.
        cut: rows whose conversation met a limit before the policy was done.
        prompts: of the next turns, of the rows that go on.
    """
    after: list[Row] = []
    for i, row in enumerate(rows):
        dialog = dialogs.get(i) or dialog_of(row)
        verdict = dialog.verdict if i in dialogs else None  # a conversation that was over had its reward
        reward, failed = verdict if isinstance(verdict, Reward) else None, isinstance(dialog.verdict, Failure)
        total = reward.total if reward else math.nan if failed and verdict else 0.0
        flags = (failed, dialog.over, dialog.over and i not in cut, i in cut)
        after.append(
            {
                keys.HISTORY: dialog,
                keys.TOKENS_PROMPT: prompts[i] if i in prompts else row[keys.TOKENS_PROMPT],
                keys.REWARD[-1]: total,
                keys.REWARD_PARTS[0]: {name: reward.parts.get(name, 0.0) if reward else 0.0 for name in reward_parts},
                **dict(zip((keys.FAILED, *DONE), flags, strict=True)),
                **{key: row.get(key) for key in (keys.QUERY, keys.GROUP_ID, keys.ROW)},
            }
        )
    return after
