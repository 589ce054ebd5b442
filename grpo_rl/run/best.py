"""BestTracker: the best evaluation of a run, and whether the run still gets better, by paired intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_rl.intervals import Gain, paired_gain

STILL_RISING = 0.5
"""Part of half the interval's width, so about one standard error, by which a trend has to rise for a run to go on.

To stop a run that still improves costs more than some evaluations of one that does not: 95 % would be the wrong bar."""


class BestTracker:
    """Follows one score of each held-out row from evaluation to evaluation.

    The best evaluation is the one of the highest mean; of equal ones the first. As the highest of many it is flattered
    by chance, so that its interval is one of a single comparison.

    Whether the run still gets better is judged in two ways. An evaluation may be better, by its paired 95 % interval,
    than the anchor: the last one that was better than the anchor before it, at first the evaluation before training.
    And the trend over the last ``patience`` + 1 evaluations, the mean slope of each row's scores, may point upwards, by
    about its standard error (:data:`STILL_RISING`). The run is stopped once ``patience`` evaluations in a row are not
    better than the anchor, and the trend does not point upwards. The best evaluation alone would be a bad judge: in a
    run that gains a little each time none is clearly better.

    An evaluation of which fewer than two rows can be compared with the anchor, or that has no score at all, is left
    out. What is kept does not grow with the run.

    Args:
        patience: evaluations; 0: the run is never stopped.
        score: the name of the score: one of another name, or of another number of rows, can't be compared.
    """

    def __init__(self, patience: int = 0, score: str = "reward") -> None:
        self.patience, self.score = patience, score
        self.best: tuple[int, list[float]] | None = None
        """Step and row scores of the best evaluation."""
        self._anchor: tuple[int, list[float]] | None = None
        self._since: list[tuple[int, list[float]]] = []
        self._no_better = 0

    def comparable(self, scores: Sequence[float]) -> bool:
        """Tells whether an evaluation with these row scores can be taken."""
        known = ~np.isnan(np.asarray(scores, dtype=float))
        if self._anchor is not None:
            known &= ~np.isnan(self._anchor[1])
        return int(known.sum()) >= 2

    def add(self, step: int, scores: Sequence[float]) -> bool:
        """Takes the row scores of an evaluation, NaN where there is none; tells whether it is the best so far."""
        if not self.comparable(scores):
            return False
        evaluation = (step, list(scores))
        is_best = self.best is None or float(np.nanmean(scores)) > float(np.nanmean(self.best[1]))
        self.best = evaluation if is_best else self.best
        if self._anchor is None:
            self._anchor = evaluation
        elif paired_gain(self._anchor[1], evaluation[1]).low > 0:
            self._anchor, self._since, self._no_better = evaluation, [], 0
        else:
            self._no_better += 1
            self._since = [*self._since, evaluation][-self.patience - 1 :] if self.patience else []
        return is_best

    @property
    def stop_reason(self) -> str | None:
        """The reason to stop the run, with the numbers; None while there is none."""
        if not self.patience or self._anchor is None or len(self._since) < self.patience:
            return None
        window = [self._anchor, *self._since][-self.patience - 1 :]
        rows = np.asarray([scores for _, scores in window])
        if (~np.isnan(rows).any(axis=0)).sum() < 2:
            return None
        trend = _trend(rows)
        if trend.mean > STILL_RISING * (trend.high - trend.mean):
            return None
        return (
            f"{self._no_better} evaluations in a row, up to step {window[-1][0]}, are no better than that of step "
            f"{self._anchor[0]}, and from step {window[0][0]} on the trend, per evaluation, is {trend} "
            f"(evaluate.patience={self.patience})"
        )

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint holds."""
        kept = {"best": self.best, "anchor": self._anchor, "since": self._since}
        return kept | {"no_better": self._no_better, "score": self.score}

    def restore(self, state: Mapping[str, Any], rows: int | None = None) -> str | None:
        """Goes on from :meth:`state`; where that is of other scores it begins anew, and the note for the user says so.

        Args:
            rows: the number of rows that the score has now.
        """
        had, of = state["anchor"] and len(state["anchor"][1]), state.get("score", self.score)
        if of != self.score or (rows is not None and had and had != rows):
            was, now = (f"{score} of {count} rows" for score, count in ((of, had), (self.score, rows or "the same")))
            return f"The evaluations before are of {was}, those from now on of {now}: the best is looked for anew"

        def read(one: Any) -> tuple[int, list[float]] | None:
            if one is None:
                return None
            return int(one[0]), [np.nan if score is None else float(score) for score in one[1]]

        self.best, self._anchor = read(state["best"]), read(state["anchor"])
        self._since = [evaluation for one in state["since"] if (evaluation := read(one))]
        self._no_better = int(state.get("no_better", len(self._since)))
        self._since = self._since[-self.patience - 1 :] if self.patience else []
        return None


def _trend(evaluations: Sequence[Sequence[float]] | np.ndarray) -> Gain:
    """The mean over rows of the least-squares slope of each row's scores, per evaluation, with its interval.

    >>> _trend([[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]).mean
    1.0
    """
    at = np.arange(len(evaluations)) - (len(evaluations) - 1) / 2
    changes = np.asarray(evaluations, dtype=float) - np.asarray(evaluations[0], dtype=float)  # where none, exactly 0
    slopes = at @ changes / (at @ at)
    return paired_gain(np.zeros(len(slopes)).tolist(), slopes.tolist())
