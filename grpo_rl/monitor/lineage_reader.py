"""Lineage read back: the groups and optimizer steps of a stored step."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from grpo_rl.data.group import Group
from grpo_rl.monitor.lineage import KEY, OF_GROUP, RESPONSES, TOKENS, stored_steps

_READ = ("token_id", "policy_version", "trainable", "log_prob", "entropy", *OF_GROUP)


@dataclass(frozen=True)
class StoredUpdate:
    """An optimizer step as it was recorded.

    Args:
        scored: the trainer's log-probabilities and entropies, [R], of each group that was scored.
        recorded: what the loss returned, by name, and what the optimizer did.
    """

    groups: list[int]
    scored: dict[int, tuple[Tensor, Tensor]]
    recorded: dict[str, float]


@dataclass(frozen=True)
class StoredStep:
    """A step of a run as it was recorded: its config, its groups with advantages, and its optimizer steps in order."""

    step: int
    config: dict
    groups: list[Group]
    updates: list[StoredUpdate]


def read_step(run_dir: str | Path, step: int) -> StoredStep:
    """The step as it was stored.

    Raises:
        ValueError: it was not stored, which names the steps that were; or its files can't be read.
    """
    if step not in (steps := stored_steps(run_dir)):
        have = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none; train with train.lineage=true"
        raise ValueError(f"{run_dir} has no lineage of step {step}: {have}")
    files = [Path(run_dir) / folder / f"step_{step:06d}.parquet" for folder in (TOKENS, RESPONSES)]
    try:
        return _stored(*map(pq.read_table, files))
    except Exception as error:  # a file may be cut, changed or from elsewhere: where it is decides the error
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"{files[0]} and {files[1]} are not as they were written ({what}); take another step"
        ) from error


def _stored(table: pa.Table, responses: pa.Table) -> StoredStep:
    about = json.loads(table.schema.metadata[KEY])
    valid = {name: torch.from_numpy(table[name].is_valid().to_numpy()) for name in _READ}
    columns = {name: torch.from_numpy(table[name].to_numpy().copy()) for name in _READ}
    spans = _spans(table)
    by_group: dict[int, list[dict]] = defaultdict(list)
    for row in responses.to_pylist():
        by_group[row["group_id"]].append(row)
    groups = []
    for group_id, rows in by_group.items():
        span = next((span for (_, owner), span in spans.items() if owner == group_id), slice(0, 0))
        groups.append(
            _group(rows, *({name: column[span] for name, column in part.items()} for part in (columns, valid)))
        )
    updates = []
    for number, recorded in enumerate(about["optimizer_steps"]):
        ids = recorded.pop("groups")
        found = {i: spans.get((number, i), slice(0, 0)) for i in ids}
        found = {i: at for i, at in found.items() if valid["log_prob"][at].all()}
        scored = {i: (columns["log_prob"][at], columns["entropy"][at]) for i, at in found.items()}
        updates.append(StoredUpdate(ids, scored, recorded))
    return StoredStep(about["step"], about["config"], groups, updates)


def _spans(table: pa.Table) -> dict[tuple[int, int], slice]:
    """The rows of each group in each optimizer step (-1: in none); they stand together, in their order."""
    owners = np.stack([table["optimizer_step"].fill_null(-1).to_numpy(), table["group_id"].to_numpy()])
    starts = np.flatnonzero(np.diff(owners, axis=1, prepend=-2).any(0)).tolist()
    ends = [*starts[1:], owners.shape[1]]
    return {tuple(owners[:, a].tolist()): slice(a, b) for a, b in zip(starts, ends, strict=True)}


def _group(rows: Sequence[Mapping], tokens: Mapping[str, Tensor], valid: Mapping[str, Tensor]) -> Group:
    """The group whose responses and tokens these are; null is what is not valid, NaN is a number that was computed."""

    def named(prefix: str) -> dict[str, Tensor]:
        names = [name for name in rows[0] if name.startswith(prefix) and rows[0][name] is not None]
        return {name.removeprefix(prefix): torch.tensor([row[name] for row in rows]) for name in names}

    def known(name: str) -> Tensor | None:
        return tokens[name] if len(tokens[name]) and valid[name].all() else None

    scored_before = known("old_entropy") is not None
    return Group(
        group_id=rows[0]["group_id"],
        row=rows[0]["row"],
        prompt_ids=torch.tensor(rows[0]["prompt_ids"], dtype=torch.long),
        response_ids=tokens["token_id"].long(),
        log_probs=torch.where(valid["sampler_log_prob"], tokens["sampler_log_prob"], 0.0),
        versions=tokens["policy_version"].long(),
        trainable=tokens["trainable"],
        offsets=torch.tensor([0, *(row["tokens"] for row in rows)]).cumsum(0),
        rewards=torch.tensor([row["reward"] for row in rows]),
        reward_parts=named("reward_"),
        measures=named("measure_"),
        truncated=None if rows[0]["truncated"] is None else torch.tensor([row["truncated"] for row in rows]),
        advantages=None if rows[0]["advantage"] is None else torch.tensor([row["advantage"] for row in rows]),
        ref_log_probs=known("ref_log_prob"),
        # Written together; without entropies the column only repeats what the trainer said in the optimizer step.
        old_log_probs=known("old_log_prob") if scored_before else None,
        old_entropies=known("old_entropy"),
    )
