"""Rows that this run finds too easy or too hard rest, come back, and never leave a run without prompts."""

import json
import random

import pytest

from grpo_rl.envs.base import LLMEnv, Reward, Task
from grpo_rl.envs.curriculum import Bounds, Curriculum
from grpo_rl.envs.mixture import MixtureEnv
from tests.envs.scoring import playing


class Levels(Task):
    """Row k is passed by response g where g < k; of four responses by k."""

    reward_parts = ("right",)
    correct_part = "right"

    def __init__(self, *levels: int) -> None:
        self.rows = [{"level": level} for level in levels]

    def prompt(self, row):
        return [{"role": "user", "content": str(row["level"])}]

    def score(self, row, response):
        return Reward({"right": 2.0 * (int(response) < row["level"])})


def make(tokenizer, task, curriculum, num_envs=4, **settings):
    return LLMEnv(task, tokenizer, num_envs, 4, curriculum=curriculum, **settings)


def collector(env, tokenizer):
    return playing(env, tokenizer, lambda prompt, g: str(g))


def levels(env, groups):
    return [env.task.rows[group.row]["level"] for group in groups]


def test_rows_out_of_bounds_rest_and_come_back(tokenizer):
    env = make(tokenizer, Levels(0, 1, 2, 4), {"low": 0.2, "high": 0.8, "rest": 2})
    sampler = collector(env, tokenizer)
    assert sorted(levels(env, sampler.collect())) == [0, 1, 2, 4]  # epoch 0: nothing is known
    assert sorted(levels(env, sampler.collect())) == [1, 1, 2, 2]  # epochs 1 and 2: levels 0 and 4 rest
    assert sorted(levels(env, sampler.collect())) == [0, 1, 2, 4]  # epoch 3
    assert env.metrics() == {
        "curriculum/in_bounds": 2, "curriculum/too_easy": 1, "curriculum/too_hard": 1, "curriculum/passed_over": 4,
        "curriculum/whole_epochs": 0,
    }  # fmt: skip


def test_a_run_whose_rows_are_all_out_of_bounds_draws_them_all(tokenizer):
    env = make(tokenizer, Levels(0, 4), {"rest": 100}, num_envs=2)
    sampler = collector(env, tokenizer)
    for _ in range(5):
        assert sorted(levels(env, sampler.collect())) == [0, 4]
    # Every second epoch has none within bounds, and the next one is drawn whole.
    assert env.metrics()["curriculum/whole_epochs"] == 4 and env.metrics()["curriculum/passed_over"] == 8


def test_rows_that_are_too_long_do_not_count_as_drawn(tokenizer):
    """Left out, and within bounds as they were never seen: they must not keep a run waiting for an epoch with a row."""
    longest = len(make(tokenizer, Levels(0), {}).encode({"level": 0}))
    env = make(tokenizer, Levels(0, 10**9), {"rest": 100}, 2, max_prompt_tokens=longest, long_prompt="skip")
    sampler = collector(env, tokenizer)
    assert [levels(env, sampler.collect()) for _ in range(3)] == [[0, 0]] * 3 and env.skipped == 1


def rewards(*right):
    return [Reward({"right": 2.0 * value}) for value in right]


def test_a_row_is_drawn_less_often_the_more_of_its_last_groups_had_zero_variance():
    curriculum, epochs = Curriculum(Bounds(low=0, high=1, explore=0.5), Levels()), range(4000)
    for times in range(4):
        # A binomial share of 4,000 draws, within four deviations.
        share, expected = sum(curriculum.keeps(7, epoch, seed=times) for epoch in epochs) / 4000, 0.5**times
        assert abs(share - expected) <= 4 * (expected * (1 - expected) / 4000) ** 0.5
        curriculum.note(7, rewards(0, 0, 0, 0), epoch=0)
    curriculum.note(7, rewards(0, 1, 0, 0), epoch=0)
    assert all(curriculum.keeps(7, epoch) for epoch in epochs)


def test_the_share_of_draws_adapts_by_a_hundredth_to_what_32_groups_were():
    curriculum = Curriculum(Bounds(low=0, high=1, explore=0.5), Levels())
    # A quarter of 32 is 8: 2.7 that pass, 5.3 that don't. There are 2 and 6.
    for row, right in enumerate([(1, 1)] * 2 + [(0, 0)] * 6 + [(0, 1)] * 24):
        curriculum.note(row, rewards(*right), epoch=0)
    found = curriculum.metrics()
    assert (found["curriculum/explore_easy"], found["curriculum/explore_hard"]) == pytest.approx((0.51, 0.49))


def test_rewards_of_drawn_groups_are_unbiased_and_rows_without_variance_are_drawn_less():
    chance = random.Random(0)
    passes = {row: rate for row, rate in enumerate((0.0, 0.02, 0.3, 0.9, 1.0))}
    curriculum, drawn = Curriculum(Bounds(low=0, high=1, explore=0.5), Levels()), {row: [] for row in passes}
    for epoch in range(5000):
        for row, rate in passes.items():
            if curriculum.keeps(row, epoch):
                right = [chance.random() < rate for _ in range(4)]
                drawn[row] += right
                curriculum.note(row, rewards(*right), epoch)
    for row, rate in passes.items():
        count = len(drawn[row])
        assert count > 16 and abs(sum(drawn[row]) / count - rate) <= 4 * (rate * (1 - rate) / count) ** 0.5
    assert len(drawn[2]) > 10 * len(drawn[0])


@pytest.mark.slow
@pytest.mark.parametrize("explore", [None, 0.5])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_resumed_curriculum_draws_the_same_rows(tokenizer, mixed, explore):
    def begin():
        env = make(tokenizer, Levels(0, 1, 2, 4, 3, 0, 0, 4), {"low": 0.2, "high": 0.8, "explore": explore})
        if mixed:
            envs = {"a": env, "b": make(tokenizer, Levels(0, 2, 4), {"low": 0.2, "high": 0.8, "passing": 2.0})}
            env = MixtureEnv(envs, {"a": 2, "b": 1}, 3, 4, scales={"b": 0.1})
        return env, collector(env, tokenizer)

    (whole, sampler), (_, cut) = begin(), begin()
    expected = [[(group.group_id, group.row) for group in sampler.collect()] for _ in range(20)]
    for _ in range(7):
        cut.collect()
    state = json.loads(json.dumps(cut.state_dict()))
    env, resumed = begin()
    resumed.load_state_dict(state)
    assert [[(group.group_id, group.row) for group in resumed.collect()] for _ in range(13)] == expected[7:]
    assert env.metrics() == whole.metrics()
    counts = env.metrics()
    names = ("curriculum/a", "curriculum/b") if mixed else ("curriculum",)
    assert all(counts[f"{name}/passed_over"] > 0 and counts[f"{name}/too_hard"] > 0 for name in names)
    if mixed:  # the bound on the reward is that of the task, before its scale
        assert (counts["curriculum/b/too_easy"], counts["curriculum/b/in_bounds"]) == (1, 1)
