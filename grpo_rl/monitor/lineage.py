"""The lineage of every trained token, where it came from and what the loss made of it, as two Parquet files a step.

``lineage/step_000012.parquet`` has a row for each response token and epoch, ``lineage_answers/step_000012.parquet`` one
for each response. ``pandas.read_parquet("lineage")`` reads a whole run; a file appears under its name only once it is
complete. Zero-variance groups, which were not scored, are there with null in the trainer's
columns.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tensordict import TensorDictBase
from torch import Tensor

from grpo_rl.data.batching import by_group
from grpo_rl.data.group import Group
from grpo_rl.losses.grpo import LOSSES, GRPOLoss, clipped_at_all
from grpo_rl.storage.whole_file import replacing

TOKENS, RESPONSES = "lineage", "lineage_answers"
"""Folders inside the run's folder: a row a token, and a row a response."""
MASK_REASONS = ("tool", "truncated", "zero_advantage_group", "low_entropy", "correction")
"""Reasons to leave a token out of the policy gradient; the first that applies is stored."""
KEY = b"grpo_rl"
"""Key in a token file's metadata: JSON with step, config, and the recorded losses of each optimizer step."""

PLACE = {
    "step": pa.int32(),
    "epoch": pa.int16(),
    "optimizer_step": pa.int16(),
    "group_id": pa.int64(),
    "answer": pa.int16(),
    "row": pa.int64(),
    "position": pa.int32(),
    "token_id": pa.int32(),
    "turn": pa.int16(),
    "policy_version": pa.int32(),
    "trainable": pa.bool_(),
}
OF_GROUP = ("sampler_log_prob", "old_log_prob", "old_entropy", "ref_log_prob")
OF_LOSS = ("log_prob", "entropy", "advantage", "ratio", "correction", "weight")
SCHEMA = pa.schema(
    [
        *PLACE.items(),
        *((name, pa.float32()) for name in OF_GROUP + OF_LOSS),
        ("clipped", pa.bool_()),
        ("mask_reason", pa.dictionary(pa.int8(), pa.string())),
    ]
)
FILE = re.compile(r"step_(\d+)\.parquet")


@dataclass
class _Step:
    """An optimizer step: its groups, the epoch of each, and what the loss was given and returned."""

    groups: Sequence[Group]
    epochs: dict[int, int]
    scored: dict[int, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    recorded: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0.0))


