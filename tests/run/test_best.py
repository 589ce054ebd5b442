"""The best evaluation and early stopping, also over a resume."""

import json
import math

import numpy as np
import pytest

from grpo_rl.run.held_out import BestTracker

ROWS = 100


def stopped_at(gain: float, evaluations: int, seed: int) -> int | None:
    """The evaluation at which a simulated run with a patience of 6 is stopped, if at all.

    Each row has a difficulty of its own, so that its reward, 0 or 1, mostly stays; its chance of 1 rises by ``gain``
    from one evaluation to the next.
    """
    rng = np.random.default_rng(seed)
    chance, tracker = rng.beta(0.5, 1.2, ROWS), BestTracker(6)
    for step in range(evaluations):
        tracker.add(step, (rng.random(ROWS) < np.clip(chance + gain * step, 0, 1)).astype(float).tolist())
        if tracker.stop_reason:
            return step
    return None


def test_a_flat_run_is_stopped_soon_and_one_that_still_improves_is_not():
    """The numbers of docs/evaluation.md."""
    stops = [stopped_at(0.0, 25, seed) for seed in range(200)]
    assert None not in stops and float(np.median([stop for stop in stops if stop])) <= 9
    assert not any(stopped_at(0.03, 14, seed) for seed in range(200))


def test_a_run_that_gets_worse_is_stopped_and_keeps_its_best():
    tracker = BestTracker(patience=2)
    scores = [[0.0, 0, 0, 1, 1, 0], [1.0] * 6, [0.0] * 6, [0.0, 1, 0, 0, 0, 0]]
    assert [tracker.add(step, row) for step, row in enumerate(scores)] == [True, True, False, False]
    assert tracker.best == (1, [1.0] * 6)
    assert "2 evaluations in a row are no better than that of step 1" in str(tracker.stop_reason)
    assert "evaluate.patience=2" in str(tracker.stop_reason)


def test_of_equal_evaluations_the_first_is_the_best_and_rows_without_a_score_are_left_out():
    tracker = BestTracker()
    assert tracker.add(0, [1.0, 0.0, math.nan, 1.0])
    assert not tracker.add(5, [1.0, 0.0, 1.0, math.nan])  # two thirds as well
    assert tracker.add(10, [1.0, math.nan, 1.0, 1.0])
    assert tracker.stop_reason is None  # no patience, no stop


def test_an_evaluation_without_scores_is_passed_over():
    tracker, none = BestTracker(1), [math.nan] * 4
    assert not tracker.comparable(none) and not tracker.add(0, none) and tracker.best is None
    assert tracker.add(1, [0.0, 1.0, 0.0, 1.0])
    assert not tracker.add(2, [math.nan, math.nan, math.nan, 1.0])  # one row
    assert tracker.best == (1, [0.0, 1.0, 0.0, 1.0]) and tracker.stop_reason is None


def test_scores_of_another_name_or_of_other_rows_are_not_compared_with():
    before = BestTracker(2, "reward")
    before.add(0, [0.0, 3.0, 2.0])
    for now, rows, what in (("accuracy", 3, "accuracy of 3 rows"), ("reward", 4, "reward of 4 rows")):
        tracker = BestTracker(2, now)
        note = tracker.restore(json.loads(json.dumps(before.state())), rows)
        assert "reward of 3 rows" in str(note) and what in str(note) and tracker.best is None
    tracker = BestTracker(2, "reward")
    assert tracker.restore(before.state(), 3) is None and tracker.best == before.best


@pytest.mark.parametrize("cut", [1, 3, 4])
def test_a_tracker_goes_on_from_its_state_as_if_it_had_not_been_cut_off(cut):
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 2, 20).astype(float).tolist() for _ in range(6)]
    whole, first, second = BestTracker(3), BestTracker(3), BestTracker(3)
    for step, scores in enumerate(rows):
        if step == cut:
            second.restore(json.loads(json.dumps(first.state())))
        whole.add(step, scores)
        (first if step < cut else second).add(step, scores)
    assert second.best == whole.best and second.stop_reason == whole.stop_reason
    assert json.dumps(second.state()) == json.dumps(whole.state())
