"""Settings of evaluation while training: what contradicts itself is refused with the remedy."""

from __future__ import annotations

import pytest

from grpo_rl.envs import math
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.declaration import plain
from grpo_rl.settings.derived import eval_source
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.task_settings import settings_of_eval_tasks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate.samples=4"], "evaluate.samples is set, and evaluate.rows=0 evaluates nothing"),
        (["evaluate.rows=9", "evaluate.patience=3"], "patience=3 counts evaluations in training; set evaluate.freq"),
        (["evaluate.rows=9", "evaluate.tasks=[{task: math}]"], r"tasks\[0\] lacks rows"),
        (
            ["evaluate.rows=9", "evaluate.tasks=[{task: maths, rows: 5}]"],
            "tasks: unknown task 'maths'; did you mean math",
        ),
        (["evaluate.rows=9", "evaluate.tasks=[{task: math, rows: 1}]"], r"tasks\[0\].rows is 1; it must be 2 or more"),
        (["evaluate.rows=9", "evaluate.tasks=[{task: math, rows: 5, k: 2}]"], "unknown setting 'k'"),
        (["evaluate.rows=9", "evaluate.tasks=[{task: math, rows: 5}, {task: math, rows: 6}]"], "names math twice"),
        (
            ["evaluate.rows=9", "evaluate.tasks=[{task: math, rows: 5, env: {reward: {corectness: 1}}}]"],
            r"^evaluate.tasks\[0\]: .*corectness; did you mean env.reward.correctness",
        ),
        (["evaluate.rows=9", "evaluate.tasks=[{task: math, rows: 4, env: {reward: [1]}}]"], r"^evaluate.tasks\[0\]: "),
        (
            ["evaluate.rows=9", "evaluate.tasks=[{task: math, rows: 4, env: {eval_path: y}}]"],
            r"^evaluate.tasks\[0\].env.eval_path has no effect here; use task, path",
        ),
    ],
)
def test_settings_of_evaluation_that_make_no_sense_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        settings_of_eval_tasks(Settings.read(compose_config("grpo_gsm8k", words)))


@pytest.mark.parametrize(
    ("entry", "own"),
    [
        ("{task: prompt_response, rows: 5, path: p.jsonl, env: {reward: 'my:f'}}", {"reward": "my:f"}),
        ("{task: prompt_response, rows: 5, path: p.jsonl, env: {reward: {f: 1}}}", {"reward": {"f": 1}}),
        ("{task: search_qa, rows: 5, path: p.jsonl, env: {corpus: c.json}}", {"corpus": "c.json", "results": 3}),
        ("{task: search_qa, rows: 5, env: {results: 2}}", {"corpus": None, "results": 2}),
    ],
)
def test_any_task_may_be_evaluated_beside_another_with_settings_of_its_own(entry, own):
    run = Settings.read(compose_config("grpo_gsm8k", ["evaluate.rows=9", f"evaluate.tasks=[{entry}]"]))
    [extra] = settings_of_eval_tasks(run)
    assert {key: plain(extra.env[key]) for key in own} == own
    assert eval_source(extra).path == run.evaluate.tasks[0].get("path")


def source(*words):
    return eval_source(Settings.read(compose_config("grpo_gsm8k", words)))


def test_held_out_rows_of_the_same_repository_have_its_subset_and_revision():
    pinned = ["env.path=hf:a/b:main", "env.revision=v1", "env.columns={question: q}"]
    same = source(*pinned, "env.eval_split=dev")
    assert (same.path, same.split, same.revision) == ("hf:a/b:main", "dev", "v1")
    other = source(*pinned, "env.eval_path=a/b:socratic", "env.eval_split=dev")
    assert (other.path, other.subset, other.split, other.revision) == ("a/b:socratic", None, "dev", "v1")
    subset = source("env.path=hf:a/b", "env.subset=main", "env.eval_path=hf:a/b")
    assert (subset.subset, subset.columns) == ("main", {})


def test_a_revision_of_another_repository_is_neither_dropped_nor_asked_of_the_held_out_one():
    with pytest.raises(
        ValueError, match="env.revision=v1 is of hf:a/b, and env.eval_path=hf:c/d is another repo.*copy"
    ):
        source("env.path=hf:a/b", "env.revision=v1", "env.eval_path=hf:c/d")
    with pytest.raises(ValueError, match="env.subset=main is of the rows to train on.*its path: c/d:SUBSET"):
        source("env.subset=main", "env.eval_path=c/d")
    assert source("env.path=hf:a/b", "env.revision=v1", "env.eval_path=rows.jsonl").revision is None
    settings = Settings.read(compose_config("grpo_math", ["env.revision=v1"]))
    with pytest.raises(ValueError, match="env.revision=v1 .*env.eval_path"):
        math.load_rows(eval_source(settings), "test")
