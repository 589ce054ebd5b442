"""Records: what a run stores of its steps for people who look closer: tokens, and when engines sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from transformers import PreTrainedTokenizerBase

from grpo_rl.collectors.base import Sampled
from grpo_rl.data.group import Group
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.monitor.sampling_log import SamplingLog
from grpo_rl.monitor.token_log import TokenLog
from grpo_rl.monitor.token_pieces import TokenPieces


class Records:
    """Writes ``tokens.parquet`` and ``sampling.parquet``.

    Args:
        config: the whole config.
        token_groups: groups of a step that are recorded token by token, with their text.
        loss: gives each token's terms, and has all groups recorded; None: only those with text are.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        token_groups: int,
        tokenizer: PreTrainedTokenizerBase,
        loss: GRPOLoss | None = None,
    ) -> None:
        self.tokens = None
        if token_groups or loss:
            pieces = TokenPieces(tokenizer) if token_groups else lambda ids: []
            self.tokens = TokenLog(run_dir, config, token_groups, pieces, loss)
        self._sampling = SamplingLog(run_dir)

    def observe(self, tokens: TensorDictBase, losses: TensorDictBase, _groups: Sequence[Group]) -> None:
        """Adds a micro-batch (see `grpo_rl.monitor.step_record.Observer`)."""
        if self.tokens:
            self.tokens.add(tokens, losses)

    def write_sampled(self, step: int, sampled: Sequence[Sampled], zero: float) -> None:
        """Writes when engines sampled.

        Args:
            zero: the run's clock, less ``time.perf_counter()``.
        """
        rows = [
            {
                "engine": group.engine,
                "group_id": group.group_id,
                "policy_version": group.version,
                "begun_s": zero + group.begun_s,
                "ended_s": zero + group.ended_s,
            }
            for group in sampled
        ]
        self._sampling.write(step, rows)
