"""Settings of evaluation while training: what contradicts itself is refused with the remedy."""

from __future__ import annotations

import pytest

from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.schema import Settings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate.samples=4"], "evaluate.samples is set, and evaluate.rows=0 evaluates nothing"),
        (["evaluate.rows=9", "evaluate.patience=3"], "patience=3 counts evaluations in training; set evaluate.freq"),
        (["evaluate.rows=9", "evaluate.tasks=[{task: math}]"], r"tasks\[0\] lacks rows"),
        (["evaluate.rows=9", "evaluate.tasks=[{task: maths, rows: 5}]"], "task is 'maths'; it can be gsm8k"),
        (["evaluate.rows=9", "evaluate.tasks=[{task: math, rows: 1}]"], "rows is 1; it must be a whole number, 2"),
        (["evaluate.rows=9", "evaluate.tasks=[{task: math, rows: 5, k: 2}]"], "has k; it takes task, rows, samples"),
        (["evaluate.rows=9", "evaluate.tasks=[{task: math, rows: 5}, {task: math, rows: 6}]"], "names math twice"),
    ],
)
def test_settings_of_evaluation_that_make_no_sense_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        Settings.read(compose_config("grpo_gsm8k", words))
