import asyncio
import pickle

import numpy as np
import pytest
import torch

from grpo_rl.envs.rewards.functions import RewardFunction, RewardFunctionError

BATCH = {"prompt": ["a", "b"], "completion": ["x", "yy"], "title": ["T", "U"]}


def judge(function, batch=BATCH):
    return RewardFunction(function, list(batch))(batch, len(batch["completion"]))


def test_a_function_gets_the_columns_that_it_names():
    assert judge(lambda completion: [len(text) for text in completion]) == [1.0, 2.0]
    assert judge(lambda title, *, prompt: [title == ["T", "U"], prompt == ["a", "b"]]) == [1.0, 1.0]
    assert judge(lambda **columns: [len(columns), 0]) == [3.0, 0.0]
    assert judge(lambda completion, author=None: [author is None, 0]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "result",
    [
        [1, 0.5], (1.0, 0.5), np.array([1.0, 0.5]), [np.float32(1), np.float64(0.5)], torch.tensor([1.0, 0.5]),
        [torch.tensor(1.0), torch.tensor([0.5])], [True, 0.5],
    ],
)  # fmt: skip
def test_numbers_may_come_in_any_form_and_none_is_no_number_of_this_function(result):
    values = judge(lambda completion: result)
    assert values == [1.0, 0.5] and [type(value) for value in values] == [float, float]
    assert judge(lambda completion: [None, result[1]]) == [None, 0.5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -np.inf, torch.tensor(float("nan")), "1", [1], 10**400])
def test_what_is_no_finite_number_costs_its_response_only(value):
    failed, good = judge(lambda completion: [value, 0.5])
    assert isinstance(failed, RewardFunctionError) and "<lambda> returned" in str(failed)
    assert good == 0.5


def test_an_error_of_a_function_has_its_name_file_and_line(written_module):
    written_module(
        "own_rewards",
        "def raises(completion):\n    raise ValueError('two\\nlines')\n\n"
        "def one(completion):\n    return 1.0\n"
        "def few(completion):\n    return [1.0]\n",
    )
    for function, why, line in (
        ("raises", "", 2),
        ("one", "returned 1.0", 4),
        ("few", "returned a list of 1 for 2", 6),
    ):
        place = rf"\(.*own_rewards\.py, line {line}\)$"
        with pytest.raises(RewardFunctionError, match=f"^own_rewards:{function} {why}.*{place}") as error:
            judge(f"own_rewards:{function}")
        assert "\n" not in str(error.value)


def test_parts_are_called_as_in_the_setting(written_module):
    written_module(
        "own_rewards",
        "from functools import partial\n"
        "def scaled(completion, by):\n    return [by * len(text) for text in completion]\n"
        "class Judge:\n    def __call__(self, completion):\n        return scaled(completion, 2.0)\n"
        "    def other(self, completion):\n        return scaled(completion, 3.0)\n"
        "once, judge = partial(scaled, by=1.0), Judge()\n",
    )
    names = ["once", "judge", "judge.other"]
    found = [RewardFunction(f"own_rewards:{own}", list(BATCH)) for own in names]
    assert [reward.name for reward in found] == names
    assert [reward(BATCH, 2) for reward in found] == [[1.0 * n, 2.0 * n] for n in (1, 2, 3)]
    assert pickle.loads(pickle.dumps(found[0]))(BATCH, 2) == [1.0, 2.0]


def test_an_async_function_is_awaited_also_from_within_a_running_loop():
    async def own(completion):
        return await asyncio.gather(*(asyncio.sleep(0, len(text)) for text in completion))

    assert judge(own) == [1.0, 2.0]

    async def inside():
        return judge(own)

    assert asyncio.run(inside()) == [1.0, 2.0]
