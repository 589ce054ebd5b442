"""Episodes: environments with reset and step keep what tasks promise, and end once."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import pytest

from grpo_rl.envs.episodes import Episodes
from grpo_rl.testing import check_task
from tests.envs.conftest import said


class Count(Episodes[dict]):
    """Say a number to add; the episode ends at the row's goal or above; a step earns what is added."""

    def __init__(self, rows):
        super().__init__(rows, "Count.")
        self.opened = self.closed = 0

    def reset(self, row):
        self.opened += 1
        return {"sum": 0, "goal": row["goal"]}, f"Reach {row['goal']}."

    def step(self, state, text):
        number = int(text) if text.isdecimal() else 0
        state["sum"] += number
        return f"{state['sum']}", number, state["sum"] >= state["goal"]

    def close(self, state):
        assert not state.get("closed")
        state["closed"] = True
        self.closed += 1


def test_equal_conversations_have_an_episode_each_and_all_are_closed_once():
    task, row = Count([{"goal": 5}]), {"goal": 5}
    with ThreadPoolExecutor(8) as threads:
        dialogs = list(threads.map(lambda texts: said(task, row, *texts), [["2", "3"]] * 5 + [["1", "1"], ["9"]]))
    assert [task.score_dialog(row, messages).total for messages in dialogs] == [5.0] * 5 + [2.0, 9.0]
    assert dialogs[0][-1]["content"] == "3" and dialogs[5][-1] == {"role": "user", "content": "2"}
    assert task.opened == task.closed >= 8  # one for the prompt, or more where threads ask for it at the same time


def test_a_last_message_that_met_the_limit_of_turns_is_stepped_before_it_is_paid():
    task, row = Count([]), {"goal": 50}
    messages = [*said(task, row, "2"), {"role": "assistant", "content": "4"}]
    assert task.score_dialog(row, messages).total == 6.0
    assert task.opened == task.closed


def test_a_conversation_is_played_again_where_its_episode_is_missing():
    task, row = Count([]), {"goal": 50}
    messages = said(task, row, "2", "x", "4")
    other = pickle.loads(pickle.dumps(task))
    assert other.score_dialog(row, messages) == task.score_dialog(row, messages)
    assert other.score_dialog(row, messages).total == 6.0
    assert copy.copy(task).without_rows().score(row, "60").total == 60.0


def test_episodes_of_conversations_that_were_dropped_are_closed_when_there_are_many(monkeypatch):
    monkeypatch.setattr(Count, "max_open", 3)
    task, row = Count([]), {"goal": 50}
    for number in (0, 1, 2, 3, 3, 3, 3, 3):
        messages = said(task, row, str(number))
    assert task.opened - task.closed == 3
    assert [task.score_dialog(row, messages).total for _ in range(4)] == [3.0] * 4  # the last is played again
    assert task.opened == task.closed


@pytest.mark.parametrize("name", ["step", "cut_off", "measures"])
def test_an_episode_is_closed_where_its_environment_fails(name):
    task, row = Count([]), {"goal": 50}
    messages = said(task, row, "2", "4")
    assert task.score_dialog(row, messages).total == 6.0  # from here on it is played again
    setattr(task, name, MagicMock(side_effect=ConnectionError(name)))
    with pytest.raises(ConnectionError, match=name):
        task.score_dialog(row, messages)
    assert task.opened == task.closed == 3


@pytest.mark.slow
def test_a_stepped_environment_keeps_a_tasks_promises():
    check_task(Count([{"goal": 5}, {"goal": 7}]), responses=["1", "2", "7", "no number"])
