"""The log of tokens, ``tokens.parquet`` (`grpo_rl.monitor.step_parts`): where each came from, and what became of it.

Of each step there are a few groups, for the report; with ``train.lineage=true`` there are all, a row
for each token and epoch with what the loss made of it, and a step can be read back and replayed.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from jaxtyping import Bool, Int
from tensordict import TensorDictBase
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_rl.data.advantages import token_advantages
from grpo_rl.data.batching import by_group
from grpo_rl.data.group import Group
from grpo_rl.losses.grpo import LOSSES, GRPOLoss, clipped_at_all
from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts, encodable
from grpo_rl.monitor.stored_tokens import KEY, OF_GROUP, OF_RESPONSES

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
    """An optimizer step: its groups, the loss's terms of each that was scored, and the sums of all micro-batches."""

    groups: Sequence[Group]
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

    def begin(self, groups: Sequence[Group]) -> None:
        """Begins an optimizer step on these groups."""
        self._updates.append(_Update(groups))

    @torch.no_grad()
    def add(self, tokens: TensorDictBase, losses: TensorDictBase) -> None:
        """Adds a micro-batch: what `GRPOLoss` was given and returned."""
        if not self._loss and len({i for update in self._updates for i in update.scored}) >= self._groups:
            return  # a step has many micro-batches, and few groups are recorded
        update, columns = self._updates[-1], {name: tokens[name].float() for name in ("log_prob", "entropy")}
        if self._loss:
            terms = self._loss.terms(tokens)
            columns |= {name: tokens[name] for name in ("advantage", "weight", "old_log_prob") if name in tokens.keys()}
            columns |= {name: terms[name] for name in ("ratio", "correction", "corrected")}
            columns["clipped"] = clipped_at_all(terms)
            for name in LOSSES:
                update.recorded[name] += float(losses[name].detach())
        for name, values in columns.items():
            for group_id, piece in by_group(tokens, values).items():
                update.scored[group_id][name] = piece

    def write(self, step: int, groups: Sequence[Group] | None, coefs: Mapping[str, float]) -> None:
        """Writes the step's part.

        Args:
            groups: the whole collection, with advantages; None: the step was cut short, and is written only where all
                groups are: those that optimizer steps took until then.
            coefs: weights of the loss's terms in this step, as far as they move away from the config's.

        Raises:
            OSError: the disk is full or read-only; names the file.
        """
        updates, self._updates = self._updates, []
        visits: list[tuple[Group, int | None, Mapping[str, Tensor]]] = [
            (group, number, update.scored.get(group.group_id, {}))
            for number, update in enumerate(updates)
            for group in update.groups
        ]
        taken = {group.group_id: group for group, *_ in visits}
        if groups is None:
            groups = list(taken.values()) if self._loss else []
        if not groups:
            return
        # A collection whose training was cut short has groups that no optimizer step took.
        visits += [(group, None, {}) for group in groups if group.group_id not in taken]
        first = {i: number for number, update in reversed([*enumerate(updates)]) for i in update.scored}
        by_first = sorted(groups, key=lambda group: first.get(group.group_id, len(updates)))
        with_text = {group.group_id for group in by_first[: self._groups]}
        config = {**self._config, "policy": self._config["policy"] | coefs}
        masked, epochs, tables = config["loss"]["mask_truncated"], Counter[int](), []
        for group, number, scored in visits:
            text = group.group_id in with_text
            with_text.discard(group.group_id)  # once
            if self._loss or text:
                epoch = None if number is None else epochs[group.group_id]
                place = {"step": step, "epoch": epoch, "optimizer_step": number}
                tables.append(_rows(group, place, scored, masked, self._pieces if text else None))
            epochs[group.group_id] += 1
        table = pa.concat_tables(tables)
        if self._loss:
            recorded = [update.recorded | {"groups": [group.group_id for group in update.groups]} for update in updates]
            about = {"step": step, "config": config, "optimizer_steps": recorded, "groups": list(map(_about, groups))}
            table = table.replace_schema_metadata({KEY: json.dumps(about)})
        self._parts.write(step, table)


