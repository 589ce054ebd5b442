"""Settings of evaluation while training: what contradicts itself is refused with the remedy."""

from __future__ import annotations

import pytest

from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.declaration import plain
from grpo_rl.settings.derived import eval_source
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.task_settings import settings_of_eval_tasks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("entry", "own"),
    [
        ("{task: prompt_response, rows: 5, path: p.jsonl, env: {reward: 'my:f'}}", {"reward": "my:f"}),
        ("{task: search_qa, rows: 5, path: p.jsonl, env: {corpus: c.json}}", {"corpus": "c.json", "results": 3}),
    ],
)
def test_any_task_may_be_evaluated_beside_another_with_settings_of_its_own(entry, own):
    run = Settings.read(compose_config("grpo_gsm8k", ["evaluate.rows=9", f"evaluate.tasks=[{entry}]"]))
    [extra] = settings_of_eval_tasks(run)
    assert {key: plain(extra.env[key]) for key in own} == own
    assert eval_source(extra).path == run.evaluate.tasks[0].get("path")
