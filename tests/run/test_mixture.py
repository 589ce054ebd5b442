"""A run of a mixture in the main script: metrics and held-out scores of each task, its report, and its resumption."""

import json
from pathlib import Path
from string import digits

import pandas as pd
import pytest

from grpo_rl.monitor.completions import TURN_ENDS
from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.report.charts import build
from tests.run.test_run import assert_resumes, run

NAMES = ("gsm8k", "halved", "again")
pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.nightly]


@pytest.fixture(scope="module")
def tiny(tiny_run):
    """The tiny run with three tasks instead of one, one of which has two turns."""
    path = next(word.partition("=")[2] for word in tiny_run if word.startswith("env.path="))
    shared = [word for word in tiny_run if not word.startswith("env.") or word.startswith(("env.num", "env.repeats"))]
    rows = f"path: '{path}', eval_path: '{path}', system_prompt: null"
    entries = [
        f"gsm8k: {{weight: 0.5, {rows}, reward: {{reasoning_pattern: '[0-9]'}}}}",
        f"halved: {{task: gsm8k, weight: 0.3, scale: 0.5, {rows}, reward: {{reasoning_pattern: '[0-4]'}}}}",
        f"again: {{task: 'asks_again:Again', weight: 0.4, path: '{path}', eval_path: '{path}'}}",
    ]
    # A digit ends a turn, as turns that are cut off have no reply.
    shared += [f"sampling.stop={list(digits)}", "sampling.max_new_tokens=24", "train.total_dialog_turns=32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        yield [*shared, f"env.mixture={{{', '.join(entries)}}}", "env.max_turns=2", "evaluate.rows=3"]


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    return run(tiny, tmp_path_factory.mktemp("mixture") / "run")


def test_each_task_has_its_metrics_its_held_out_scores_and_its_curves(finished):
    rows = read_metrics(finished)
    steps = [row for row in rows if "reward/mean" in row]
    assert all(sum(row[f"mixture/{name}"] for name in NAMES) == 4 for row in steps)
    for row in steps:
        means = [row[f"reward/{name}/mean"] * row[f"mixture/{name}"] for name in NAMES if row[f"mixture/{name}"]]
        assert sum(means) / 4 == pytest.approx(row["reward/mean"], abs=1e-6)
    seen = {name for row in steps for name in row}
    assert {f"reward/gsm8k/{n}" for n in ("mean", "correctness", "zero_std_fraction")} <= seen
    assert "response/again/truncated_fraction" in seen
    held_out = [row for row in rows if "eval/reward" in row]
    assert len(held_out) == 2
    of_tasks = [held_out[0][f"eval/{name}/reward"] for name in NAMES]
    assert sum(of_tasks) / 3 == pytest.approx(held_out[0]["eval/reward"])
    assert {"eval/gsm8k/accuracy", "eval/gsm8k/correctness", "eval/again/truncated_fraction"} <= held_out[0].keys()
    drawn = build(finished)["charts"]
    curves = dict(series[:2] for chart in drawn if chart["title"] == "Reward by task" for series in chart["series"])
    assert curves == {f"reward/{name}/mean": name for name in NAMES if f"reward/{name}/mean" in seen}
    logged = pd.read_parquet(finished / "completions.parquet").to_dict("records")
    assert len(logged) == 32
    for row in logged:  # the responses to a task have its turns and its parts of the reward
        name = NAMES[row["row"] // 6]  # six rows of each task
        turns = {1, 3} if row["truncated"] else {3}
        assert len(row[TURN_ENDS]) in (turns if name == "again" else {1})
        parts = [row[part] for part in row if part.startswith(f"reward_{name}/")]
        assert parts and sum(parts) == pytest.approx(row["reward"], abs=1e-6)
    assert any(len(row[TURN_ENDS]) == 3 for row in logged)


def test_a_resumed_mixture_is_the_run_that_went_on_to_the_last_bit(finished, tiny, tmp_path):
    assert_resumes(finished, tiny, 1, cut := tmp_path / "cut")
    assert json.loads((cut / "summary.json").read_text())["steps"] == 2
