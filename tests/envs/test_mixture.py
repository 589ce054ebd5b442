"""Tasks of a mixture are drawn by weight, resume where they were, and are each scored, counted and logged by itself."""

import json

import pytest
from scipy import stats

from grpo_rl.assembly.training import with_hint
from grpo_rl.envs.base import Failure, LLMEnv, Reward, Task
from grpo_rl.envs.calculator import Calculator
from grpo_rl.envs.mixture import MixtureEnv
from tests.envs.chat_templates import tokenizer_of
from tests.envs.scoring import PlainParser, playing, scored

WEIGHTS = {"gsm8k": 0.5, "ifeval": 0.3, "calculator": 0.2}


class Says(Task):
    """Pays one for a response that is the row's word; a row of "?" can't be scored."""

    reward_parts = ("right",)
    correct_part = "right"

    def __init__(self, *words: str) -> None:
        self.rows = [{"word": word} for word in words]

    def prompt(self, row):
        return [{"role": "user", "content": row["word"]}]

    def score(self, row, response):
        if row["word"] == "?":
            raise KeyError("gold")
        return Reward({"right": float(response == row["word"])}, {"characters": len(response)})


class Asks(Says):
    """Asks once more before it pays, and pays by another name."""

    reward_parts = ("said",)
    correct_part = None

    def reply(self, row, messages):
        return [{"role": "user", "content": "again"}]

    def score_dialog(self, row, messages):
        return Reward({"said": float(sum(m["role"] == "assistant" for m in messages))})


class Compares(Says):
    """Pays the longest of a group, whose responses are scored in one call."""

    reward_parts = ("longest",)
    correct_part = None

    def score_many(self, rows, responses):
        longest = max(map(len, responses))
        return [Reward({"longest": float(len(text) == longest)}) for text in responses]


def mixture(tokenizer, tasks, weights=WEIGHTS, seed=0, num_envs=6, **settings):
    envs = {name: LLMEnv(task, tokenizer, 2, 2, max_turns=2, seed=seed) for name, task in tasks.items()}
    return MixtureEnv(envs, weights, num_envs, 2, seed=seed, **settings)


