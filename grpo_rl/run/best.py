"""BestTracker: the best evaluation of a run, and how many came since that were no better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class BestTracker:
    """Follows one score of each held-out row from evaluation to evaluation.

    The best evaluation is the one of the highest mean; of equal ones the first. As the highest of many it is flattered
    by chance. The run is stopped once ``patience`` evaluations in a row are no better than it. An evaluation of which
    fewer than two rows have a score is left out.

    Args:
        patience: evaluations; 0: the run is never stopped.
        score: the name of the score: one of another name, or of another number of rows, can't be compared.
    """

    def __init__(self, patience: int = 0, score: str = "reward") -> None:
        self.patience, self.score = patience, score
        self.best: tuple[int, list[float]] | None = None
        """Step and row scores of the best evaluation."""
        self._no_better = 0

    def comparable(self, scores: Sequence[float]) -> bool:
        """True if an evaluation with these row scores can be taken."""
        return int((~np.isnan(np.asarray(scores, dtype=float))).sum()) >= 2

    def add(self, step: int, scores: Sequence[float]) -> bool:
        """Takes the row scores of an evaluation, NaN where there is none; returns whether it is the best so far."""
        if not self.comparable(scores):
            return False
        is_best = self.best is None or float(np.nanmean(scores)) > float(np.nanmean(self.best[1]))
        self.best = (step, list(scores)) if is_best else self.best
        self._no_better = 0 if is_best else self._no_better + 1
        return is_best

    @property
    def stop_reason(self) -> str | None:
        """The reason to stop the run, with the numbers; None while there is none."""
        if not self.patience or self.best is None or self._no_better < self.patience:
            return None
        return (
            f"{self._no_better} evaluations in a row are no better than that of step {self.best[0]}, whose "
            f"{self.score} is {float(np.nanmean(self.best[1])):.3f} (evaluate.patience={self.patience})"
        )

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint holds."""
        return {"best": self.best, "no_better": self._no_better, "score": self.score}

    def restore(self, state: Mapping[str, Any], rows: int | None = None) -> str | None:
        """Goes on from :meth:`state`; where that is of other scores it begins anew, and returns a note for the user.

        Args:
            rows: the number of rows that the score has now.
        """
        if (best := state["best"]) is None:
            return None
        had, of = len(best[1]), state["score"]
        if of != self.score or rows not in (None, had):
            was, now = (f"{score} of {count} rows" for score, count in ((of, had), (self.score, rows or "the same")))
            return f"The evaluations before are of {was}, those from now on of {now}: the best is looked for anew"
        self.best = int(best[0]), [np.nan if score is None else float(score) for score in best[1]]
        self._no_better = int(state["no_better"])
        return None
