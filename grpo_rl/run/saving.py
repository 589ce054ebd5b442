"""CheckpointSaver: a run's checkpoints, at most one a step."""

from __future__ import annotations

from pathlib import Path

from grpo_rl.distributed.ranks import Ranks, agreed
from grpo_rl.run.folder import RunFolder
from grpo_rl.run.parts import Parts
from grpo_rl.training import checkpoint


class CheckpointSaver:
    """Writes the state of a run's parts into its folder.

    Args:
        keep: newest checkpoints that stay, 0 for all.
        ranks: the processes that hold the state together.
    """

    def __init__(self, folder: RunFolder, parts: Parts, keep: int, ranks: Ranks | None = None) -> None:
        self._folder, self._parts, self._keep, self._ranks = folder, parts, keep, ranks
        self.path: Path | None = None
        self._saved_at: int | None = None
        if folder.restored and folder.inside:  # it need not be written again
            self.path, self._saved_at = folder.restored[0], folder.step

    def save(self, step: int, collected: int, seconds: float, eval_before: list[float]) -> Path:
        """The checkpoint of this step, written unless it is there."""
        if self.path is None or self._saved_at != step:
            state = {
                "step": step,
                "collected": collected,
                "config": self._folder.config,
                "eval_before": eval_before,
                "seconds": seconds,
            } | self._parts.state()
            agreed(self._ranks, lambda: checkpoint.sync_logs(self._folder.path))
            self.path = checkpoint.save(self._folder.checkpoints, step, state, self._keep, self._ranks)
            self._saved_at = step
        return self.path
