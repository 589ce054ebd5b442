"""Hook: a callback of a run: of the run's own logs and results, and as `hooks=[package.module:Class]` adds it."""

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from grpo_rl.data.group import Group


class Hook:
    """Methods that a run (`grpo_rl.run.run.Run`) calls; those that a subclass leaves out do nothing.

    The run's own logs and results are written by hooks that come before the user's. With several ranks each rank has
    hooks of its own.
    An error in a method ends the run, as one in its own code would.
    """

    def on_start(self, run: Any) -> None:
        """Called before the first collection, after the first evaluation; ``run.parts`` is what the run trains with."""

    def on_groups(self, run: Any, groups: list[Group]) -> list[Group] | None:
        """Called with the groups of a collection, before advantages; those that it returns, if any, replace them."""

    def on_batch(self, run: Any, groups: Sequence[Group]) -> None:
        """Called with the groups of an optimizer step, before its micro-batches."""

    def on_micro_batch(self, run: Any, tokens: TensorDictBase, losses: TensorDictBase) -> None:
        """Called with the tokens of a micro-batch and the output of the loss, after the backward pass."""

    def on_step(self, run: Any, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """Called after step ``run.step`` with its numbers, before they are logged: what it adds to them is logged."""

    def on_evaluate(self, run: Any, metrics: dict[str, float]) -> None:
        """Called with the numbers of an evaluation; what it adds to them is logged."""

    def on_log(self, run: Any, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        """Called with all numbers of step ``run.step``; no groups where they are of an evaluation by itself."""

    def on_stop(self, run: Any, summary: dict[str, object]) -> None:
        """Called with the summary of a run that Ctrl-C ends after a checkpoint."""

    def on_error(self, run: Any, error: BaseException) -> None:
        """Called where the numbers of the step after ``run.step`` are so wrong that the run ends."""

    def on_end(self, run: Any, summary: dict[str, object]) -> None:
        """Called with the run's summary once model, summary and report are written; not where an error ends the run."""
