from __future__ import annotations

import asyncio
import os
import pickle
import sys

import numpy as np
import pytest
import torch

from grpo_rl.envs.rewards.functions import RewardFunction, RewardFunctionError

BATCH = {"prompt": ["a", "b"], "completion": ["x", "yy"], "title": ["T", "U"]}


def judge(function, batch=BATCH):
    return RewardFunction(function, list(batch))(batch, len(batch["completion"]))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of one's own, where Python finds it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str, name: str = "own_rewards"):
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


def test_a_function_gets_the_columns_that_it_names():
    assert judge(lambda completion: [len(text) for text in completion]) == [1.0, 2.0]
    assert judge(lambda title, *, prompt: [title == ["T", "U"], prompt == ["a", "b"]]) == [1.0, 1.0]
    assert judge(lambda **columns: [len(columns), 0]) == [3.0, 0.0]
    assert judge(lambda completion, author=None: [author is None, 0]) == [1.0, 0.0]


def test_a_column_that_is_not_there_is_named_before_anything_is_scored():
    with pytest.raises(ValueError, match="asks for author, and what it can get by name is completion, prompt, title"):
        RewardFunction(lambda completion, author: [], list(BATCH))


@pytest.mark.parametrize(
    "result",
    [
        [1, 0.5], (1.0, 0.5), np.array([1.0, 0.5]), [np.float32(1), np.float64(0.5)], torch.tensor([1.0, 0.5]),
        [torch.tensor(1.0), torch.tensor([0.5])], [True, 0.5],
    ],
)  # fmt: skip
def test_numbers_may_come_in_any_form(result):
    values = judge(lambda completion: result)
    assert values == [1.0, 0.5] and [type(value) for value in values] == [float, float]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], r"returned 1 numbers for 2 responses; it must return one for each"),
        (1.0, r"returned 1\.0; it must return a list of numbers"),
        ("12", r"returned '12'; it must return a list"),
        ({"a": 1, "b": 2}, r"returned {'a': 1, 'b': 2}; it must return a list"),
    ],
)
def test_a_result_of_another_form_is_an_error_that_names_the_function(result, message):
    def own(completion):
        return result

    with pytest.raises(RewardFunctionError, match=f"^own {message}"):
        judge(own)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -np.inf, torch.tensor(float("nan")), "1", [1], 10**400])
def test_what_is_no_finite_number_costs_its_response_only(value):
    failed, good = judge(lambda completion: [value, 0.5])
    assert isinstance(failed, RewardFunctionError) and "<lambda> returned" in str(failed)
    assert good == 0.5


def test_none_is_passed_on_as_no_number_of_this_function():
    assert judge(lambda completion: [None, 0.5]) == [None, 0.5]
    assert judge(lambda completion: (None, torch.tensor(1.0))) == [None, 1.0]


def test_what_goes_wrong_in_a_function_is_one_line_with_its_file_and_line(module):
    name = module(
        "def raises(completion):\n    return [scores[text] for text in completion]\n\nscores = {}\n"
        "def one(completion):\n    return 1.0\n"
        "def lines(completion):\n    raise ValueError('two\\nlines')\n"
        "def inside(completion):\n    import json\n    return json.loads('x')\n"
    )
    for function, line in (("raises", 2), ("one", 5), ("lines", 8), ("inside", 11)):
        place = rf"\(.*own_rewards\.py, line {line}\)$"
        with pytest.raises(RewardFunctionError, match=f"^own_rewards:{function} .*{place}") as error:
            judge(f"{name}:{function}")
        assert "\n" not in str(error.value)


def test_parts_are_called_as_in_the_setting(module):
    name = module(
        "from functools import partial\n"
        "def scaled(completion, by):\n    return [by * len(text) for text in completion]\n"
        "def made(by):\n    def reward(completion):\n        return scaled(completion, by)\n    return reward\n"
        "class Judge:\n    def __call__(self, completion):\n        return scaled(completion, 4.0)\n"
        "    def other(self, completion):\n        return scaled(completion, 5.0)\n"
        "once, twice, thrice, judge = partial(scaled, by=1.0), partial(scaled, by=2.0), made(3.0), Judge()\n"
    )
    names = ["once", "twice", "thrice", "judge", "judge.other"]
    found = [RewardFunction(f"{name}:{own}", list(BATCH)) for own in names]
    assert [reward.name for reward in found] == names
    assert [reward(BATCH, 2) for reward in found] == [[1.0 * n, 2.0 * n] for n in (1, 2, 3, 4, 5)]
    assert pickle.loads(pickle.dumps(found[0]))(BATCH, 2) == [1.0, 2.0]
    with pytest.raises(ValueError, match="own_rewards:Judge is <class .*>; it must be a function, or an instance"):
        RewardFunction(f"{name}:Judge", list(BATCH))


def test_an_async_function_is_awaited_also_from_within_a_running_loop():
    async def own(completion):
        return await asyncio.gather(*(asyncio.sleep(0, len(text)) for text in completion))

    assert judge(own) == [1.0, 2.0]

    async def inside():
        return judge(own)

    assert asyncio.run(inside()) == [1.0, 2.0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_async_functions_work_in_a_forked_process():
    async def own(completion):
        return [1.0, 0.0]

    judge(own)  # this process has its loop now, whose thread a fork does not take along
    if (child := os.fork()) == 0:
        failed = True
        try:
            failed = judge(own) != [1.0, 0.0]
        finally:
            os._exit(int(failed))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
