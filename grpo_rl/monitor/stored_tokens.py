"""The reader of ``tokens.parquet``: the groups that the page shows, and with lineage a step's groups as they were."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from grpo_rl.data.group import Group
from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts

KEY = b"grpo_rl"
"""Key in the metadata of a file that has all groups: JSON with config, responses, and each optimizer step's losses."""
OF_GROUP = {
    "sampler_log_prob": "log_probs",
    "old_log_prob": "old_log_probs",
    "old_entropy": "old_entropies",
    "ref_log_prob": "ref_log_probs",
}
"""Columns, and the group's entries that they hold."""
OF_RESPONSES, NAMED_OF_RESPONSES = ("offsets", "rewards", "truncated", "advantages"), ("reward_parts", "measures")
"""The group's entries that the metadata holds: tensors of its responses, and such tensors by name."""


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
    """A step of a run as it was recorded: its config, its groups with advantages, and its optimizer steps in order.

    Args:
        tokens: the rows of all optimizer steps, in order.
    """

    step: int
    config: dict
    groups: list[Group]
    updates: list[StoredUpdate]
    tokens: pa.Table


def shown_tokens(run_dir: Path, step: int, columns: Sequence[str]) -> pa.Table:
    """These columns of the groups whose text was recorded.

    Raises:
        ValueError: the step's part can't be read; names it.
    """
    table = StepParts(run_dir / TOKENS_FOLDER).read(step, [*columns, "text"])
    return table.filter(table["text"].is_valid())


def read_step(run_dir: str | Path, step: int) -> StoredStep:
    """The step as it was stored.

    Raises:
        ValueError: it was not stored, which names the steps that were; or its file can't be read.
    """
    parts = StepParts(Path(run_dir) / TOKENS_FOLDER)
    path = parts.path(step)
    try:
        table = parts.read(step) if path.exists() else pa.table({})
        if about := (table.schema.metadata or {}).get(KEY):
            return _stored(table, json.loads(about))
    except Exception as error:  # a file may be changed or from elsewhere: where it is decides the error
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{path} is not as it was written ({what}); take another step") from error
    # Without lineage a part has a few groups alone, for the report.
    steps = [i for i in parts.steps() if KEY in (pq.read_schema(parts.path(i)).metadata or {})]
    have = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none; train with train.lineage=true"
    raise ValueError(f"{run_dir} has no lineage of step {step}: {have}")


def _stored(table: pa.Table, about: dict[str, Any]) -> StoredStep:
    sizes = {known["group_id"]: known["offsets"][-1] for known in about["groups"]}
    columns: dict[int, dict[str, Any]] = {}
    updates, start, trained = [], 0, 0
    taken = {i for update in about["optimizer_steps"] for i in update["groups"]}
    # Rows are in this order (`grpo_rl.monitor.token_log`); groups that no optimizer step took are at the end.
    for recorded in [*about["optimizer_steps"], {"groups": [i for i in sizes if i not in taken]}]:
        ids, scored, trained = recorded.pop("groups"), {}, start
        for i in ids:
            tokens = columns[i] = _columns(table.slice(start, sizes[i]))
            start += sizes[i]
            if tokens["log_prob"] is not None:
                scored[i] = tokens["log_prob"], tokens["entropy"]
        updates.append(StoredUpdate(ids, scored, recorded))
    if start != len(table):
        raise ValueError(f"{len(table)} rows where its groups have {start}")
    groups = [_group(known, columns[known["group_id"]]) for known in about["groups"]]
    return StoredStep(about["step"], about["config"], groups, updates[:-1], table.slice(0, trained))


def _columns(table: pa.Table) -> dict[str, Any]:
    """The columns that a group is made of: None for one that has null, NaN is a number that was computed."""
    columns: dict[str, Any] = {"prompt_ids": table["prompt_ids"][0].as_py() if len(table) else []}
    for name in ("token_id", "policy_version", "trainable", "log_prob", "entropy", *OF_GROUP):
        column = table[name].fill_null(0.0) if name == "sampler_log_prob" else table[name]
        columns[name] = None if column.null_count else torch.from_numpy(column.to_numpy().copy())
    return columns


def _group(known: dict[str, Any], tokens: dict[str, Any]) -> Group:
    computed = tokens if len(tokens["token_id"]) else {}
    # Written together; without entropies the column only repeats the trainer's values of the optimizer step.
    old = computed if computed.get("old_entropy") is not None else {}
    listed: dict[str, Any] = {name: known[name] for name in OF_RESPONSES}
    return Group(
        group_id=known["group_id"],
        row=known["row"],
        prompt_ids=torch.tensor(tokens["prompt_ids"], dtype=torch.long),
        response_ids=tokens["token_id"].long(),
        log_probs=tokens["sampler_log_prob"],
        versions=tokens["policy_version"].long(),
        trainable=tokens["trainable"],
        ref_log_probs=computed.get("ref_log_prob"),
        old_log_probs=old.get("old_log_prob"),
        old_entropies=old.get("old_entropy"),
        **{name: values if values is None else torch.tensor(values) for name, values in listed.items()},
        **{name: {key: torch.tensor(values) for key, values in known[name].items()} for name in NAMED_OF_RESPONSES},
    )
