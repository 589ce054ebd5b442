"""HeldOut: held-out rewards before, during and after training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_rl.engines.base import Sampler, Sampling
from grpo_rl.envs.base import LLMEnv
from grpo_rl.intervals import paired_gain
from grpo_rl.run.summary import write_evaluation
from grpo_rl.training.evaluate import Evaluation, evaluate


class HeldOut:
    """Evaluates held-out rows greedily, and remembers the first and the last evaluation.

    Args:
        rows: held-out rows; an empty list turns evaluation off.
        sampling: of training, whose lengths and ends of responses are kept.
        before: rewards of the evaluation before training, if the resumed run has it.
        last: step and rewards of the newest evaluation, if the resumed run has it.
    """

    def __init__(
        self,
        env: LLMEnv,
        rows: Sequence[dict[str, Any]],
        sampling: Sampling,
        before: Sequence[float] = (),
        last: tuple[int, Sequence[float]] | None = None,
    ) -> None:
        self._env, self.rows = env, list(rows)
        ends = {"max_new_tokens": sampling.max_new_tokens, "stop": sampling.stop, "ignore_eos": sampling.ignore_eos}
        self._sampling = Sampling(temperature=0.0, **ends)
        self.before = list(before)
        self.evaluated_at, self.after = (last[0], list(last[1])) if last else (None, [])

    def evaluate(self, step: int, engine: Sampler, on_rank_zero: Callable[[Callable[[], Any]], Any]) -> Evaluation:
        """Evaluates after a step, on rank zero for all ranks; step 0 is the evaluation before training."""
        evaluation = on_rank_zero(lambda: evaluate(self._env, engine, self.rows, self._sampling))
        self.evaluated_at, self.after = step, evaluation.rewards
        if step == 0:
            self.before = evaluation.rewards
        return evaluation

    def keep(self, folder: Path, step: int) -> None:
        """Stores the rewards of this step's evaluation; called after its metrics are logged."""
        if self.evaluated_at == step:
            write_evaluation(folder, step, self.after)

    def summary(self, step: int) -> dict[str, object]:
        """Held-out reward before and after ``step``, with the paired gain and its 95 % interval, as far as known."""
        if not self.before:
            return {}
        before: dict[str, object] = {"eval_before": float(np.nanmean(self.before))}
        if self.evaluated_at != step or step == 0:
            return before
        gain = paired_gain(self.before, self.after)
        after = float(np.nanmean(self.after))
        return before | {"eval_after": after, "eval_gain": gain.mean, "eval_gain_ci95": gain.ci95}