def three(tokenizer, **settings):
    tasks = {"gsm8k": Says("a", "b", "c"), "ifeval": Compares("d", "e"), "calculator": Asks("f", "g")}
    return mixture(tokenizer, tasks, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_tasks_are_drawn_in_proportion(tokenizer, seed):
    env = three(tokenizer, seed=seed)
    names = [env._prompts.name_of_draw(draw) for draw in range(20_000)]
    counts = [names.count(name) for name in WEIGHTS]
    assert stats.chisquare(counts, [20_000 * share for share in WEIGHTS.values()]).pvalue > 1e-5


def test_prompts_come_from_the_draws_and_each_tasks_own_epochs(tokenizer):
    env = three(tokenizer)
    prompts = env.next_prompts(600)
    assert [prompt.group_id for prompt in prompts] == list(range(600))
    drawn = [env.task.rows[prompt.row] for prompt in prompts]
    for name, member in env.members.items():
        own = [row["row"]["word"] for row in drawn if row["task"] == name]
        rows = len(member.task.rows)
        assert len(own) == [env._prompts.name_of_draw(i) for i in range(600)].count(name) > 50
        for start in range(0, len(own) - rows, rows):  # every row of the task once an epoch
            assert sorted(own[start : start + rows]) == sorted(row["word"] for row in member.task.rows)
    assert prompts[0].query == env.query(prompts[0].row)


def test_single_turns_groups_and_conversations_go_together_in_one_collection(tokenizer):
    env = three(tokenizer, num_envs=12, scales={"gsm8k": 3.0})
    groups = playing(env, tokenizer, lambda prompt, g: "a").collect()
    by_task = env.by_task([env.task.rows[group.row] for group in groups])
    assert all(by_task.values())
    for name, at in by_task.items():
        for group in (groups[i] for i in at):
            word = env.task.rows[group.row]["row"]["word"]
            if name == "gsm8k":
                assert group.reward_parts["gsm8k/right"].tolist() == [3.0 * (word == "a")] * 2 == group.rewards.tolist()
                assert group.measures["gsm8k/characters"].tolist() == [1.0, 1.0]
            elif name == "ifeval":
                assert group.reward_parts["ifeval/longest"].tolist() == [1.0, 1.0]  # scored as a group
            else:
                assert group.reward_parts["calculator/said"].tolist() == [2.0, 2.0]
            assert len(group.reward_parts) == 1
            assert group.trainable.all() == (name != "calculator")  # only that one has replies


def test_a_tasks_failures_count_under_its_name_and_resume_with_it(tokenizer):
    tasks = {"good": Says("a"), "bad": Says("?")}
    env = mixture(tokenizer, tasks, {"good": 1, "bad": 1})
    rows = {row["task"]: i for i, row in enumerate(env.task.rows)}
    right, wrong = scored(env, rows["good"], ["a"] * 2)
    assert right == wrong == Reward({"good/right": 1.0}, {"good/characters": 1.0})
    failed = scored(env, rows["bad"], ["a"] * 2)
    assert all(isinstance(result, Failure) and "bad, row 1" in result.message for result in failed)
    assert env.metrics() == {"failed/bad": 2} and env.guard.failures()[0] == {"error": 2}
    other = mixture(tokenizer, tasks, {"good": 1, "bad": 1})
    other.load_state_dict(json.loads(json.dumps(env.state_dict())))
    assert other.metrics() == {"failed/bad": 2}


def test_the_reward_of_a_mixture_tells_whether_it_is_right_and_gives_that_of_the_task_back(tokenizer):
    task = three(tokenizer, scales={"gsm8k": 4.0}).task
    assert task.is_right(Reward({"gsm8k/right": 4.0})) is True and task.is_right(Reward({"gsm8k/right": 0.0})) is False
    assert task.is_right(Reward({"ifeval/longest": 1.0})) is None and task.tells_right
    task = three(tokenizer, scales={"gsm8k": 0.36}).task
    reward = Reward({"right": 1.0}, {"characters": 3.0, "turn_reward_0": 1.0})
    named = task.named("gsm8k", reward)
    assert named.measures == {"gsm8k/characters": 3.0, "gsm8k/turn_reward_0": 0.36}
    assert task.own("gsm8k", named) == reward


SHOWN = '"name": "calculator"'
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
REWARDS = {"says": 1.0, "calculator": 3.0}


def calls(prompt, g):
    """Calls the calculator if the prompt shows it, and then says what was heard; without a tool it says "x"."""
    called = "<answer>42</answer>" if "<tool_response>\n42\n" in prompt else CALL
    return called if SHOWN in prompt else "x"


@pytest.mark.parametrize("in_rounds", [False, True])
def test_each_task_has_its_own_tools_and_its_turns_read_by_its_own_parser(in_rounds):
    tokenizer = tokenizer_of("qwen3")
    rows = [{"question": "6 * 7?", "answer": "#### 42"}]
    tasks = {"says": Says("x"), "calculator": Calculator(rows, form="function", examples=(), system_prompt=None)}
    envs = {name: LLMEnv(task, tokenizer, 2, 2, tool_parser=PlainParser) for name, task in tasks.items()}
    env = MixtureEnv(envs, dict.fromkeys(tasks, 1.0), 12, 2)
    env.check_prompts()
    groups = playing(env, tokenizer, calls, in_rounds).collect()
    rows = [env.task.rows[group.row] for group in groups]
    assert {row["task"] for row in rows} == {"says", "calculator"}
    for group, row in zip(groups, rows, strict=True):
        assert (SHOWN in tokenizer.decode(group.prompt_ids)) is (row["task"] == "calculator")
        assert group.prompt_ids.tolist() == env.encode(row)
        assert group.rewards.tolist() == [REWARDS[row["task"]]] * 2, row
        hinted = tokenizer.decode(with_hint(env, "It is {gold}.", group).prompt_ids)
        assert ((SHOWN in hinted), "It is 42." in hinted) == (row["task"] == "calculator",) * 2
