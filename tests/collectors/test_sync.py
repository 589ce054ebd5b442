"""The collector makes complete groups out of prompts, responses and rewards, and loses nothing on the way."""

import sys
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from grpo_rl.collectors.engine_policy import EnginePolicy, write
from grpo_rl.collectors.groups import group_of_samples, has_zero_variance, rewarded
from grpo_rl.collectors.sync import SyncCollector
from grpo_rl.data import keys
from grpo_rl.data.group import Group
from grpo_rl.engines.base import Samples, Sampling
from grpo_rl.envs.base import LLMEnv, Reward, Task
from grpo_rl.testing import ScriptedEngine, random_group


class CountA(Task):
    """Pays one for each "a" in the response."""

    rows = [{"q": "one"}, {"q": "two"}, {"q": "three"}]
    reward_parts = ("a",)

    def prompt(self, row):
        return [{"role": "user", "content": row["q"]}]

    def score(self, row, response):
        return Reward({"a": float(response.count("a"))})


@pytest.fixture
def env(tokenizer):
    return LLMEnv(CountA(), tokenizer, num_envs=2, repeats=3)


@pytest.fixture
def engine(tokenizer):
    # Response g is "a" g times.
    return ScriptedEngine(lambda prompt, g: tokenizer("a" * g)["input_ids"])


def test_groups_carry_prompt_responses_rewards_and_versions(env, engine, tokenizer):
    engine.version = 4
    groups = SyncCollector(env, EnginePolicy(engine, Sampling(max_new_tokens=5)), total_dialog_turns=6).collect()
    assert [g.group_id for g in groups] == [0, 1] and all(isinstance(g, Group) for g in groups)
    for group in groups:
        assert tokenizer.decode(group.prompt_ids) == f"{CountA.rows[group.row]['q']}<end>>"
        assert group.rewards.tolist() == group.reward_parts["a"].tolist() == [0.0, 1.0, 2.0]
        assert group.lengths.tolist() == [0, 1, 2] and group.versions.tolist() == [4, 4, 4]
        assert group.trainable.all() and not group.truncated.any()


def test_a_response_at_the_length_limit_is_marked_truncated(env, engine):
    (group, _) = SyncCollector(env, EnginePolicy(engine, Sampling(max_new_tokens=1)), total_dialog_turns=6).collect()
    assert group.truncated.tolist() == [False, False, True] and group.lengths.tolist() == [0, 1, 1]


def test_collections_follow_each_other_until_all_responses_are_sampled(env, engine):
    collector = SyncCollector(env, EnginePolicy(engine, Sampling(max_new_tokens=5)), total_dialog_turns=18)
    assert [[g.group_id for g in groups] for groups in collector] == [[0, 1], [2, 3], [4, 5]]
    assert collector.collected == 18 and collector.collect() == []


def test_a_group_is_sampled_in_one_call_so_that_its_prompt_is_computed_once(env, engine):
    calls = []
    generate = engine.generate
    engine.generate = lambda prompts, n, sampling: calls.append((len(prompts), n)) or generate(prompts, n, sampling)
    env.rollout(max_steps=1, policy=EnginePolicy(engine, Sampling(max_new_tokens=5)))
    assert calls == [(2, 3)]


def test_log_probs_stay_with_their_tokens(env, tokenizer):
    class Counting(ScriptedEngine):
        def generate(self, prompts, n, sampling):
            samples = super().generate(prompts, n, sampling)
            for sample in samples:
                sample.log_probs.copy_(-torch.arange(len(sample.log_probs)))
            return samples

    engine = Counting(lambda prompt, g: tokenizer("a" * g)["input_ids"])
    group = SyncCollector(env, EnginePolicy(engine, Sampling(max_new_tokens=5)), 6).collect()[0]
    td = group.to_tensordict()
    assert td[2][keys.LOG_PROBS_FULL][-2:].tolist() == [-1.0, -2.0]


def test_the_python_work_of_a_collection_does_not_grow_with_its_responses(env):
    def steps_of_python(length):
        engine = ScriptedEngine(lambda prompt, g: [5] * length)
        collector = SyncCollector(env, EnginePolicy(engine, Sampling(max_new_tokens=length)), total_dialog_turns=10**6)
        collector.collect()
        count = 0

        def trace(*_):
            nonlocal count
            count += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            groups = collector.collect()
        finally:
            sys.settrace(before)
        assert all(group.lengths.eq(length).all() for group in groups)
        return count

    # 6 responses: one step for each token would be 12,000.
    assert steps_of_python(2000) < steps_of_python(2) + 100


class CountAInFirst(CountA):
    """Rewards the responses to one prompt differently, those to the others equally."""

    def score(self, row, response):
        return Reward({"a": float(response.count("a")) if row["q"] == "one" else 0.0})


def test_zero_variance_groups_are_replaced_until_the_collection_is_full(tokenizer, engine):
    env = LLMEnv(CountAInFirst(), tokenizer, num_envs=2, repeats=3)
    collector = SyncCollector(env, EnginePolicy(engine, Sampling(max_new_tokens=5)), 10**6, max_resamples=20)
    groups = collector.collect()
    assert [env.query(group.row) for group in groups] == ["one", "one"]
    # Every epoch of three rows has one such row, so the second is found in the second epoch: 4 to 6 prompts.
    asked = len(collector.sampled)
    assert 4 <= asked <= 6 and collector.collected == 3 * asked
    assert collector.filtered_groups == asked - 2 and collector.dropped_groups == 0
    collector.collect()
    assert collector.sampled[0].group_id == asked  # no prompt was taken from the data and not sampled


