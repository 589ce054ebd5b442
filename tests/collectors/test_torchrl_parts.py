"""TorchRL's own parts and ours meet in TensorDicts: transforms, collectors, rollouts and buffers."""

from pathlib import Path

import pytest
import torch
from tiny_runs import run_script
from torchrl.collectors import Collector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import RewardScaling, Transform

from grpo_rl.collectors.base import unchanged
from grpo_rl.collectors.engine_policy import EnginePolicy
from grpo_rl.collectors.groups import group_of_rollouts
from grpo_rl.collectors.sync import SyncCollector
from grpo_rl.data import keys
from grpo_rl.data.group import Group
from grpo_rl.engines.base import Sampling
from grpo_rl.envs.base import LLMEnv, Reward, Task
from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.testing import ScriptedEngine

SAMPLING = Sampling(max_new_tokens=8)
SOTA = Path(__file__).parents[2] / "sota"
ASYNC = ["inference_model.engine=vllm", "train.optim_batch_size=16"]
FIELDS = ("prompt_ids", "response_ids", "log_probs", "versions", "trainable", "offsets", "rewards", "truncated")


class Counting(Task):
    """Says "more" until the policy has said three letters; a conversation is worth its letters."""

    rows = [{"q": "one"}, {"q": "two"}]
    reward_parts = ("letters", "turns")

    def prompt(self, row):
        return [{"role": "user", "content": row["q"]}]

    def reply(self, row, messages):
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        return None if len("".join(said)) >= 3 else [{"role": "user", "content": "more"}]

    def score(self, row, response):
        raise AssertionError("conversations are judged whole")

    def score_dialog(self, row, messages):
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        return Reward({"letters": float(len("".join(said))), "turns": 0.5 * len(said)})


class OneTurn(Counting):
    reply = Task.reply

    def score(self, row, response):
        return Reward({"letters": float(len(response)), "turns": 0.5})


def policy_for(tokenizer):
    """Says one letter, two or three, by the length of what it goes on from and the number of the response."""
    end = tokenizer.eos_token_id
    engine = ScriptedEngine(lambda prompt, g: [*tokenizer("abc"[: 1 + (len(prompt) + g) % 3])["input_ids"], end])
    engine.in_rounds = True
    return EnginePolicy(engine, SAMPLING)


def env_of(task, tokenizer):
    return LLMEnv(task, tokenizer, 2, 3, max_turns=4, seed=1)


def same(ours: Group, theirs: Group) -> bool:
    named = ours.reward_parts.keys() == theirs.reward_parts.keys()
    return named and all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in FIELDS)


def rows_of(rollout):
    """The steps of each row up to its end."""
    rows = [row.unbind(0) for row in rollout.unbind(0)]
    return [list(row[: 1 + next(i for i, step in enumerate(row) if step["next", "done"])]) for row in rows]


@pytest.mark.parametrize("task", [Counting(), OneTurn()])
def test_a_rollout_of_torchrls_gives_the_groups_of_our_collector(tokenizer, task):
    ours = SyncCollector(env_of(task, tokenizer), policy_for(tokenizer), 6).collect()
    rollout = env_of(task, tokenizer).rollout(
        max_steps=4, policy=policy_for(tokenizer), break_when_any_done=False, break_when_all_done=True
    )
    steps = rows_of(rollout)
    theirs = [group_of_rollouts(steps[:3]), group_of_rollouts(steps[3:])]
    assert all(map(same, ours, theirs))
    assert {len(row) for row in steps} == ({1} if type(task) is OneTurn else {1, 2})


def test_torchrls_collector_gives_the_groups_of_ours(tokenizer):
    ours = SyncCollector(env_of(OneTurn(), tokenizer), policy_for(tokenizer), 18)
    collector = Collector(
        env_of(OneTurn(), tokenizer), policy_for(tokenizer), frames_per_batch=6, total_frames=18, use_buffers=False
    )
    try:
        for batch in collector:
            rows = [[step] for step in batch[:, 0].unbind(0)]
            theirs = [group_of_rollouts(rows[:3]), group_of_rollouts(rows[3:])]
            assert all(map(same, ours.collect(), theirs))
    finally:
        collector.shutdown()


def test_a_policy_answers_rows_without_the_id_of_a_group(tokenizer):
    rows, policy = env_of(OneTurn(), tokenizer).reset(), policy_for(tokenizer)
    with_ids = [row[keys.TOKENS_RESPONSE].tolist() for row in policy(rows.clone()).unbind(0)]
    for row in rows.unbind(0):
        row.pop(keys.GROUP_ID)
    without = policy(rows).unbind(0)
    assert [row[keys.TOKENS_RESPONSE].tolist() for row in without] == with_ids


class Failing(OneTurn):
    """No reward for three letters."""

    def score(self, row, response):
        return super().score(row, response if len(response) < 3 else None)


@pytest.mark.parametrize("task", [Counting(), OneTurn(), Failing()])
def test_rows_as_dicts_and_as_tensordicts_give_equal_groups(tokenizer, task):
    """Any policy but an `EnginePolicy` itself gets TensorDicts."""
    policy = policy_for(tokenizer)
    dicts = SyncCollector(env_of(task, tokenizer), policy_for(tokenizer), 12)
    tensordicts = SyncCollector(env_of(task, tokenizer), lambda rows: policy(rows), 12)
    for ours, theirs in zip(dicts, tensordicts, strict=True):
        assert len(ours) == 2 and all(map(same, ours, theirs))
        assert {len(group.rewards) for group in ours} == ({2} if type(task) is Failing else {3})


