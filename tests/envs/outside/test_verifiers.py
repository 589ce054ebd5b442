"""Verifiers: its tasksets and environments are played as they are, with the policy as their one agent."""

import importlib.util
import pickle

import pytest

from grpo_rl.envs.verifiers import Verifiers, load_rows
from grpo_rl.testing import check_task
from tests.envs.conftest import said

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None,
    reason="needs verifiers==0.4.*, which dev leaves out (CONTRIBUTING.md)",
)


def test_a_taskset_has_its_prompts_rewards_and_metrics():
    rows = load_rows(name="small-taskset")
    task = Verifiers(rows)
    assert len(rows) == 9 and len(load_rows(split="test", name="small-taskset")) == 1
    assert task.prompt(rows[3]) == [{"role": "system", "content": "Add."}, {"role": "user", "content": "3 + 1?"}]
    assert task.gold(rows[3]) == "4"
    reward = task.score_dialog(rows[3], said(task, rows[3], "4"))
    assert reward.parts == {"episode": 2.0 + 0.5 + 1.0}  # 2 x right, brief, asked
    assert reward.measures == {"right": 2.0, "brief": 0.5, "asked": 1.0, "turns": 1.0}
    assert task.score(rows[3], "no idea").parts == {"episode": 1.0}
    assert pickle.loads(pickle.dumps(task)).score(rows[3], "4") == reward


def test_an_environment_that_talks_leads_the_conversation_and_ends_it():
    task = Verifiers(rows := load_rows(name="small-dialog", episodes=5, held_out=0.2))
    messages = said(task, rows[1], "7", "2", "unread")
    assert [message["content"] for message in messages] == ["1 + 1?", "7", "Once more.", "2"]
    ended = task.score_dialog(rows[1], messages)
    assert ended.parts["episode"] == 2.0 + 0.5 + 1.0 + 0.25 and ended.measures["turns"] == 2.0
    # It ends after its three turns, at a stop of its task's, and where a limit of ours cuts it off, and is scored then.
    assert [m["content"] for m in said(task, rows[1], *"3456")] == ["1 + 1?", "3", "Once more.", "4", "Once more.", "5"]
    assert said(task, rows[1], "stop")[-1]["content"] == "stop"
    assert task.score_dialog(rows[1], said(task, rows[1], "7")).measures["patience"] == 0.25


def test_what_the_policy_cannot_play_is_refused():
    with pytest.raises(ValueError, match=r"env.name=small-dialog makes tasks without end; set env.episodes"):
        load_rows(name="small-dialog")
    with pytest.raises(ValueError, match="env.name=harbor prepares a machine for each task; the policy plays the one"):
        load_rows(name="harbor", taskset={"dataset": "x"})


@pytest.mark.slow
def test_an_environment_of_verifiers_keeps_a_tasks_promises():
    check_task(Verifiers(load_rows(name="small-dialog", episodes=4)), responses=["1", "2", "stop", "no idea"])
