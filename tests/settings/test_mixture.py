"""The settings of several tasks, in a mixture or held out: their own, those that they share, what is refused."""

import pytest

from grpo_rl.settings.compose import compose_config, settings_of_eval_tasks, settings_of_mixture
from grpo_rl.settings.derived import eval_source
from grpo_rl.settings.mixture import entries
from grpo_rl.settings.schema import Settings

pytestmark = pytest.mark.slow


def read(*overrides):
    return Settings.read(compose_config("grpo_gsm8k", list(overrides)))


def test_an_entry_is_a_weight_or_a_mapping_with_the_tasks_own_settings():
    settings = read(
        "env.mixture={gsm8k: 0.5, easy: {task: countdown, weight: 3, scale: 2, puzzles: {sizes: [3]}}}",
        "env.repeats=16",
        "env.score_timeout_s=7",
    )
    found = entries(settings)
    assert [(e.task, e.weight, e.scale) for e in found.values()] == [("gsm8k", 0.5, 1.0), ("countdown", 3, 2.0)]
    own = settings_of_mixture(settings)
    assert own["easy"].env.dataset == "countdown" and own["easy"].env["puzzles"]["sizes"] == [3]
    assert own["easy"].env["puzzles"]["max_number"] == 99 and own["gsm8k"].env["reward"]["correctness"] == 2.0
    assert all(of_task.env.repeats == 16 and of_task.env.score_timeout_s == 7 for of_task in own.values())


def test_an_entry_has_its_own_of_what_the_tasks_share_and_a_curriculum_needs_no_plus():
    mixture = "{gsm8k: 1, math: {weight: 1, score_timeout_s: 5, path: a.jsonl, curriculum: {low: 0.3}}}"
    own = settings_of_mixture(read(f"env.mixture={mixture}", "env.curriculum={high: 0.8}"))
    assert [(task.env.score_timeout_s, task.env.path) for task in own.values()] == [(60, None), (5, "a.jsonl")]
    assert own["gsm8k"].env.curriculum == {"high": 0.8} and own["math"].env.curriculum == {"low": 0.3}
    assert read("env.curriculum.high=0.7").env.curriculum == {"high": 0.7}


def test_any_task_may_be_evaluated_next_to_another_with_settings_of_its_own():
    prompts = "{task: prompt_response, rows: 5, path: p.jsonl, env: {reward: 'my:f'}}"
    search = "{task: search_qa, rows: 5, path: p.jsonl, env: {corpus: c.json}}"
    prompts, search = settings_of_eval_tasks(read("evaluate.rows=9", f"evaluate.tasks=[{prompts}, {search}]"))
    assert prompts.env["reward"] == "my:f" and eval_source(prompts).path == "p.jsonl"
    assert (search.env["corpus"], search.env["results"]) == ("c.json", 3)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["env.curriculum={hihg: 0.7}"], r"env\.curriculum: unknown setting 'hihg'; did you mean high"),
        (["env.mixture={gsm8k: 0}"], r"env\.mixture\.gsm8k\.weight is 0"),
        (["env.mixture={gsm8k: {scale: 2}}"], r"env\.mixture\.gsm8k\.weight is missing: the share"),
        (["env.mixture={gsm9k: 1}"], r"env\.mixture\.gsm9k: unknown task 'gsm9k'; did you mean gsm8k\?"),
        (["env.mixture={error: {task: gsm8k, weight: 1}}"], r"env\.mixture\.error: metrics have this name"),
        (["env.mixture={gsm8k: {weight: 1, repeats: 4}}"], r"env\.mixture\.gsm8k\.repeats: all tasks .* set env\.rep"),
        (["env.mixture={gsm8k: 1}", "env.path=x.jsonl"], r"x\.jsonl is of no task .*: env\.mixture\.gsm8k\.p"),
        (["env.mixture={gsm8k: 1}", "mode=sft"], "mode=sft imitates the responses of one task"),
        (["env.mixture={gsm8k: 1}", "loss.advantage=multi_reward"], "loss.advantage=multi_reward compares each part"),
        (
            ["env.mixture={gsm8k: 1}", "evaluate.rows=8", "evaluate.tasks=[{task: gsm8k, rows: 8}]"],
            r"evaluate\.tasks\[0\]: gsm8k is a task of the mixture",
        ),
    ],
)
def test_a_mixture_or_a_curriculum_that_makes_no_sense_is_refused(overrides, told):
    with pytest.raises(ValueError, match=told):
        read(*overrides)
