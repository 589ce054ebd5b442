"""The log of tokens, ``tokens.parquet`` (`grpo_rl.monitor.step_parts`): where each came from, and what became of it.

Of each step there are a few groups, for the report; with ``train.lineage=true`` there are all, a row
for each token and epoch with what the loss made of it, and a step can be read back and replayed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tensordict import TensorDictBase
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_rl.data.batching import by_group
from grpo_rl.data.group import Group
from grpo_rl.losses.grpo import LOSSES, GRPOLoss, clipped_at_all
from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts, encodable
from grpo_rl.monitor.stored_tokens import KEY, NAMED_OF_RESPONSES, OF_GROUP, OF_RESPONSES

MASK_REASONS = ("tool", "truncated", "zero_advantage_group", "low_entropy", "correction")
"""Reasons to leave a token out of the policy gradient; the first that applies is stored."""
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("epoch", pa.int16()),
        ("optimizer_step", pa.int16()),
        ("group_id", pa.int64()),
        ("response", pa.int16()),
        ("row", pa.int64()),
        ("position", pa.int32()),
        ("token_id", pa.int32()),
        ("text", pa.string()),
        ("special", pa.bool_()),
        ("turn", pa.int16()),
        ("trainable", pa.bool_()),
        ("policy_version", pa.int32()),
        *((name, pa.float32()) for name in OF_GROUP),
        *((name, pa.float32()) for name in ("log_prob", "entropy", "advantage", "ratio", "correction", "weight")),
        ("clipped", pa.bool_()),
        ("mask_reason", pa.dictionary(pa.int8(), pa.string())),
        ("prompt_ids", pa.list_(pa.int32())),
    ]
)
Pieces = Callable[[Sequence[int]], list[tuple[str, bool]]]
"""The text of each token, and whether it is special."""


@dataclass
class _Update:
    """An optimizer step: its groups, the epoch of each, and what the loss was given and returned."""

    groups: Sequence[Group]
    epochs: dict[int, int]
    scored: dict[int, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    recorded: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0.0))


class TokenLog:
    """Records what a collection is trained on, and writes ``tokens.parquet/part-<step>.parquet`` when the step is over.

    Args:
        config: the run's whole config.
        groups: how many groups of a step have their text stored: those that are scored first, when sampler and trainer
            had the same weights unless the group is stale; then groups that are not scored, such as zero-variance ones.
        pieces: the text of tokens.
        loss: gives each token's terms, and has all groups stored; None: only those with text are.
    """

    def __init__(
        self, run_dir: str | Path, config: Mapping[str, Any], groups: int, pieces: Pieces, loss: GRPOLoss | None = None
    ) -> None:
        self._parts, self._config = StepParts(Path(run_dir) / TOKENS_FOLDER), config
        self._groups, self._pieces, self._loss = groups, pieces, loss
        self._updates: list[_Update] = []
        self._visits: dict[int, int] = defaultdict(int)

    def begin(self, groups: Sequence[Group]) -> None:
        """Begins an optimizer step on these groups."""
        self._updates.append(_Update(groups, {group.group_id: self._visits[group.group_id] for group in groups}))
        for group in groups:
            self._visits[group.group_id] += 1

    @torch.no_grad()
    def add(self, tokens: TensorDictBase, losses: TensorDictBase, _groups: Sequence[Group] = ()) -> None:
        """Adds a micro-batch: what `GRPOLoss` was given and returned (`grpo_rl.monitor.step_record.Observer`)."""
        if not self._loss and len(self._scored_ids()) >= self._groups:
            return  # a step has many micro-batches, and few groups are recorded
        update, columns = self._updates[-1], {name: tokens[name].float() for name in ("log_prob", "entropy")}
        if self._loss:
            terms = self._loss.terms(tokens)
            columns |= {name: tokens[name] for name in ("advantage", "weight")}
            columns |= {name: terms[name] for name in ("ratio", "correction", "corrected")}
            columns |= {"old_log_prob": tokens["old_log_prob"]} if "old_log_prob" in tokens.keys() else {}
            columns["clipped"] = clipped_at_all(terms)
            for name in LOSSES:
                update.recorded[name] += float(losses[name].detach())
        for name, values in columns.items():
            for group_id, piece in by_group(tokens, values).items():
                update.scored[group_id][name] = piece

    def end(self, grad_norm: float, lr: float, skipped: bool) -> None:
        """Ends the optimizer step, with what the optimizer returned."""
        self._updates[-1].recorded |= {"grad_norm": grad_norm, "lr": lr, "skipped": skipped}

    def write(self, step: int, groups: Sequence[Group] | None, kl_coef: float) -> None:
        """Writes the step's part.

        Args:
            groups: the whole collection, with advantages; None: the step was cut short, and is written only where all
                groups are: those that optimizer steps took until then.
            kl_coef: weight that the step was trained with, which ``policy.target_kl`` moves away from the config's.

        Raises:
            OSError: the disk is full or read-only; names the file.
        """
        config = {**self._config} | {"policy": self._config["policy"] | {"kl_coef": kl_coef}}
        if groups is None:
            taken = [group for update in self._updates for group in update.groups] if self._loss else []
            groups = list({group.group_id: group for group in taken}.values())
        scored = {i: -number for number, update in reversed([*enumerate(self._updates)]) for i in update.scored}
        first = sorted(groups, key=lambda group: scored.get(group.group_id, -len(self._updates)), reverse=True)
        with_text = {group.group_id for group in first[: self._groups]}
        # A collection whose training was cut short has groups that no optimizer step took.
        left = [group for group in groups if group.group_id not in self._visits]
        tables = []
        for number, update in [*enumerate(self._updates), (None, _Update(left, {}))]:
            for group in update.groups:
                if self._loss or group.group_id in with_text:
                    text = group.group_id in with_text
                    with_text.discard(group.group_id)  # once
                    place = {"step": step, "epoch": update.epochs.get(group.group_id), "optimizer_step": number}
                    values = update.scored.get(group.group_id)
                    masked = config["loss"]["mask_truncated"]
                    tables.append(_rows(group, place, values, masked, self._pieces if text else None))
        table = pa.concat_tables([SCHEMA.empty_table(), *tables]).combine_chunks().unify_dictionaries()
        if self._loss:
            updates = [update.recorded | {"groups": list(update.epochs)} for update in self._updates]
            about = {"step": step, "config": config, "optimizer_steps": updates, "groups": list(map(_about, groups))}
            table = table.replace_schema_metadata({KEY: json.dumps(about)})
        if groups:
            self._parts.write(step, table)
        self._updates, self._visits = [], defaultdict(int)

    def _scored_ids(self) -> set[int]:
        return {group_id for update in self._updates for group_id in update.scored}


def _about(group: Group) -> dict[str, Any]:
    """What a group has for each response."""
    values = {name: getattr(group, name) for name in OF_RESPONSES}
    named = {name: getattr(group, name) for name in NAMED_OF_RESPONSES}
    return (
        {"group_id": group.group_id, "row": group.row}
        | {name: value if value is None else value.tolist() for name, value in values.items()}
        | {name: {key: value.tolist() for key, value in values.items()} for name, values in named.items()}
    )


def _rows(
    group: Group,
    place: Mapping[str, int | None],
    scored: Mapping[str, Tensor] | None,
    mask_truncated: bool,
    pieces: Pieces | None,
) -> pa.Table:
    """The rows of a group's tokens in one optimizer step, or in none."""
    count, chosen = len(group.response_ids), group.trainable.numpy()
    response = torch.repeat_interleave(group.lengths)
    columns: dict[str, Any] = {name: [value] * count for name, value in place.items()}
    columns |= {
        "group_id": np.full(count, group.group_id),
        "response": response.numpy(),
        "row": np.full(count, group.row),
        "position": (torch.arange(count) - group.offsets[:-1][response]).numpy(),
        "token_id": group.response_ids.numpy(),
        "turn": turns(group).numpy(),
        "policy_version": group.versions.numpy(),
        "trainable": chosen,
        "prompt_ids": [group.prompt_ids.tolist(), *[None] * (count - 1)][:count],
    }
    if pieces:
        read = [piece for ids in group.responses for piece in pieces(ids.tolist())]
        columns |= {"text": [encodable(text) for text, _ in read], "special": [special for _, special in read]}
    of_group = {name: getattr(group, entry) for name, entry in OF_GROUP.items()}
    columns |= {name: values.float().numpy() for name, values in of_group.items() if values is not None}
    masks = {"sampler_log_prob": ~chosen}  # what a tool wrote was sampled by no one
    trained = group.trained_tokens(mask_truncated).numpy()
    reason = np.full(count, -1)
    if group.advantages is not None and not group.advantages.any():
        reason[:] = MASK_REASONS.index("zero_advantage_group")
    if scored is not None:
        columns |= {name: value.numpy() for name, value in scored.items() if name in SCHEMA.names}
        masks |= dict.fromkeys(("ratio", "correction", "clipped"), ~trained)
    if scored is not None and "corrected" in scored:
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
        values = columns.get(name)
        if isinstance(values, np.ndarray):
            values = pa.array(values, mask=masks.get(name)).cast(kind)
        arrays.append(pa.nulls(count, kind) if values is None else pa.array(values, kind))
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


class TokenPieces:
    """Cuts the text of a response into the pieces of its tokens.

    Pieces of tokens that are not special, one after the other, are the decoded response. A character that several
    tokens make up is the piece of the last of them. A special token's piece is its name.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = {token: added[token].content for token in added if added[token].special}

    def __call__(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """The piece of each token, and whether it is special."""
        plain = [token for token in ids if token not in self._special]
        pieces = iter(self._pieces(plain))
        return [(self._special[token], True) if token in self._special else (next(pieces), False) for token in ids]

    def _pieces(self, ids: list[int]) -> list[str]:
        if not self._tokenizer.is_fast:
            return [self._decode([token]) for token in ids]
        stream = DecodeStream(skip_special_tokens=True)
        try:
            pieces = [stream.step(self._tokenizer.backend_tokenizer, token) or "" for token in ids]
        except Exception:  # bytes that are no character; the library has no narrower one
            return [self._decode([token]) for token in ids]
        # The stream keeps bytes at the end that are no character.
        return pieces and [*pieces[:-1], pieces[-1] + self._decode(ids)[sum(map(len, pieces)) :]]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
