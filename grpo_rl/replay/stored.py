"""A step of a run read back from its log of tokens: its groups and optimizer steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from grpo_rl.data.group import Group
from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts
from grpo_rl.monitor.token_log import KEY, OF_GROUP


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
        ValueError: it was not stored, which names the steps that were; or its file can't be read.
    """
    parts = StepParts(Path(run_dir) / TOKENS_FOLDER)
    if step not in (steps := parts.steps()):
        have = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none; train with train.lineage=true"
        raise ValueError(f"{run_dir} has no lineage of step {step}: {have}")
    try:
        table = parts.read(step)
        about = (table.schema.metadata or {}).get(KEY)
        found = _stored(table, json.loads(about)) if about else None
    except Exception as error:  # a file may be changed or from elsewhere: where it is decides the error
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{parts.path(step)} is not as it was written ({what}); take another step") from error
    if not found:
        raise ValueError(f"{run_dir} has no lineage of step {step}, only a few groups; train with train.lineage=true")
    return found


def _stored(table: pa.Table, about: dict[str, Any]) -> StoredStep:
    tables: dict[tuple[int, int], dict[str, Any]] = {}
    owners = list(zip(table["optimizer_step"].fill_null(-1).to_pylist(), table["group_id"].to_pylist(), strict=True))
    starts = [i for i, owner in enumerate(owners) if i == 0 or owner != owners[i - 1]]
    for start, end in zip(starts, [*starts[1:], len(owners)], strict=True):
        tables[owners[start]] = _columns(table.slice(start, end - start))
    empty = _columns(table.slice(0, 0))
    of_group = {group_id: columns for (_, group_id), columns in tables.items()}
    groups = [_group(known, of_group.get(known["group_id"], empty)) for known in about["groups"]]
    updates = []
    for number, recorded in enumerate(about["optimizer_steps"]):
        ids = recorded.pop("groups")
        found = {i: tables.get((number, i), empty) for i in ids}
        scored = {i: (t["log_prob"], t["entropy"]) for i, t in found.items() if t["log_prob"] is not None}
        updates.append(StoredUpdate(ids, scored, recorded))
    return StoredStep(about["step"], about["config"], groups, updates)


def _columns(table: pa.Table) -> dict[str, Any]:
    """The columns that a group is made of: None for one that has null, NaN is a number that was computed."""
    columns: dict[str, Any] = {"prompt_ids": table["prompt_ids"][0].as_py() if len(table) else []}
    for name in ("token_id", "policy_version", "trainable", "log_prob", "entropy", *OF_GROUP):
        column = table[name].fill_null(0.0) if name == "sampler_log_prob" else table[name]
        known = column.null_count == 0
        columns[name] = torch.from_numpy(column.to_numpy().copy()) if known else None
    return columns


def _group(known: dict[str, Any], tokens: dict[str, Any]) -> Group:
    def tensor(values: list | None) -> Tensor | None:
        return None if values is None else torch.tensor(values)

    # Written together; without entropies the column only repeats what the trainer said in the optimizer step.
    has_old = len(tokens["token_id"]) and tokens["old_entropy"] is not None
    return Group(
        group_id=known["group_id"],
        row=known["row"],
        prompt_ids=torch.tensor(tokens["prompt_ids"], dtype=torch.long),
        response_ids=tokens["token_id"].long(),
        log_probs=tokens["sampler_log_prob"],
        versions=tokens["policy_version"].long(),
        trainable=tokens["trainable"],
        offsets=torch.tensor(known["offsets"]),
        rewards=torch.tensor(known["rewards"]),
        reward_parts={name: torch.tensor(values) for name, values in known["reward_parts"].items()},
        measures={name: torch.tensor(values) for name, values in known["measures"].items()},
        truncated=tensor(known["truncated"]),
        advantages=tensor(known["advantages"]),
        ref_log_probs=tokens["ref_log_prob"] if len(tokens["token_id"]) else None,
        old_log_probs=tokens["old_log_prob"] if has_old else None,
        old_entropies=tokens["old_entropy"] if has_old else None,
    )
