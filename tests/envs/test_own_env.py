"""An environment of one's own, which derives from TorchRL's and not from ours, trains in both scripts."""

import json
import re
from pathlib import Path

import pytest
import torch
from tiny_runs import run_script

from grpo_rl.assembly.environment import make_env
from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.schema import Settings
from tests.envs.scoring import playing

SOTA = Path(__file__).parents[2] / "sota"
ASYNC = ["inference_model.engine=vllm", "train.optim_batch_size=16"]
PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
(MODULE,) = re.findall(r"`my_env.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def module(written_module):
    return f"{written_module('letters_env', MODULE)}:Letters"


def words(module, tiny_run):
    of_task = ("env.path", "env.eval_path", "env.system_prompt", "env.reward", "evaluate")
    left = [word for word in tiny_run if not word.startswith(of_task)]
    return [*left, f"env.dataset={module}", "env.letter=e", "evaluate.rows=0"]


@pytest.mark.parametrize("turns", [1, 3])
def test_its_groups_are_complete_and_its_rewards_theirs(module, tiny_run, tokenizer, turns):
    config = compose_config("grpo_gsm8k", [*words(module, tiny_run), f"env.turns={turns}", "env.num_envs=2"])
    env = make_env(Settings.read(config), tokenizer)

    def says(prompt, g):
        """A letter more in each response of a group; later turns repeat the first."""
        first, x, _ = prompt.partition(".")[2].partition("x")
        return "e" * (len(first) if x else g) + "x"

    collector = playing(env, tokenizer, says)
    for first in (0, 2):
        groups = collector.collect()
        assert [group.group_id for group in groups] == [first, first + 1]
        for group in groups:
            assert env.query(group.row) == f"Write e, please: {group.group_id + 1}."
            assert group.size == env.repeats and torch.equal(group.rewards, group.reward_parts["share"])
            assert group.rewards[0] == 0 and group.rewards.diff().gt(0).all()
            parts = [
                tokenizer.decode(ids[mask])
                for ids, mask in zip(group.responses, group.trainable.split(group.lengths.tolist()), strict=True)
            ]
            assert parts == [("e" * g + "x" + tokenizer.eos_token) * turns for g in range(env.repeats)]
    state = json.loads(json.dumps(env.state_dict()))
    again = make_env(Settings.read(config), tokenizer)
    again.load_state_dict(state)
    assert again.next_prompts(1)[0].query == "Write e, please: 5."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "own"),
    [
        ("grpo.py", ["env.turns=1"]),
        ("grpo.py", ["env.turns=2"]),
        pytest.param("grpo_async.py", [*ASYNC, "env.turns=2"], marks=pytest.mark.nightly),
    ],
)
def test_it_trains_in_turns_and_while_it_samples(module, tiny_run, tmp_path, script, own):
    folder = run_script(SOTA / script, [*words(module, tiny_run), *own], tmp_path / "run")
    rows = read_metrics(folder / "metrics.jsonl")
    assert rows and all("reward/share" in row and row["grad_norm"] >= 0 for row in rows)


def test_what_is_neither_a_task_nor_an_environment_is_refused(tiny_run):
    with pytest.raises(ValueError, match=r"inherits from grpo_rl\.envs\.base\.Task, or from torchrl"):
        Settings.read(compose_config("grpo_gsm8k", [*tiny_run, "env.dataset=json:JSONDecoder"]))
