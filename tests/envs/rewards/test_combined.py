import pkgutil

import pytest

from grpo_rl.envs.gsm8k import GSM8K
from grpo_rl.envs.rewards.combined import with_rewards
from grpo_rl.envs.rewards.registry import REWARDS, Known
from grpo_rl.envs.task import Messages, Reward, Task

ROWS = [{"question": "What is 50 - 8?", "answer": "#### 42"}, {"question": "3 + 4?", "answer": "#### 7"}]
RIGHT, WRONG = "42", "41"


class Guess(Task):
    """Row n wants n; the response `!` crashes the scorer."""

    reward_parts = ("hit",)
    rows = [{"wanted": str(n)} for n in range(3)]

    def prompt(self, row: dict) -> Messages:
        return [{"role": "user", "content": "Guess."}]

    def score(self, row: dict, response: str) -> Reward:
        if response == "!":
            raise KeyError("gold")
        return Reward({"hit": float(response.strip() == row["wanted"])})


def words(texts) -> list[int]:
    return [len(text.split()) for text in texts]


def test_a_length_is_judged_within_the_responses_to_one_prompt():
    task = with_rewards(GSM8K(ROWS), {"length": 1.0})
    responses = [RIGHT, "It is " + RIGHT, "Surely " + WRONG, "7", "It is, I think, 7"]
    rows = [ROWS[0]] * 3 + [ROWS[1]] * 2
    lengths = [2, 8, 9, 1, 17]
    assert [len(response) for response in responses] == lengths
    # First group: 0.5 - (2 - 2) / 7, 0.5 - 6 / 7, and min(0, 0.5 - 7 / 7) for the wrong one. Second: the extremes.
    expected = [0.5, 0.5 - 6 / 7, -0.5, 0.5, -0.5]
    assert [reward.parts["length"] for reward in task.score_many(rows, responses)] == pytest.approx(expected)
    # Alone, there is no one to be compared with.
    assert task.score(ROWS[0], responses[1]).parts["length"] == 0.0


def test_a_response_whose_scorer_failed_is_out_of_its_group():
    task = with_rewards(Guess(), {"length": {"correct": "hit"}})
    row = task.rows[1]
    first, failed, last = task.score_many([row] * 3, ["1", "!", "1   "])
    assert (first.parts, last.parts) == ({"hit": 1.0, "length": 0.5}, {"hit": 1.0, "length": -0.5})
    assert isinstance(failed, KeyError)


def test_a_reward_that_fails_costs_its_response_and_one_of_a_group_its_group_only(monkeypatch):
    monkeypatch.setitem(REWARDS, "brittle", Known(lambda text: 1 / (len(text) - 1)))
    together = Known(lambda texts: [1 / (len(text) - 2) for text in texts], whole_group=True)
    monkeypatch.setitem(REWARDS, "together", together)
    task = with_rewards(GSM8K(ROWS), {"brittle": 1.0, "length": 1.0})
    good, failed, long = task.score_many([ROWS[1]] * 3, ["07", "7", "007"])
    assert good.parts["brittle"] == 1.0 and good.parts["length"] == 0.5 and long.parts["length"] == -0.5
    assert isinstance(failed, ZeroDivisionError)
    task = with_rewards(GSM8K(ROWS), {"together": 1.0})
    results = task.score_many([ROWS[0], ROWS[0], ROWS[1]], ["42", "it is 42", "7"])
    assert [type(result) for result in results] == [ZeroDivisionError, ZeroDivisionError, Reward]


def test_what_a_task_cannot_offer_is_named():
    with pytest.raises(ValueError, match=r"hits is no other part of the reward, which has hit, cosine"):
        with_rewards(Guess(), {"cosine": {"correct": "hits"}})
    with pytest.raises(ValueError, match="needs gold answers, and Guess has none"):
        with_rewards(Guess(), {"accuracy": 1.0})


def test_right_may_be_what_accuracy_finds_even_at_weight_zero(monkeypatch):
    same = Known(lambda text, gold: float(text == gold), ("text", "gold"))
    monkeypatch.setitem(REWARDS, "accuracy", same)
    # Named before accuracy in the config, and judged after it all the same.
    task = with_rewards(GSM8K(ROWS, correctness=0.0), {"cosine": {"correct": "accuracy"}, "accuracy": 0.0})
    reward = task.score(ROWS[1], "7")
    assert reward.parts["accuracy"] == 0.0
    assert reward.parts["cosine"] > 0.99


def test_lengths_are_counted_in_the_unit_that_is_asked_for():
    config = {"soft_overlong_punishment": {"max_len": 4, "cache": 4}, "cosine": {"max_len": 8}}
    task = with_rewards(GSM8K(ROWS), config, words)
    # Three words of a cache of four; eight characters, the wave's end.
    parts = task.score(ROWS[0], "42 it is").parts
    assert parts["soft_overlong_punishment"] == -0.75 and parts["cosine"] == 0.5
    config["cosine"]["unit"] = "tokens"
    assert with_rewards(GSM8K(ROWS), config, words).score(ROWS[0], "42 it is").parts["cosine"] > 0.8


def test_parts_are_added_under_their_names_with_their_weights():
    config = {"tag_count": 2.0, "cosine": None, "repetition_penalty": {"weight": 0.5, "ngram_size": 1}}
    task = with_rewards(GSM8K(ROWS), config)
    assert task.reward_parts == (*GSM8K.reward_parts, "tag_count", "repetition_penalty")
    reward = task.score(ROWS[0], "<think>\nno no\n</think>\n42")
    # Two of four tags; of the words <think> no no </think> 42, one of five came before.
    assert reward.parts == {
        "correctness": 2.0, "reasoning_format": 0.0, "answer_format": 0.0, "tag_count": 1.0,
        "repetition_penalty": pytest.approx(-0.1),
    }  # fmt: skip


def test_every_reward_that_a_config_can_name_is_there():
    assert all(callable(pkgutil.resolve_name(known.function)) for known in REWARDS.values())


OWN = """
def brief(length, correct, *, limit: int = 100):
    return 1 - length / limit if correct else 0.0

def asks(text, row): return 0.0
def idle(): return 0.0
def raises(gold): return len(gold) / 0
def says(text): return "yes"
"""


def test_a_function_of_ones_own_is_added_to_a_shipped_tasks_rewards(written_module):
    written_module("own_rewards", OWN)
    task = with_rewards(GSM8K(ROWS), {"short": {"function": "own_rewards:brief", "weight": 2.0, "limit": 10}})
    right, wrong = (task.score(ROWS[0], f"It is {answer}").parts for answer in (RIGHT, WRONG))
    assert right["short"] == pytest.approx(2 * (1 - 8 / 10)) and wrong["short"] == 0.0
    for setting, message in {
        "asks": "asks for row; it can ask for text, length, correct",
        "idle": "asks for nothing; it can ask for text",
        "raises": r"can't score an empty response: ZeroDivisionError: .*own_rewards.py, line 7\)",
        "says": "returned 'yes' for an empty response",
        "missing": "has no missing",
    }.items():
        with pytest.raises(ValueError, match=f"^env.rewards.own.*{message}"):
            with_rewards(GSM8K(ROWS), {"own": {"function": f"own_rewards:{setting}"}}).try_own()
    with pytest.raises(ValueError, match="env.rewards.own.limit is 1.5; it should be a valid integer"):
        with_rewards(GSM8K(ROWS), {"own": {"function": "own_rewards:brief", "limit": 1.5}})
    with pytest.raises(ValueError, match="brief.*one of your own needs `function: package.module:function`"):
        with_rewards(GSM8K(ROWS), {"brief": 1.0})