def test_a_reset_of_a_subclass_takes_effect(tokenizer):
    class Shorter(LLMEnv):
        def _reset(self, tensordict=None, **which):
            rows = super()._reset(tensordict, **which)
            for row in rows.unbind(0):
                row[keys.TOKENS_PROMPT] = row[keys.TOKENS_PROMPT][1:]
            return rows

    [whole], [short] = (
        SyncCollector(env(OneTurn(), tokenizer, 1, 3), policy_for(tokenizer), 3).collect() for env in (LLMEnv, Shorter)
    )
    assert torch.equal(short.prompt_ids, whole.prompt_ids[1:])


@pytest.mark.parametrize("task", [Counting(), OneTurn()])
def test_a_transform_of_the_reward_takes_effect_and_leaves_its_parts(tokenizer, task):
    plain = SyncCollector(env_of(task, tokenizer), policy_for(tokenizer), 6).collect()
    scaled = TransformedEnv(env_of(task, tokenizer), RewardScaling(loc=1.0, scale=2.0))
    for before, after in zip(plain, SyncCollector(scaled, policy_for(tokenizer), 6).collect(), strict=True):
        assert torch.equal(after.rewards, 2.0 * before.rewards + 1.0)
        assert all(torch.equal(after.reward_parts[name], part) for name, part in before.reward_parts.items())
        assert torch.equal(after.response_ids, before.response_ids)


class Begins(Transform):
    """Puts a token before each first prompt."""

    def _reset(self, tensordict, tensordict_reset):
        for row in tensordict_reset.unbind(0):
            row[keys.TOKENS_PROMPT] = torch.cat([torch.tensor([7]), row[keys.TOKENS_PROMPT]])
        return tensordict_reset


@pytest.mark.parametrize("in_rounds", [True, False])
def test_a_transform_that_rewrites_prompts_changes_what_the_policy_reads_and_what_is_trained_on(tokenizer, in_rounds):
    env, policy = TransformedEnv(env_of(Counting(), tokenizer), Begins()), policy_for(tokenizer)
    policy.engine.in_rounds = in_rounds
    seen, script = [], policy.engine._script
    policy.engine._script = lambda prompt, g: (seen.append(list(prompt)), script(prompt, g))[1]
    groups = SyncCollector(env, policy, 6).collect()
    assert all(prompt[0] == 7 for prompt in seen)
    wholes = [[*group.prompt_ids.tolist(), *ids.tolist()] for group in groups for ids in group.responses]
    assert all(any(whole[: len(prompt)] == prompt for whole in wholes) for prompt in seen)


class Numbered(Transform):
    """Adds one more to the reward with each step."""

    def __init__(self):
        super().__init__(in_keys=["reward"], out_keys=["reward"])
        self.register_buffer("steps", torch.tensor(0.0))

    def _step(self, tensordict, next_tensordict):
        self.steps += 1
        for row in next_tensordict.unbind(0):
            row["reward"] = row["reward"] + self.steps
        return next_tensordict


def test_a_collector_goes_on_with_the_data_position_and_the_state_of_transforms(tokenizer):
    def collector():
        return SyncCollector(TransformedEnv(env_of(OneTurn(), tokenizer), Numbered()), policy_for(tokenizer), 60)

    whole, stopped, resumed = collector(), collector(), collector()
    whole.collect()
    stopped.collect()
    state = stopped.state_dict()
    stopped.collect()  # while the checkpoint is written
    resumed.load_state_dict(state)
    with unchanged(resumed._env):
        resumed._env.transform.steps += 7
    after = resumed.collect()
    assert all(map(same, whole.collect(), after))
    assert all(torch.equal(group.rewards, group.reward_parts["letters"] + 2.5) for group in after)


def doubled():
    """A transform that doubles rewards, for runs."""
    return RewardScaling(loc=0.0, scale=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo.py", pytest.param("grpo_async.py", marks=pytest.mark.nightly)])
def test_a_run_trains_on_the_rewards_of_its_transforms(tiny_run, tmp_path, monkeypatch, script):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    words = [*tiny_run, "env.transforms=[test_torchrl_parts:doubled]"]
    folder = run_script(SOTA / script, [*words, *(ASYNC if script == "grpo_async.py" else ())], tmp_path / "run")
    for row in read_metrics(folder / "metrics.jsonl"):
        parts = [row[f"reward/{part}"] for part in ("correctness", "reasoning_format", "answer_format")]
        assert row["reward/mean"] == pytest.approx(2 * sum(parts))


def test_our_groups_go_through_torchrls_buffer_and_come_back(tokenizer):
    groups = SyncCollector(env_of(Counting(), tokenizer), policy_for(tokenizer), 6).collect()
    buffer = ReplayBuffer(storage=LazyStackStorage(6))
    for group in groups:
        buffer.extend(group.to_tensordict())
    rows = buffer[:]
    back = [Group.from_tensordict(rows[at : at + 3]) for at in (0, 3)]
    assert all(map(same, groups, back))


def test_a_prompt_that_does_not_begin_with_what_was_sampled_is_refused(tokenizer):
    class Rewrites(LLMEnv):
        def step_rows(self, rows):
            after = super().step_rows(rows)
            for row in after:
                row[keys.TOKENS_PROMPT] = row[keys.TOKENS_PROMPT] + 1
            return after

    env = Rewrites(Counting(), tokenizer, 2, 3, max_turns=4)
    with pytest.raises(ValueError, match="does not begin with the ids"):
        SyncCollector(env, policy_for(tokenizer), 6).collect()
