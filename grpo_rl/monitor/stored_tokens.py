"""The reader of a lineage, `grpo_rl.monitor.token_log`: groups of a step as they were."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
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
OF_RESPONSES = ("offsets", "rewards", "truncated", "advantages", "sessions")
"""The group's entries that the metadata holds, next to ``reward_parts`` and ``measures``."""


@dataclass(frozen=True)
class StoredUpdate:
    """An optimizer step as it was recorded.

    Args:
        scored: the trainer's log-probabilities and entropies, [R], of each group that was scored.
        recorded: the terms of its loss, by name.
    """

    groups: list[int]
    scored: dict[int, tuple[Tensor, Tensor]]
    recorded: dict[str, float]


@dataclass(frozen=True)
class StoredStep:
    """A step of a run as it was recorded: its config, its groups with advantages, and its optimizer steps in order.

    ``tokens`` are the rows of all optimizer steps, in order.
    """

    step: int
    config: dict
    groups: list[Group]
    updates: list[StoredUpdate]
    tokens: pa.Table


def read_step(run_dir: str | Path, step: int) -> StoredStep:
    """The step as it was stored.

    Raises:
        ValueError: it was not stored, which names the steps that have a part; or its file can't be read.
    """
    parts = StepParts(Path(run_dir) / TOKENS_FOLDER)
    steps = parts.steps()
    table = parts.read(step) if step in steps else pa.table({})
    if not (about := (table.schema.metadata or {}).get(KEY)):
        have = "it was trained without it"
        if steps and step not in steps:
            have = f"its token log has steps {steps[0]} to {steps[-1]}"
        raise ValueError(f"{run_dir} has no lineage of step {step}: {have}; train.lineage=true stores it")
    try:
        return _stored(table, json.loads(about))
    except Exception as error:  # a file may be changed or from elsewhere: where it is decides the error
        raise ValueError(f"{parts.path(step)} is not as it was written ({type(error).__name__}: {error})") from error


def _stored(table: pa.Table, about: dict[str, Any]) -> StoredStep:
    known = {of_group["group_id"]: of_group for of_group in about["groups"]}
    groups: dict[int, Group] = {}
    updates, start, trained = [], 0, 0
    taken = {i for recorded in about["optimizer_steps"] for i in recorded["groups"]}
    # Rows are in this order (`grpo_rl.monitor.token_log`); groups that no optimizer step took are at the end.
    for recorded in [*about["optimizer_steps"], {"groups": [i for i in known if i not in taken]}]:
        ids, scored, trained = recorded.pop("groups"), {}, start
        for i in ids:
            tokens = table.slice(start, known[i]["offsets"][-1])
            start += len(tokens)
            groups[i] = _group(known[i], tokens)
            log_prob, entropy = _tensor(tokens["log_prob"]), _tensor(tokens["entropy"])
            if log_prob is not None and entropy is not None:
                scored[i] = log_prob, entropy
        updates.append(StoredUpdate(ids, scored, recorded))
    if start != len(table):
        raise ValueError(f"{len(table)} rows, and {start} tokens of its groups")
    return StoredStep(about["step"], about["config"], [groups[i] for i in known], updates[:-1], table.slice(0, trained))


def _tensor(column: pa.ChunkedArray) -> Any:
    """The column's numbers, NaN among them; None where one is null, which was not computed."""
    return None if column.null_count else torch.from_numpy(column.to_numpy().copy())


def _group(known: dict[str, Any], tokens: pa.Table) -> Group:
    values = {entry: _tensor(tokens[name]) for name, entry in OF_GROUP.items()}
    values["log_probs"] = _tensor(tokens["sampler_log_prob"].fill_null(0.0))  # what a tool wrote has none
    if values["old_entropies"] is None:  # they are written together, or the column repeats those of the optimizer step
        values["old_log_probs"] = None
    of_responses = {name: known.get(name) for name in OF_RESPONSES}
    return Group(
        group_id=known["group_id"],
        row=known["row"],
        prompt_ids=torch.tensor(tokens["prompt_ids"][0].as_py() if len(tokens) else [], dtype=torch.long),
        response_ids=_tensor(tokens["token_id"]).long(),
        versions=_tensor(tokens["policy_version"]).long(),
        trainable=_tensor(tokens["trainable"]),
        reward_parts={name: torch.tensor(part) for name, part in known["reward_parts"].items()},
        measures={name: torch.tensor(values) for name, values in known.get("measures", {}).items()},
        **values,
        **{name: None if value is None else torch.tensor(value) for name, value in of_responses.items()},
    )