class LineageLog:
    """Records what a collection is trained on, and writes it when the step is over.

    Args:
        config: the run's whole config.
    """

    def __init__(self, run_dir: str | Path, config: Mapping[str, Any], loss: GRPOLoss) -> None:
        self._run_dir, self._config, self._loss = Path(run_dir), config, loss
        self._steps: list[_Step] = []
        self._visits: dict[int, int] = defaultdict(int)

    def begin(self, groups: Sequence[Group]) -> None:
        """Begins an optimizer step on these groups."""
        epochs = {group.group_id: self._visits[group.group_id] for group in groups}
        for group in groups:
            self._visits[group.group_id] += 1
        self._steps.append(_Step(groups, epochs))

    @torch.no_grad()
    def add(self, tokens: TensorDictBase, losses: TensorDictBase) -> None:
        """Adds a micro-batch: what `GRPOLoss` was given, and what it returned."""
        step, terms = self._steps[-1], self._loss.terms(tokens)
        columns = {
            **{name: tokens[name] for name in ("log_prob", "entropy", "advantage", "weight")},
            **{name: terms[name] for name in ("ratio", "correction", "corrected")},
            **({"old_log_prob": tokens["old_log_prob"]} if "old_log_prob" in tokens.keys() else {}),
            "clipped": clipped_at_all(terms),
        }
        for name, values in columns.items():
            for group_id, piece in by_group(tokens, values).items():
                step.scored[group_id][name] = piece
        for name in LOSSES:
            step.recorded[name] += float(losses[name].detach())

    def end(self, grad_norm: float, lr: float, skipped: bool) -> None:
        """Ends the optimizer step, with what the optimizer returned."""
        self._steps[-1].recorded |= {"grad_norm": grad_norm, "lr": lr, "skipped": skipped}

    def write(self, step: int, groups: Sequence[Group] | None, kl_coef: float) -> None:
        """Writes the step's files.

        Args:
            groups: the whole collection, with advantages; None: the step was cut short, and those that optimizer steps
                took until then are all that is known.
            kl_coef: weight that the step was trained with, which ``policy.target_kl`` moves away from the config's.
        """
        config = {**self._config} | {"policy": self._config["policy"] | {"kl_coef": kl_coef}}
        masked = config["loss"]["mask_truncated"]
        if groups is None:
            groups = list({group.group_id: group for trained in self._steps for group in trained.groups}.values())
        tables = []
        for number, trained in enumerate(self._steps):
            for group in trained.groups:
                place = {"step": step, "epoch": trained.epochs[group.group_id], "optimizer_step": number}
                tables.append(_token_rows(group, place, trained.scored.get(group.group_id), masked))
        # A collection whose training was cut short has groups that no optimizer step took.
        for group in groups:
            if group.group_id not in self._visits:
                tables.append(_token_rows(group, {"step": step, "epoch": None, "optimizer_step": None}, None, masked))
        recorded = [trained.recorded | {"groups": list(trained.epochs)} for trained in self._steps]
        about = {"step": step, "config": config, "optimizer_steps": recorded}
        table = pa.concat_tables(tables).combine_chunks().unify_dictionaries()
        # The responses first: whoever finds the tokens finds both.
        _write(self._run_dir / RESPONSES, step, _response_rows(step, groups))
        _write(self._run_dir / TOKENS, step, table.replace_schema_metadata({KEY: json.dumps(about)}))
        self._steps, self._visits = [], defaultdict(int)


def truncate(run_dir: str | Path, step: int) -> None:
    """Drops the files after ``step`` and what a killed run left half written."""
    for folder in (Path(run_dir) / TOKENS, Path(run_dir) / RESPONSES):
        for path in folder.glob("*"):
            match = FILE.fullmatch(path.name)
            if path.name.startswith(".step_") or (match and int(match[1]) > step):
                path.unlink()


def stored_steps(run_dir: str | Path) -> list[int]:
    """Steps whose lineage is stored, in order."""
    return sorted(int(match[1]) for path in (Path(run_dir) / TOKENS).glob("*") if (match := FILE.fullmatch(path.name)))


