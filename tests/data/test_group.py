"""Groups: the way to TorchRL's layout and back, and how they are split into micro-batches."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import lazy_stack
from tiny_runs import same
from torchrl.objectives import llm as torchrl
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from grpo_rl.data.batching import MicroBatching, micro_batches
from grpo_rl.data.group import Group, Kept
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.policies.packing import pack
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group
from grpo_rl.training.micro_batches import scored_micro_batches
from tests.helpers import to_fp64


def test_to_tensordict_and_back_is_the_same_group():
    group = replace(
        random_group(lengths=[3, 1, 2], group_id=7),
        reward_parts={"a": torch.tensor([0.0, 1.0, 2.0])},
        advantages=torch.tensor([-1.0, 0.0, 1.0]),
        ref_log_probs=-torch.arange(6.0),
        trainable=torch.tensor([True, False, True, True, True, False]),
    )
    assert same(vars(Group.from_tensordict(group.to_tensordict())), vars(group))
    routes = torch.arange(6 * 2 * 2, dtype=torch.int8).view(6, 2, 2)
    routed = replace(group, routes=routes, prompt_routes=-torch.ones(4, 2, 2, dtype=torch.int8))
    assert same(vars(Group.from_tensordict(routed.to_tensordict())), vars(routed))
    assert torch.equal(routed.with_only([0, 2]).routes, routes[[0, 1, 2, 4, 5]])
    kept = Kept.from_lists([[3, 4], [], [1], [2], [9, 8, 7], []])
    cut = replace(group, kept_ids=kept.ids, kept_counts=kept.counts)
    assert same(vars(Group.from_tensordict(cut.to_tensordict())), vars(cut))
    part = cut.with_only([0, 2])
    assert part.kept_ids.tolist() == [3, 4, 1, 9, 8, 7] and part.kept_counts.tolist() == [2, 0, 1, 3, 0]
    assert cut.with_only([1]).with_advantages(torch.ones(1)).kept_ids.tolist() == [2]
    assert group.with_only([1]).kept is None


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return to_fp64(LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, initializer_range=0.5)))


class Tokenizer:
    """The part of a tokenizer that TorchRL's wrapper calls where it is given ids."""

    pad_token, pad_token_id, eos_token, eos_token_id = "<pad>", 0, "<end>", 1

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [0]}


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("with_replies", [False, True])
def test_torchrls_own_grpo_loss_and_its_gradient_equal_ours_on_ragged_groups(aggregation, with_replies):
    """Prompts and responses of all lengths, advantages that do not cancel, ratios on both sides of both clips.

    TorchRL keeps its clip bounds in fp32, hence the tolerance.
    """
    from torchrl.modules.llm import TransformersWrapper  # it imports vLLM, which takes seconds

    model = llama()
    policy = TrainPolicy(model)
    groups = []
    for i, (prompt, lengths, advantages) in enumerate([(3, [4, 1, 6], [2.0, -0.5, -1.0]), (7, [2, 5], [1.5, 0.7])]):
        group = random_group(prompt, lengths, group_id=i, seed=i)
        generator = torch.Generator().manual_seed(i)
        replies = torch.rand(sum(lengths), generator=generator) < (0.3 if with_replies else 0)
        sampled = policy.score([group])[0].detach() + 0.5 * torch.randn(sum(lengths), generator=generator)
        advantages = torch.tensor(advantages)
        groups.append(replace(group, log_probs=sampled.float(), trainable=~replies, advantages=advantages))
    loss = GRPOLoss(clip_low=0.2, clip_high=0.3)
    ours = [loss(micro) for micro in scored_micro_batches(policy, groups, MicroBatching(1000, aggregate=aggregation))]
    assert len(ours) == 1 and ours[0]["clip_low"] > 0 and ours[0]["clip_high"] > 0
    ours[0]["loss_objective"].backward()

    their_model = llama()
    actor = TransformersWrapper(
        their_model, tokenizer=Tokenizer(), input_mode="tokens", generate=False, pad_output=False, pad_model_input=True
    )
    by_name = {"token_mean": "token_mean", "sequence_mean": "prompt_mean"}
    their_loss = torchrl.GRPOLoss(actor, clip_epsilon=(0.2, 0.3), entropy_bonus=False, aggregation=by_name[aggregation])
    theirs = their_loss(lazy_stack([row for group in groups for row in group.to_tensordict().unbind(0)]))
    theirs.loss_objective.sum().backward()

    torch.testing.assert_close(ours[0]["loss_objective"], theirs.loss_objective.reshape(()), rtol=0, atol=1e-6)
    for (name, mine), their in zip(model.named_parameters(), their_model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, their.grad, rtol=0, atol=1e-6, msg=name)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(10, 80))
def test_micro_batches_hold_every_group_once_and_keep_the_budget(lengths, budget):
    groups = [random_group(prompt=3, lengths=[n], group_id=i) for i, n in enumerate(lengths)]
    split = micro_batches(groups, budget)
    assert sorted(g.group_id for micro in split for g in micro) == list(range(len(groups)))
    for micro in split:
        assert len(micro) == 1 or sum(g.num_tokens for g in micro) <= budget


def test_a_system_message_counts_once_in_each_micro_batch():
    """40 shared tokens, 5 of each prompt and 15 of its responses: 40 + 3 x 20 are 100 tokens; a fourth is too many."""
    system = torch.arange(40)
    groups = [random_group(5, [15], vocab=1000, group_id=i, seed=i) for i in range(6)]
    groups = [replace(group, prompt_ids=torch.cat([system, group.prompt_ids])) for group in groups]
    assert [len(micro) for micro in micro_batches(groups, 100)] == [3, 3]
    assert [len(pack(micro).input_ids) for micro in micro_batches(groups, 100)] == [100, 100]
