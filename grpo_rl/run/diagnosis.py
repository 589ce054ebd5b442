"""RunDiagnosis: compares sampler and trainer in each step, and diagnoses steps whose numbers are wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

from tensordict import TensorDictBase

from grpo_rl.data.group import Group
from grpo_rl.diagnosis.causes import DiagnosisContext
from grpo_rl.diagnosis.mismatch import Mismatch, MismatchError
from grpo_rl.diagnosis.nonfinite import locate_nonfinite
from grpo_rl.engines.base import EngineDeadError, OutOfMemoryError, Sampling
from grpo_rl.envs.base import ScoreError
from grpo_rl.envs.rewards.json_client import EndpointError
from grpo_rl.run.parts import CommonParts
from grpo_rl.storage.masking import printable
from grpo_rl.training.optimizer import NonFiniteError

DIAGNOSED = (MismatchError, NonFiniteError)
"""Errors that stop a run over its numbers."""
NAMED_CAUSES = (EngineDeadError, OutOfMemoryError, ScoreError, EndpointError)
"""Errors with complete messages, which end a run without a traceback."""
PROMPT_CHARACTERS = 60
"""The longest prompt that messages show whole."""


@dataclass(frozen=True)
class RunDiagnosis:
    """The checks of a run's numbers.

    Args:
        alone: whether this process trains alone; one of several can't sample and score by itself.
    """

    parts: CommonParts
    mismatch: Mismatch
    sampling: Sampling
    alone: bool = True

    def observe(self, tokens: TensorDictBase, _losses: TensorDictBase, groups: Sequence[Group]) -> None:
        """Compares sampler and trainer on a micro-batch."""
        self.mismatch.add(tokens, groups, self.parts.weights.version)

    def check_mismatch(self) -> str | None:
        """Compares sampler and trainer over the current optimizer step, and returns a warning if one is due.

        Raises:
            MismatchError: a fault was found, or the difference is above the bound.
        """
        parts, decode = self.parts, self.parts.env.tokenizer.decode
        max_tokens = parts.within_memory.max_tokens
        context = DiagnosisContext(
            parts.policy, parts.weights, parts.engine, self.sampling, max_tokens, self._describe, decode
        )
        return self.mismatch.judge(context if self.alone else None)

    def locate_nonfinite(self, groups: Sequence[Group]) -> str:
        """Describes the first non-finite group of the optimizer step, and where in the model it becomes so."""
        parts = self.parts
        batching = parts.within_memory.batching
        return locate_nonfinite(parts.policy, parts.loss, parts.optimizer, groups, batching, self._describe)

    def _describe(self, group: Group) -> str:
        prompt = " ".join(printable(self.parts.env.query(group.row)).split())
        shown = prompt if len(prompt) <= PROMPT_CHARACTERS else f"{prompt[:PROMPT_CHARACTERS]}…"
        return f"group {group.group_id} (row {group.row}, {shown!r})"