def _token_rows(
    group: Group, place: Mapping[str, int | None], scored: Mapping[str, Tensor] | None, mask_truncated: bool
) -> pa.Table:
    """The rows of a group's tokens in one optimizer step, or in none."""
    count, chosen = len(group.response_ids), group.trainable.numpy()
    trained = group.trained_tokens(mask_truncated).numpy()
    response = torch.repeat_interleave(group.lengths)
    columns: dict[str, object] = {name: np.full(count, value) for name, value in place.items() if value is not None}
    columns |= {
        "group_id": np.full(count, group.group_id),
        "answer": response.numpy(),
        "row": np.full(count, group.row),
        "position": (torch.arange(count) - group.offsets[:-1][response]).numpy(),
        "token_id": group.response_ids.numpy(),
        "turn": turns(group).numpy(),
        "policy_version": group.versions.numpy(),
        "trainable": chosen,
    }
    of_group = (group.log_probs, group.old_log_probs, group.old_entropies, group.ref_log_probs)
    columns |= {name: None if value is None else value.numpy() for name, value in zip(OF_GROUP, of_group, strict=True)}
    masks = {"sampler_log_prob": ~chosen}  # what a tool wrote was sampled by nobody
    reason = np.full(count, -1)
    if group.advantages is not None and not group.advantages.any():
        reason[:] = MASK_REASONS.index("zero_advantage_group")
    if scored is not None:
        columns |= {name: value.numpy() for name, value in scored.items() if name in SCHEMA.names}
        masks |= dict.fromkeys(("ratio", "correction", "clipped"), ~trained)
        no_weight = (scored["corrected"] & (scored["correction"] == 0)).numpy()
        reason[trained & no_weight & (reason < 0)] = MASK_REASONS.index("correction")
        low = (scored["advantage"] == 0) & (group.advantages[response] != 0)
        reason[trained & low.numpy()] = MASK_REASONS.index("low_entropy")
    reason[~trained] = MASK_REASONS.index("truncated")
    reason[~chosen] = MASK_REASONS.index("tool")
    indices = pa.array(reason, pa.int8(), mask=reason < 0)
    columns["mask_reason"] = pa.DictionaryArray.from_arrays(indices, pa.array(MASK_REASONS))
    arrays = []
    for name, kind in zip(SCHEMA.names, SCHEMA.types, strict=True):
        column = columns.get(name)
        if isinstance(column, np.ndarray):
            column = pa.array(column, mask=masks.get(name)).cast(kind)
        arrays.append(pa.nulls(count, kind) if column is None else column)
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def turns(group: Group) -> Tensor:
    """The policy's turn of each response token, from 0 in each response; a reply belongs to the turn that it answers.

    >>> from dataclasses import replace
    >>> from grpo_rl.testing import random_group
    >>> group = replace(random_group(lengths=[4, 2]), trainable=torch.tensor([True, False, False, True, True, True]))
    >>> turns(group).tolist()
    [0, 0, 0, 1, 0, 0]
    """
    response = torch.repeat_interleave(group.lengths)
    before = torch.cat([torch.zeros(1, dtype=torch.bool), group.trainable[:-1]])[: len(response)]
    first = torch.zeros_like(group.trainable)
    first[group.offsets[:-1][group.lengths > 0]] = True
    started = (group.trainable & (~before | first)).cumsum(0)
    earlier = torch.cat([torch.zeros(1, dtype=torch.long), started])[group.offsets[:-1]]
    return (started - earlier[response] - 1).clamp(min=0)


def _response_rows(step: int, groups: Sequence[Group]) -> pa.Table:
    """A row a response; the prompt's ids stand beside the first one of each group."""
    rows = []
    for group in groups:
        for g in range(group.size):
            rows.append(
                {
                    "step": step,
                    "group_id": group.group_id,
                    "answer": g,
                    "row": group.row,
                    "tokens": int(group.lengths[g]),
                    "truncated": None if group.truncated is None else bool(group.truncated[g]),
                    "reward": group.rewards[g].item(),
                    "advantage": None if group.advantages is None else group.advantages[g].item(),
                    "prompt_ids": None if g else group.prompt_ids.tolist(),
                    **{f"reward_{name}": part[g].item() for name, part in group.reward_parts.items()},
                    **{f"measure_{name}": values[g].item() for name, values in group.measures.items()},
                }
            )
    kinds = PLACE | {"tokens": pa.int32(), "truncated": pa.bool_(), "prompt_ids": pa.list_(pa.int32())}
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.Table.from_pylist(rows, pa.schema([(name, kinds.get(name, pa.float32())) for name in names]))


def _write(folder: Path, step: int, table: pa.Table) -> None:
    """The table as the step's file, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    # Bytes of equal weight beside each other compress: a log-probability's exponents are alike, its digits are not.
    floats = [name for name, kind in zip(table.schema.names, table.schema.types, strict=True) if kind == pa.float32()]
    others = [name for name in table.schema.names if name not in floats and name != "prompt_ids"]
    with replacing(folder / f"step_{step:06d}.parquet") as temporary:
        pq.write_table(table, temporary, compression="zstd", use_dictionary=others, use_byte_stream_split=floats)
