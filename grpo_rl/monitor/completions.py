"""Every response of a run, as a Parquet dataset (`grpo_rl.monitor.step_parts`)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch import Tensor

from grpo_rl.data.group import Group
from grpo_rl.monitor.step_parts import COMPLETIONS_FOLDER, StepParts

TURN_ENDS = "turn_ends"
"""The column that separates the policy's turns from the replies between them, where the task replies."""

_BEFORE_PARTS = [
    ("step", pa.int64()),
    ("group_id", pa.int64()),
    ("row", pa.int64()),
    ("prompt", pa.string()),
    ("completion", pa.string()),
    ("answer", pa.string()),
    ("reward", pa.float32()),
]
_AFTER_PARTS = [
    ("advantage", pa.float32()),
    ("tokens", pa.int64()),
    ("truncated", pa.bool_()),
    ("policy_version", pa.int64()),
]


def completion_rows(
    groups: Sequence[Group],
    decode: Callable[[Sequence[int]], str],
    answer: Callable[[int], object] = lambda row: None,
    turns: bool = False,
    decode_prompt: Callable[[Sequence[int]], str] | None = None,
) -> list[dict[str, Any]]:
    """One dict a response, with the columns of the Parquet parts but ``step``.

    Args:
        decode: ids -> text of a response.
        answer: index of a dataset row -> its gold answer, or None where the task has none.
        turns: whether the task replies; then ``turn_ends`` has where turns and replies end in ``completion``.
        decode_prompt: ids -> text of a prompt; None: as of a response.

    ``policy_version`` is that of the response's first token: the oldest weights that had a part in it.

    >>> from grpo_rl.testing import random_group
    >>> rows = completion_rows([random_group(lengths=[1, 2], rewards=[0.0, 2.0])], lambda ids: f"{len(ids)} ids")
    >>> [(row["prompt"], row["completion"], row["reward"]) for row in rows]
    [('4 ids', '1 ids', 0.0), ('4 ids', '2 ids', 2.0)]
    """
    rows = []
    for group in groups:
        prompt, gold = (decode_prompt or decode)(group.prompt_ids.tolist()), answer(group.row)
        for g, ids in enumerate(group.responses):
            start, text = int(group.offsets[g]), decode(ids.tolist())
            chosen = group.trainable[start : start + len(ids)]
            rows.append(
                {
                    "group_id": group.group_id,
                    "row": group.row,
                    "prompt": prompt,
                    "completion": text,
                    "answer": None if gold is None else str(gold),
                    "reward": group.rewards[g].item(),
                    **{f"reward_{name}": part[g].item() for name, part in group.reward_parts.items()},
                    **{f"measure_{name}": values[g].item() for name, values in group.measures.items()},
                    "advantage": None if group.advantages is None else group.advantages[g].item(),
                    "tokens": len(ids),
                    "truncated": None if group.truncated is None else bool(group.truncated[g]),
                    "policy_version": int(group.versions[start]) if len(ids) else None,
                    **({TURN_ENDS: turn_ends(ids, chosen, text, decode)} if turns else {}),
                }
            )
    return rows


def turn_ends(ids: Tensor, chosen: Tensor, text: str, decode: Callable[[Sequence[int]], str]) -> list[int]:
    """The ends of the policy's turns and of the replies in a response's text, in characters; a turn comes first.

    Args:
        chosen: which of the ids the policy chose.
        text: all ids decoded.

    >>> import torch
    >>> ids, chosen = torch.tensor([7, 8, 9, 5]), torch.tensor([True, True, False, True])
    >>> turn_ends(ids, chosen, "7895", lambda ids: "".join(map(str, ids)))
    [2, 3, 4]
    """
    changes = (chosen[1:] != chosen[:-1]).nonzero().flatten() + 1
    # What a token reads as may depend on those before it, so turns are not decoded by themselves.
    ends = [_common(decode(ids[:end].tolist()), text) for end in changes.tolist()]
    first = [] if len(chosen) == 0 or chosen[0] else [0]
    return [*first, *ends, len(text)]


class CompletionsLog:
    """Writes ``completions.parquet/part-<step>.parquet``, one a step."""

    def __init__(self, run_dir: str | Path) -> None:
        self._parts = StepParts(Path(run_dir) / COMPLETIONS_FOLDER)
        self.path = self._parts.folder

    def log(self, step: int, rows: Sequence[dict[str, Any]], reward_parts: Sequence[str] = ()) -> None:
        """Writes the rows of a step (see :func:`completion_rows`); the same step again replaces them.

        All ``reward_parts`` have a column, also those that the step lacks, as a mixture's draws may: a folder is read
        with the columns of its first part.

        Raises:
            OSError: the disk is full or read-only; names the file.
        """
        # A measure may have no meaning for the responses of some groups.
        found = (name for row in rows for name in row if name.startswith(("reward_", "measure_")))
        parts = dict.fromkeys([*(f"reward_{name}" for name in reward_parts), *found])
        # Without a schema a column that is all null in one step would get a type that other parts disagree with.
        turns = [(TURN_ENDS, pa.list_(pa.int32()))] if rows and TURN_ENDS in rows[0] else []
        schema = pa.schema([*_BEFORE_PARTS, *((name, pa.float32()) for name in parts), *_AFTER_PARTS, *turns])
        self._parts.write_rows(step, rows, schema)


def _common(a: str, b: str) -> int:
    """Characters that two texts have in common at their beginnings."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
