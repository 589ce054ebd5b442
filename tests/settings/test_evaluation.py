"""Settings of evaluation while training: what contradicts itself is refused with the remedy."""

from __future__ import annotations

import pytest

from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.derived import eval_source
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.task_settings import settings_of_eval_tasks

pytestmark = pytest.mark.slow


def test_any_task_may_be_evaluated_next_to_another_with_settings_of_its_own():
    entries = (
        "{task: prompt_response, rows: 5, path: p.jsonl, env: {reward: 'my:f'}}, "
        "{task: search_qa, rows: 5, path: p.jsonl, env: {corpus: c.json}}"
    )
    run = Settings.read(compose_config("grpo_gsm8k", ["evaluate.rows=9", f"evaluate.tasks=[{entries}]"]))
    prompts, search = settings_of_eval_tasks(run)
    assert prompts.env["reward"] == "my:f" and eval_source(prompts).path == "p.jsonl"
    assert (search.env["corpus"], search.env["results"]) == ("c.json", 3)
