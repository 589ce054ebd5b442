"""A mixture's router metrics against counts by hand: each token's router scores are set through its embedding."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_rl.data.batching import MicroBatching
from grpo_rl.data.group import NO_ROUTE
from grpo_rl.policies.attention import use_shared_prefix
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.policies.routing import router_metrics, router_record
from grpo_rl.testing import random_group
from grpo_rl.training.micro_batches import scored_micro_batches

EXPERTS, CHOSEN, LAYERS, HIDDEN = 4, 2, 3, 16
PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])
ENTROPY = -sum(p * math.log(p) for p in (0.5, 0.3, 0.15, 0.05))


def mixture(router_replay: bool = False, checkpointing: bool = False) -> Qwen3MoeForCausalLM:
    """A mixture whose routers give token v the probabilities above, shifted by v mod 4, in every layer.

    Neither attention nor experts add anything, so that each layer is given the embedding: 1 at v mod 4, which the norm
    makes 4.
    """
    config = Qwen3MoeConfig(
        vocab_size=8, hidden_size=HIDDEN, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        max_position_embeddings=64, pad_token_id=0, rms_norm_eps=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(EXPERTS, HIDDEN).repeat(2, 1))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.experts.down_proj.zero_()
            layer.mlp.gate.weight.zero_()
            for kind in range(EXPERTS):
                layer.mlp.gate.weight[:, kind] = PROBABILITIES.log().roll(kind) / 4
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return use_shared_prefix(model, router_replay)


def group(group_id: int = 0):
    """Tokens of the kinds 0, 0, 1 in the prompt, which count once, and 2, 3 and 3, 1 in the responses."""
    plain = random_group(prompt=3, lengths=[2, 2], vocab=8)
    ids = {"prompt_ids": torch.tensor([0, 4, 1]), "response_ids": torch.tensor([2, 3, 7, 5])}
    return replace(plain, group_id=group_id, **ids, advantages=torch.tensor([1.0, -1.0]))


def metrics_of(model, groups, max_tokens: int = 10**6) -> dict[str, float]:
    for tokens in scored_micro_batches(TrainPolicy(model), groups, MicroBatching(max_tokens)):
        tokens["log_prob"].sum().backward()
    return router_metrics([router_record(model).take()])


def test_the_busiest_expert_and_the_entropy_are_those_by_hand():
    # Kind v goes to experts v and v + 1; 2, 2, 1 and 2 tokens are of the four kinds: 4, 4, 3 and 3 choices, 3.5 a mean.
    model = mixture()
    assert metrics_of(model, [group()]) == pytest.approx(
        {"router/load_max_over_mean": 4 / 3.5, "router/entropy": ENTROPY}
    )
    assert router_metrics([router_record(model).take()]) == {}, "a step begins anew"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_the_forward_passes_of_training_count_and_each_once(checkpointing):
    model = mixture(checkpointing=checkpointing)
    groups = [group(0), replace(group(1), prompt_ids=torch.tensor([0, 0, 0, 0]))]
    policy = TrainPolicy(model)
    policy.score(groups)
    policy.add_log_probs(groups, 10**6)
    assert router_record(model).take() == {}
    # Kinds of the two: 2, 2, 1, 2 and 4, 1, 1, 2; expert e gets those of kinds e and e - 1.
    kinds = torch.tensor([2 + 4, 2 + 1, 1 + 1, 2 + 2])
    for tokens in scored_micro_batches(policy, groups, MicroBatching(8)):  # each alone
        tokens["log_prob"].sum().backward()
    taken = router_record(model).take()
    assert sorted(taken) == [0, 1, 2]
    for sums in taken.values():
        assert sums[:EXPERTS].tolist() == (kinds + kinds.roll(1)).tolist()
        assert sums[EXPERTS:].tolist() == pytest.approx([15, 15 * ENTROPY, 0, 0], rel=1e-5)


def test_replayed_choices_that_the_router_would_not_make_are_counted():
    model = mixture(router_replay=True)
    plain = group()
    kinds = torch.cat([plain.prompt_ids, plain.response_ids]) % 4
    routes = torch.stack([kinds + 1, kinds], dim=-1)  # the router's own, in another order
    routes[3], routes[5] = torch.tensor([2, 0]), torch.tensor([1, 2])  # kinds 2 and 3: one differs, then both
    routes = (routes % 4)[:, None].repeat(1, LAYERS, 1).to(torch.int16)
    routes[[4, 6]] = NO_ROUTE  # the last token of each response
    replayed = replace(plain, prompt_routes=routes[:3], routes=routes[3:])
    metrics = metrics_of(model, [replayed])
    assert metrics["router/replayed_differ"] == pytest.approx(3 / 10)
    # Expert 1 gets most: of the prompt's kinds 0, 0, 1, of (1, 2), and of kind 1, which nothing is given to.
    assert metrics["router/load_max_over_mean"] == pytest.approx(5 / 3.5)
    assert metrics["router/entropy"] == pytest.approx(ENTROPY)
    assert "router/replayed_differ" not in metrics_of(model, [plain])
