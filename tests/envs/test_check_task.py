"""Every task of ours keeps what `grpo_rl.testing.check_task` asks of anyone's."""

from __future__ import annotations

import pytest

from grpo_rl.envs.calculator import Calculator
from grpo_rl.envs.code import Code
from grpo_rl.envs.countdown import Countdown
from grpo_rl.envs.gsm8k import GSM8K
from grpo_rl.envs.ifeval import IFEval
from grpo_rl.envs.math import Math
from grpo_rl.envs.prompt_response import PromptResponse
from grpo_rl.envs.rewards import with_rewards
from grpo_rl.envs.search_qa import SearchQA
from grpo_rl.envs.tools.search_index import Document, SearchIndex
from grpo_rl.testing import RESPONSES, check_task

WORDS = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 40?", "answer": "#### 42"}]
FORMS = [
    {"key": 1, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    {"key": 2, "prompt": "Shout.", "instruction_id_list": ["change_case:english_capital"], "kwargs": [{}]},
]
QUESTIONS = [
    {"question": "Who wrote Emma?", "answer": "Jane Austen", "documents": ["Emma"]},
    {"question": "Is water wet?", "answer": "yes", "documents": []},
]
ANY = "i_accept_no_sandbox"
TASKS = {
    "gsm8k": lambda: GSM8K(WORDS),
    "ifeval": lambda: IFEval(FORMS),
    "math": lambda: Math([{"problem": "1?", "answer": "1"}, {"problem": "x?", "answer": "x"}]),
    "calculator": lambda: Calculator(WORDS),
    "countdown": lambda: Countdown([{"numbers": [3, 4], "target": 7}, {"numbers": [2, 5], "target": 10}]),
    "search_qa": lambda: SearchQA(QUESTIONS, SearchIndex([Document("Emma", "A novel by Jane Austen.")])),
    "code": lambda: Code(
        [{"question": f"Print {n}.", "tests": [{"input": "", "output": n}]} for n in "12"], sandbox=ANY
    ),
    "prompt_response": lambda: PromptResponse(
        [{"prompt": "a"}, {"prompt": "b"}], reward="grpo_rl.envs.rewards.examples:sentence_ending"
    ),
    "with rewards": lambda: with_rewards(GSM8K(WORDS), {"length": {"weight": 0.5}, "repetition_penalty": 1.0}),
}


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_our_tasks_keep_their_promises(name):
    task = TASKS[name]()
    calls = [tool.written("json") for tool in getattr(task, "tools", ())]
    check_task(task, responses=[*calls, *RESPONSES])