def test_when_the_resamples_are_used_up_zero_variance_groups_fill_the_collection(tokenizer, engine):
    env = LLMEnv(CountAInFirst(), tokenizer, num_envs=3, repeats=3)  # each collection has one row that differs
    collector = SyncCollector(env, EnginePolicy(engine, Sampling(max_new_tokens=5)), 10**6, max_resamples=1)
    groups = collector.collect()
    assert len(groups) == 3 and 3 * len(collector.sampled) == collector.collected == 15
    differing = [group for group in groups if group.rewards.std() > 0]
    assert 1 <= len(differing) <= 2 and groups[: len(differing)] == differing
    assert collector.filtered_groups == 2
    assert len({group.group_id for group in groups}) == 3


def test_groups_have_zero_variance_by_what_their_advantages_are_made_of():
    group = random_group(lengths=[1, 1, 1], rewards=[1.0, 1.0, 1.0])
    parts = {"a": torch.tensor([1.0, 1.0, 0.0]), "b": torch.tensor([0.0, 0.0, 1.0])}
    group = replace(group, reward_parts=parts)
    assert has_zero_variance(group) and not has_zero_variance(group, by_part=True)
    apart = replace(group, rewards=torch.tensor([5.0, 7.0, 6.0]))
    assert not has_zero_variance(apart) and has_zero_variance(apart, clip=3.0)


def test_a_part_that_a_response_lacks_makes_no_difference_in_it():
    rewards = [Reward({"a": 1.0}), Reward({"b": 2.0}), Reward({"a": 1.0, "b": 2.0})]
    group = rewarded(random_group(lengths=[1, 1, 1]), rewards)
    assert group.rewards.tolist() == [1.0, 2.0, 3.0]
    assert str(group.reward_parts["a"].tolist()) == "[1.0, nan, 1.0]"
    assert str(group.reward_parts["b"].tolist()) == "[nan, 2.0, 2.0]"
    assert not has_zero_variance(group) and has_zero_variance(group, by_part=True)
    other = replace(group, reward_parts={**group.reward_parts, "b": torch.tensor([torch.nan, 2.0, 1.0])})
    assert not has_zero_variance(other, by_part=True)


def test_resampling_ends_with_the_responses_of_the_run(tokenizer, engine):
    env = LLMEnv(CountAInFirst(), tokenizer, num_envs=2, repeats=3)
    collector = SyncCollector(env, EnginePolicy(engine, Sampling(max_new_tokens=5)), 6, max_resamples=1000)
    assert len(collector.collect()) == 2 and collector.collected == 6


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_log_probabilities_that_are_no_numbers_stop_the_collection(env, engine, monkeypatch, bad):
    """An engine whose kernels fail gives them beside ids that look like any others; nothing can be trained on them."""

    def broken(prompts, n, sampling, generate=engine.generate):
        samples = generate(prompts, n, sampling)
        return [replace(s, log_probs=torch.full_like(s.log_probs, bad)) for s in samples]

    monkeypatch.setattr(engine, "generate", broken)
    with pytest.raises(RuntimeError, match="none of which is a finite number.* inference_model.engine=transformers"):
        SyncCollector(env, EnginePolicy(engine, Sampling(max_new_tokens=5)), total_dialog_turns=6).collect()


def test_kept_sets_of_samples_reach_the_group_and_the_rows_of_a_rollout(env):
    samples = Samples.from_lists(
        [[5], [], [6, 7]], [[0.0], [], [0.0, 0.0]], [False] * 3, 0, [[[5, 1]], [], [[6], [7, 2]]]
    )
    group = group_of_samples(env.next_prompts(1)[0], samples)
    assert group.kept_ids.tolist() == [5, 1, 6, 7, 2] and group.kept_counts.tolist() == [2, 1, 2]
    rows = [TensorDict() for _ in range(3)]
    write(rows, samples, 100)
    assert [row[keys.KEPT_IDS].tolist() for row in rows] == [[5, 1], [], [6, 7, 2]]
    assert [row[keys.KEPT_COUNTS].tolist() for row in rows] == [[2], [], [1, 2]]


def test_routes_of_samples_reach_the_rows_of_a_rollout_with_those_of_the_prompt():
    prompt_routes, routes = torch.tensor([[[9, 8]], [[7, 6]]]), torch.tensor([[[1, 2]], [[3, 4]], [[5, 6]]])
    samples = replace(
        Samples.from_lists([[5], [], [6, 7]], [[0.0], [], [0.0, 0.0]], [False] * 3, 0),
        routes=routes,
        prompt_routes=prompt_routes,
    )
    rows = [TensorDict() for _ in range(3)]
    write(rows, samples, 100)
    whole = [row[keys.ROUTES_FULL].tolist() for row in rows]
    of_prompt = [[[9, 8]], [[7, 6]]]
    assert whole == [[*of_prompt, [[1, 2]]], of_prompt, [*of_prompt, [[3, 4]], [[5, 6]]]]
