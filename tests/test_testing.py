"""check_task finds what breaks a task's promises, and lets every task of ours pass."""

import itertools
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo_rl.collectors.sync import SyncCollector
from grpo_rl.envs.base import Reward, ScoreError, Task
from grpo_rl.envs.calculator import Calculator
from grpo_rl.envs.code import Code
from grpo_rl.envs.countdown import Countdown
from grpo_rl.envs.gsm8k import GSM8K
from grpo_rl.envs.ifeval import IFEval
from grpo_rl.envs.math import Math
from grpo_rl.envs.prompt_response import PromptResponse
from grpo_rl.envs.rewards.examples import reward_len
from grpo_rl.envs.search_qa import SearchQA
from grpo_rl.envs.tools.search_index import Document, SearchIndex
from grpo_rl.testing import check_task

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parent.parent / "docs" / "tasks.md"


class Good(Task):
    reward_parts = ("length",)
    rows = ({"q": "a"}, {"q": "b"})

    def prompt(self, row):
        return [{"role": "user", "content": row["q"]}]

    def score(self, row, response):
        return Reward({"length": float(len(response))})


class Forgetful(Good):
    turn = itertools.count()

    def score(self, row, response):
        return Reward({"length": float(next(self.turn))})


class Restless(Good):
    turn = itertools.count()

    def prompt(self, row):
        return [{"role": "user", "content": f"{row['q']} {next(self.turn)}"}]


class Crashing(Good):
    def score(self, row, response):
        return Reward({"length": 1.0 / len(response)})


def test_a_mask_an_id_a_group_or_a_gradient_that_is_wrong_is_named(monkeypatch):
    """Promises that an environment or a collector breaks, not a task."""
    real = SyncCollector.collect

    def broken(change):
        monkeypatch.setattr(SyncCollector, "collect", lambda self: [change(group) for group in real(self)])

    for change, message in (
        (lambda g: replace(g, trainable=torch.zeros_like(g.trainable)), "response has no trainable token"),
        (lambda g: replace(g, response_ids=g.response_ids + 1), "not a whole response"),
        (lambda g: replace(g, prompt_ids=g.prompt_ids[1:]), "saw other ids"),
        (lambda g: g.with_only([0, 1, 2]), "not complete"),
        (lambda g: replace(g, log_probs=g.log_probs + torch.nan), "not finite"),
    ):
        broken(change)
        with pytest.raises(AssertionError, match=message):
            check_task(Good())


SUMS = [{"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}, {"question": "2 + 3?", "answer": "2 + 3 = 5\n#### 5"}]
PAPERS = [Document("Emma", "Emma is a novel by Jane Austen."), Document("Jane Austen", "She was born in Steventon.")]


TASKS = {
    "gsm8k": lambda: GSM8K(SUMS),
    "calculator": lambda: Calculator(SUMS),
    "math": lambda: Math([{"problem": "1 + 1?", "answer": "2"}, {"problem": "2 + 3?", "answer": "5"}]),
    "countdown": lambda: Countdown([{"numbers": [1, 2], "target": 3}, {"numbers": [4, 2], "target": 8}]),
    "ifeval": lambda: IFEval(
        [{"key": 1, "prompt": text, "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]} for text in "ab"]
    ),
    "search_qa": lambda: SearchQA(
        [{"question": text, "answer": "Steventon", "documents": ["Emma"]} for text in "ab"], SearchIndex(PAPERS)
    ),
    "code": lambda: Code(
        [{"question": text, "tests": [{"input": "a", "output": "a"}]} for text in "ab"], sandbox="i_accept_no_sandbox"
    ),
    "prompt_response": lambda: PromptResponse([{"prompt": "a"}, {"prompt": "b"}], reward=reward_len),
}


@pytest.mark.parametrize("name", TASKS)
def test_every_task_of_ours_passes(name):
    check_task(TASKS[name](), responses=["2", "<answer>5</answer>", "no number at all"])


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        (Forgetful, AssertionError, "other rewards each time"),
        (Restless, AssertionError, "other messages each time"),
        (Crashing, ScoreError, "ZeroDivisionError"),
    ],
)
def test_a_broken_promise_is_named(task, error, message):
    with pytest.raises(error, match=message):
        check_task(task())


def test_the_documentations_task_is_checked_as_it_is_printed_there(tokenizer, tmp_path, monkeypatch):
    task, *blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len([line for line in task.split("class ")[1].splitlines() if line.strip()]) <= 20
    (tmp_path / "my_tasks.py").write_text(task)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict = {}
    exec(compile("\n".join(blocks), str(DOCS), "exec"), names)  # our own page, not data
    monkeypatch.delitem(sys.modules, "my_tasks")
    rewarded = names["Rhyme"]([]).score({"word": "night"}, "Light.")
    assert rewarded.total == 1.2
    env = names["make_env"](tokenizer)
    env.check_prompts()
    assert env.batch_size == (32,) and all(env.encode(row) for row in names["held_out"])
