"""A few groups of each step token by token, as a Parquet dataset: what was said, and how sure sampler and trainer were.

``tokens.parquet`` is for people who look at a run (`grpo_rl.monitor.step_parts`); ``train.lineage=true`` stores every
token with what the loss made of it (`grpo_rl.monitor.lineage`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from tensordict import TensorDictBase
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_rl.data.batching import by_group
from grpo_rl.data.group import Group
from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts, encodable

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group_id", pa.int64()),
        ("response", pa.int16()),
        ("position", pa.int32()),
        ("token_id", pa.int32()),
        ("text", pa.string()),
        ("special", pa.bool_()),
        ("trainable", pa.bool_()),
        ("policy_version", pa.int32()),
        ("sampler_log_prob", pa.float32()),
        ("log_prob", pa.float32()),
        ("entropy", pa.float32()),
    ]
)
UNFINISHED = "\ufffd"
"""Stands in decoded text for bytes that are only a part of a character."""
MOST_BYTES = 4
"""Bytes of a character in UTF-8, and so the most tokens that it takes."""


class TokenPieces:
    """Cuts the text of a response into the pieces of its tokens.

    Pieces of tokens that are not special, one after the other, are the decoded response. A character that several
    tokens make up is the piece of the last of them. A special token's piece is its name.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, tuple[str, bool]] = {}

    def __call__(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """The piece of each token, and whether it is special."""
        self._learn(set(ids))
        found = [self._alone[token] for token in ids]
        plain = [i for i, (_, special) in enumerate(found) if not special]
        pieces = self._joined([ids[i] for i in plain], [found[i][0] for i in plain])
        for i, piece in zip(plain, pieces, strict=True):
            found[i] = piece, False
        return found

    def _learn(self, ids: set[int]) -> None:
        """Decodes each of the ids by itself, once."""
        new = sorted(ids - self._alone.keys())
        if not new:
            return
        texts = self._decode([[token] for token in new])
        names = self._tokenizer.batch_decode([[token] for token in new], clean_up_tokenization_spaces=False)
        for token, text, name in zip(new, texts, names, strict=True):
            special = not text and bool(name)
            self._alone[token] = (name if special else text, special)

    def _joined(self, ids: list[int], alone: list[str]) -> list[str]:
        """The pieces of tokens that are not special, from what each is by itself."""
        if not ids:
            return []
        whole = self._decode([ids])[0]
        if "".join(alone) == whole:
            return alone
        # Bytes of one character are decoded together, and behind the token before, which may change how a word begins.
        starts = [i for i in range(len(ids)) if i == 0 or UNFINISHED not in (alone[i - 1][-1:] + alone[i][:1])]
        ends = [*starts[1:], len(ids)]
        befores = [starts[max(n - 1, 0)] for n in range(len(starts))]
        with_before = self._decode([ids[before:end] for before, end in zip(befores, ends, strict=True)])
        before_alone = self._decode([ids[before:start] for before, start in zip(befores, starts, strict=True)])
        pieces = [""] * len(ids)
        for start, end, both, first in zip(starts, ends, with_before, before_alone, strict=True):
            text = both[len(first) :]
            parts = self._characters(ids[start:end], alone[start:end]) if end - start > 1 else [text]
            # Python and a tokenizer's own decoder may disagree on how many characters broken bytes are.
            pieces[start:end] = parts if "".join(parts) == text else [*[""] * (end - start - 1), text]
        # A tokenizer that needs more context than one unit before: then each token stands as it reads alone.
        return pieces if "".join(pieces) == whole else alone

    def _characters(self, ids: list[int], alone: list[str]) -> list[str]:
        """The pieces of tokens whose bytes may form characters together, each character at its last token."""
        pieces, start = [], 0
        while start < len(ids):
            spans = range(start + 1, min(start + MOST_BYTES, len(ids)) + 1)
            texts = self._decode([ids[start:end] for end in spans])
            whole = next(((end, text) for end, text in zip(spans, texts, strict=True) if UNFINISHED not in text), None)
            end, text = whole or (start + 1, alone[start])  # bytes that are no character
            pieces += [*[""] * (end - start - 1), text]
            start = end
        return pieces

    def _decode(self, many: list[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(many, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TokenLog:
    """Writes ``tokens.parquet/part-<step>.parquet``, a row a token of the recorded groups.

    Recorded are groups of the first micro-batches, when sampler and trainer had the same weights unless the group is
    stale; then groups that were not scored, such as zero-variance groups, with null for the trainer's numbers.

    Args:
        groups: how many groups of a step are recorded.
    """

    def __init__(self, run_dir: str | Path, groups: int, pieces: Callable[[Sequence[int]], list[tuple[str, bool]]]):
        self._parts, self._groups, self._pieces = StepParts(Path(run_dir) / TOKENS_FOLDER), groups, pieces
        self._scored: dict[int, Tensor] = {}

    def add(self, tokens: TensorDictBase) -> None:
        """Adds a micro-batch: what `GRPOLoss` was given."""
        if len(self._scored) >= self._groups:
            return  # a step has many micro-batches, and few groups are recorded
        values = torch.stack([tokens["log_prob"].detach().float(), tokens["entropy"].detach().float()])
        for group_id, piece in by_group(tokens, values).items():
            self._scored.setdefault(group_id, piece)

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Writes the step's part, from its groups and what was added since the last one.

        Raises:
            OSError: the disk is full or read-only; names the file.
        """
        scored, self._scored = self._scored, {}
        chosen = sorted(groups, key=lambda group: group.group_id not in scored)[: self._groups]
        tables = [_rows(step, group, scored.get(group.group_id), self._pieces) for group in chosen]
        self._parts.write(step, pa.concat_tables(tables))


def _rows(
    step: int, group: Group, scored: Tensor | None, pieces: Callable[[Sequence[int]], list[tuple[str, bool]]]
) -> pa.Table:
    count = len(group.response_ids)
    response = torch.repeat_interleave(group.lengths)
    read = [piece for ids in group.responses for piece in pieces(ids.tolist())]
    texts = [text for text, _ in read]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        texts = [encodable(text) for text in texts]
    chosen = group.trainable.numpy()
    columns = {
        "step": np.full(count, step),
        "group_id": np.full(count, group.group_id),
        "response": response.numpy(),
        "position": (torch.arange(count) - group.offsets[:-1][response]).numpy(),
        "token_id": group.response_ids.numpy(),
        "text": texts,
        "special": [special for _, special in read],
        "trainable": chosen,
        "policy_version": group.versions.numpy(),
        # What a tool wrote was sampled by nobody.
        "sampler_log_prob": pa.array(group.log_probs.float().numpy(), mask=~chosen),
        "log_prob": pa.nulls(count) if scored is None else scored[0].numpy(),
        "entropy": pa.nulls(count) if scored is None else scored[1].numpy(),
    }
    arrays = [
        (column if isinstance(column, pa.Array) else pa.array(column)).cast(kind)
        for column, kind in zip((columns[name] for name in SCHEMA.names), SCHEMA.types, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)
