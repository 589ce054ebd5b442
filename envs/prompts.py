"""PromptSource: a task's rows as tokenised prompts, in shuffled epochs, with a position that can be stored."""

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_rl.envs.chat import encode_rows
from grpo_rl.envs.curriculum import Curriculum
from grpo_rl.envs.tables import place_of
from grpo_rl.envs.task import Task

_CHECK_BATCH = 1024
_REMEDY = "raise inference_model.max_model_len or lower sampling.max_new_tokens"


@dataclass(frozen=True, eq=False)
class Prompt:
    """One use of a dataset row: what a group of responses is sampled from, under an id that is unique in the run."""

    group_id: int
    row: int
    query: str
    ids: Int[Tensor, " P"]


class PromptSource:
    """The prompts of a task, each row once an epoch, in the order of the epoch's seeded shuffle.

    Args:
        max_tokens: the longest prompt that leaves room for a response; None does not check.
        long_prompt: what to do with longer ones: ``error``, or ``skip``, which counts them in :attr:`too_long`.
        curriculum: decides which rows are drawn; None: all.

    Raises:
        ValueError: there are no rows.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int | None,
        long_prompt: str,
        seed: int,
        curriculum: Curriculum | None = None,
    ) -> None:
        if not len(task.rows):
            raise ValueError(f"{type(task).__name__} has no rows; give a dataset with at least one")
        self._task, self._tokenizer = task, tokenizer
        self._max_tokens, self._long_prompt = max_tokens, long_prompt
        self.too_long: set[int] = set()
        """Rows found too long and left out."""
        self._next_group_id = 0
        self.curriculum = curriculum
        self.start_epoch(seed, 0)

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts, each tokenised once.

        Raises:
            ValueError: a prompt is too long and ``long_prompt`` is ``error``, or every prompt is too long.
        """
        prompts: list[Prompt] = []
        while missing := count - len(prompts):
            rows = [row for row in self._next_rows(missing) if row not in self.too_long]
            for row, query, ids in self._encoded(rows):
                if self._fits(row, len(ids)):
                    prompts.append(Prompt(self._next_group_id, row, query, torch.tensor(ids, dtype=torch.long)))
                    self._next_group_id += 1
        return prompts

    def check(self) -> None:
        """Tokenises every row, to find those that are too long, as :meth:`take` does."""
        if self._max_tokens is not None:
            for _ in self.checked():
                pass

    def checked(self) -> Iterator[list[tuple[int, list[int]]]]:
        """The rows whose prompts fit, with their ids, in the order of the data, a batch at a time; as :meth:`take`."""
        for start in range(0, len(self._task.rows), _CHECK_BATCH):
            encoded = self._encoded(range(start, min(start + _CHECK_BATCH, len(self._task.rows))))
            yield [(row, ids) for row, _, ids in encoded if self._fits(row, len(ids))]

    def start_epoch(self, seed: int, epoch: int) -> None:
        """Shuffles the rows anew; group ids go on, as they are unique in the run."""
        self._seed, self._epoch, self._cursor = seed, epoch, 0
        self._all_rows, self._drawn = False, 0
        # Seeding with both numbers apart: with their sum, seed 0's second epoch would be seed 1's first.
        self._order = random.Random(f"{seed}/{epoch}").sample(range(len(self._task.rows)), len(self._task.rows))

    def note(self, row: int, results: Sequence[object]) -> None:
        """Passes the rewards of the responses to a row to the curriculum, if there is one."""
        if self.curriculum:
            self.curriculum.note(row, results, self._epoch)

    def state(self) -> dict[str, Any]:
        """The position in the data, as JSON-able numbers."""
        drawn = {"all_rows": self._all_rows, "drawn": self._drawn}
        own = {"curriculum": self.curriculum.state() | drawn} if self.curriculum else {}
        return own | {
            "rows": len(self._task.rows),
            "digest": self._digest,
            "seed": self._seed,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "next_group_id": self._next_group_id,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a position in the data; a ValueError where it is one in other data."""
        if (state["rows"], state["digest"]) != (len(self._task.rows), self._digest):
            counts = f"{state['rows']} rows then, {len(self._task.rows)} now, or as many with other content"
            raise ValueError(f"the data position is from other data: {counts}; resume with the same data")
        self.start_epoch(state["seed"], state["epoch"])
        self._cursor, self._next_group_id = state["cursor"], state["next_group_id"]
        if self.curriculum and (own := state.get("curriculum")):
            self.curriculum.restore(own)
            self._all_rows, self._drawn = own["all_rows"], own["drawn"]

    @cached_property
    def _digest(self) -> int:
        """A checksum of all rows in their order: a position means something in the same data only."""
        return zlib.crc32("\n".join(repr(row) for row in self._task.rows).encode())

    def _next_rows(self, count: int) -> list[int]:
        rows = []
        while len(rows) < count:
            if self._cursor == len(self._order):
                starved = self.curriculum is not None and not self._drawn
                self.start_epoch(self._seed, self._epoch + 1)
                if self.curriculum and starved:
                    self._all_rows = True
                    self.curriculum.whole_epochs += 1
            row = self._order[self._cursor]
            self._cursor += 1
            if not self._left_out(row):
                rows.append(row)
                self._drawn += 1
        return rows

    def _left_out(self, row: int) -> bool:
        """True if the curriculum passes over a row; it must not count one that is too long as drawn."""
        if self.curriculum is None:
            return False
        if row in self.too_long:
            return True
        if self._all_rows or self.curriculum.keeps(row, self._epoch, self._seed):
            return False
        self.curriculum.passed_over += 1
        return True

    def _encoded(self, rows: Sequence[int]) -> list[tuple[int, str, list[int]]]:
        if not rows:
            return []
        own = [self._task.rows[row] for row in rows]
        encoded = encode_rows(self._tokenizer, self._task, own, [place_of(self._task.rows, row) for row in rows])
        asked = [self._task.prompt(data)[-1]["content"] for data in own]
        return list(zip(rows, asked, encoded, strict=True))

    def _fits(self, row: int, tokens: int) -> bool:
        if self._max_tokens is None or tokens <= self._max_tokens:
            return True
        if self._long_prompt == "error":
            found = f"the prompt of row {row} has {tokens} tokens, {self._max_tokens} fit"
            raise ValueError(f"{found}; {_REMEDY}, or leave such rows out with env.long_prompt=skip")
        self.too_long.add(row)
        if len(self.too_long) == len(self._task.rows):
            raise ValueError(f"all {len(self._task.rows)} prompts are longer than {self._max_tokens} tokens; {_REMEDY}")
        return False
