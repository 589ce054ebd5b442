"""RunDiagnosis: looks into a step whose numbers disagree or are not finite, with the parts of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_rl.data.group import Group
from grpo_rl.diagnosis.causes import DiagnosisContext
from grpo_rl.diagnosis.mismatch import MismatchError
from grpo_rl.diagnosis.nonfinite import locate_nonfinite
from grpo_rl.engines.base import Sampling
from grpo_rl.monitor.completions import printable
from grpo_rl.run.parts import Parts
from grpo_rl.training.optimizer import NonFiniteError

DIAGNOSED = (MismatchError, NonFiniteError)
"""Errors that stop a run over its numbers."""
PROMPT_CHARACTERS = 60
"""Of a prompt, in messages that name a group."""


@dataclass(frozen=True)
class RunDiagnosis:
    """What looks into a run's steps.

    Args:
        parts: of the run.
        sampling: how training responses are sampled.
        alone: this process trains alone; of several none can sample and score by itself.
    """

    parts: Parts
    sampling: Sampling
    alone: bool = True

    def check_mismatch(self) -> str | None:
        """Compares sampler and trainer over the present optimizer step; what is to be told.

        Raises:
            MismatchError: a fault was found, or the difference is above the bound.
        """
        parts = self.parts
        context = DiagnosisContext(
            parts.policy,
            parts.weights,
            parts.engine,
            self.sampling,
            parts.micro_batching.max_tokens,
            self._describe,
            parts.env.tokenizer.decode,
        )
        return parts.mismatch.judge(context if self.alone else None)

    def locate_nonfinite(self, groups: Sequence[Group]) -> str:
        """Which group of the optimizer step is not finite first, and where in the model."""
        parts = self.parts
        return locate_nonfinite(
            parts.policy, parts.loss, parts.optimizer, groups, parts.micro_batching, self._describe
        )

    def _describe(self, group: Group) -> str:
        prompt = " ".join(printable(self.parts.env.query(group.row)).split())
        shown = prompt if len(prompt) <= PROMPT_CHARACTERS else f"{prompt[:PROMPT_CHARACTERS]}…"
        return f"group {group.group_id} (row {group.row}, {shown!r})"