def _about(group: Group) -> dict[str, Any]:
    """The values of a group's responses, as JSON has them."""
    values = {name: getattr(group, name) for name in OF_RESPONSES}
    about = {name: None if value is None else value.tolist() for name, value in values.items()}
    parts = {name: part.tolist() for name, part in group.reward_parts.items()}
    measures = {name: values.tolist() for name, values in group.measures.items()}
    return {"group_id": group.group_id, "row": group.row, "reward_parts": parts, "measures": measures, **about}


def _rows(
    group: Group,
    place: Mapping[str, int | None],
    scored: Mapping[str, Tensor],
    mask_truncated: bool,
    pieces: Pieces | None,
) -> pa.Table:
    """The rows of a group's tokens in one optimizer step, or in none."""
    count, chosen = len(group.response_ids), group.trainable
    response, trained = torch.repeat_interleave(group.lengths), group.trained_tokens(mask_truncated)
    tensors = {
        name: values.float() for name, entry in OF_GROUP.items() if (values := getattr(group, entry)) is not None
    }
    tensors |= scored
    tensors |= {
        "response": response,
        "position": torch.arange(count) - group.offsets[response],
        "token_id": group.response_ids,
        "turn": torch.cat([turns(of_response) for of_response in chosen.split(group.lengths.tolist())]),
        "trainable": chosen,
        "policy_version": group.versions,
    }
    nulls = dict.fromkeys(("ratio", "correction", "clipped"), ~trained)
    nulls["sampler_log_prob"] = ~chosen  # what a tool wrote was sampled by no one
    columns: dict[str, Any] = dict.fromkeys(SCHEMA.names, [None] * count)
    columns |= {name: [value] * count for name, value in place.items()}
    columns |= {"group_id": [group.group_id] * count, "row": [group.row] * count}
    for name, values in tensors.items():
        columns[name] = pa.array(values.numpy(), mask=nulls[name].numpy() if name in nulls else None)
    if pieces:
        read = [piece for ids in group.responses for piece in pieces(ids.tolist())]
        columns |= {"text": [encodable(text) for text, _ in read], "special": [special for _, special in read]}
    columns["prompt_ids"] = [group.prompt_ids.tolist(), *[None] * (count - 1)][:count]
    columns["mask_reason"] = _mask_reasons(group, scored, trained)
    return pa.table(columns, schema=SCHEMA)


def _mask_reasons(group: Group, scored: Mapping[str, Tensor], trained: Tensor) -> pa.Array:
    """The first of :data:`MASK_REASONS` that applies to each token; null where none does."""
    low_entropy = no_weight = torch.zeros_like(trained)
    zero_advantage = torch.full_like(trained, group.advantages is not None and not group.advantages.any())
    if group.advantages is not None and "corrected" in scored:
        low_entropy = (scored["advantage"] == 0) & (token_advantages(group) != 0)
        no_weight = scored["corrected"] & (scored["correction"] == 0)
    reasons = torch.stack([~group.trainable, ~trained, zero_advantage, low_entropy, no_weight])
    first = pa.array(reasons.int().argmax(0).numpy(), pa.int8(), mask=~reasons.any(0).numpy())
    return pa.DictionaryArray.from_arrays(first, pa.array(MASK_REASONS))


def turns(chosen: Bool[Tensor, " R"]) -> Int[Tensor, " R"]:
    """The policy's turn of each token of a response, from 0; a reply belongs to the turn that it answers.

    >>> turns(torch.tensor([True, False, False, True])).tolist()
    [0, 0, 0, 1]
    """
    begins = torch.cat([chosen[:1], chosen[1:] & ~chosen[:-1]])
    return (begins.cumsum(0) - 1).clamp(min=0)


def token_pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[tuple[str, bool]]:
    """The text of each token of a response, and whether it is a special token, whose text is its name.

    The others, one after the other, are the decoded response. A character that several tokens make up is the piece of
    the last of them.
    """
    special = {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    plain = [token for token in ids if token not in special]

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    stream = DecodeStream(skip_special_tokens=True)
    try:
        pieces = [stream.step(tokenizer.backend_tokenizer, token) or "" for token in plain]
        if pieces:  # the stream keeps bytes at the end that are no character
            pieces[-1] += decode(plain)[sum(map(len, pieces)) :]
    except Exception:  # a slow tokenizer, or bytes that are no character; the library has no narrower one
        pieces = [decode([token]) for token in plain]
    texts = iter(pieces)
    return [(special[token], True) if token in special else (next(texts), False) for token in ids]
