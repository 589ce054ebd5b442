"""Held-out loss, metrics and checks of a run of SFT, in the place of those that need an engine and rewards."""

from collections.abc import Sequence
from pathlib import Path

from tensordict import TensorDictBase

from grpo_rl.data.group import Group
from grpo_rl.monitor.metrics import memory_metrics
from grpo_rl.monitor.step_record import StepRecord
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.run.diagnosis import RunDiagnosis
from grpo_rl.run.held_out import BestTracker, Evaluated, HeldOut
from grpo_rl.run.parts import CommonParts
from grpo_rl.training.micro_batches import WithinMemory


class SFTDiagnosis(RunDiagnosis):
    """The checks of a run without a sampler: whether its numbers are finite."""

    def observe(self, tokens: TensorDictBase, _losses: TensorDictBase, groups: Sequence[Group]) -> None:
        """Compares nothing: the tokens were not sampled."""


class HeldOutDemonstrations:
    """Evaluates held-out demonstrations in the place of `grpo_rl.run.held_out.HeldOut`.

    Args:
        rows: held-out demonstrations; an empty list turns evaluation off.
        before: -log pi of each before training, in nats, if the resumed run has it.
    """

    note: str | None = None

    def __init__(
        self, policy: TrainPolicy, rows: Sequence[Group], within_memory: WithinMemory, before: Sequence[float] = ()
    ) -> None:
        self._policy, self.rows, self._within_memory = policy, list(rows), within_memory
        self._tokens = sum(len(group.response_ids) for group in rows)
        self.before, self.after = list(before), list[float]()
        self.evaluated_at: int | None = None
        self.tracker = BestTracker()
        """Follows nothing: what it would follow is a reward."""

    def evaluate(self, step: int, *_engine: object) -> Evaluated:
        """Evaluates after a step; step 0 is the evaluation before training."""
        scored = self._policy.add_log_probs(self.rows, self._within_memory.max_tokens)
        self.evaluated_at, self.after = step, [-group.old_log_probs.sum().item() for group in scored]  # pyrefly: ignore[missing-attribute]
        if step == 0:
            self.before = self.after
        return Evaluated({"eval/loss": self._loss(self.after)})

    def keep(self, folder: Path, step: int) -> None:
        """Stores nothing: a run that resumes computes a loss that it lacks again."""

    def keep_responses(self, folder: Path) -> None:
        """Stores nothing: no response was sampled."""

    def summary(self, step: int) -> dict[str, object]:
        """Held-out loss before and after ``step``, as far as known."""
        losses: dict[str, object] = {}
        if self.before:
            losses["eval_loss_before"] = self._loss(self.before)
        if self.after and self.evaluated_at == step:
            losses["eval_loss_after"] = self._loss(self.after)
        return losses

    def _loss(self, nll: Sequence[float]) -> float:
        """The mean over tokens, as the loss in training, from the sum of each demonstration."""
        return sum(nll) / self._tokens


AnyHeldOut = HeldOut | HeldOutDemonstrations
"""The evaluation of a run: by greedy responses, or by the loss of demonstrations."""


def sft_metrics(parts: CommonParts, groups: Sequence[Group], record: StepRecord) -> dict[str, float]:
    """The numbers of a step of SFT, by name."""
    return (
        record.metrics(0, record.elapsed_s)
        | {"train/tokens": sum(len(group.response_ids) for group in groups)}
        | {"optimizer/skipped_steps": parts.optimizer.bad_steps}
        | memory_metrics(0.0)
        | parts.collector.metrics()
    )
