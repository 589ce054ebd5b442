"""Mixtures score with the experts that a sampler chose as with those experts forced by hand, gradients too."""

from dataclasses import replace

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_rl.data.group import NO_ROUTE, Group
from grpo_rl.policies.attention import use_shared_prefix
from grpo_rl.policies.packing import ROUTES, pack
from grpo_rl.policies.policy import ReferencePolicy, TrainPolicy
from grpo_rl.policies.routing import check_replay
from grpo_rl.testing import random_group
from tests.helpers import KeepFp64, to_fp64

VOCAB, LAYERS, EXPERTS, CHOSEN = 32, 3, 4, 2
SIZES = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, num_experts=EXPERTS, num_local_experts=EXPERTS, n_routed_experts=EXPERTS,
    num_experts_per_tok=CHOSEN, moe_intermediate_size=12, n_group=2, topk_group=1, first_k_dense_replace=1,
    q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, max_position_embeddings=64,
    pad_token_id=0, eos_token_id=1, initializer_range=0.4,
)  # fmt: skip
CLASSES = ["Qwen3Moe", "Olmoe", "Mixtral", "DeepseekV2", "DeepseekV3", "GptOss"]


def config_of(name, **more):
    """A tiny config of the mixture of this name."""
    config_class = getattr(transformers, f"{name}Config")
    return config_class(**{key: value for key, value in (SIZES | more).items() if hasattr(config_class(), key)})


def tiny(name):
    config = config_of(name)
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # grouped products have no fp64
    return to_fp64(getattr(transformers, f"{name}ForCausalLM")(config)).eval()


def with_routes(group: Group, seed: int = 0) -> Group:
    """Other experts than the model's own, for all tokens but the last of each response."""
    generator = torch.Generator().manual_seed(seed)
    tokens = group.num_tokens
    routes = torch.rand(tokens, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :CHOSEN].to(torch.int16)
    prompt, responses = routes[: len(group.prompt_ids)], routes[len(group.prompt_ids) :]
    responses[group.offsets[1:] - 1] = NO_ROUTE
    return replace(group, routes=responses, prompt_routes=prompt)


def qwen_by_hand(model, ids, routes):
    """Log-probabilities of ``ids[1:]``: a plain forward whose routers' choice is ``routes`` [T, L, K], by hooks."""

    def choose(number):
        def hook(router, args, output):
            logits, _, own = output
            chosen = torch.where(routes[:, number] < 0, own, routes[:, number].long())
            weights = logits.softmax(-1).gather(-1, chosen)
            return logits, weights, chosen

        return hook

    handles = [layer.mlp.gate.register_forward_hook(choose(i)) for i, layer in enumerate(model.model.layers)]
    try:
        with KeepFp64():
            logits = model(ids[None]).logits[0, :-1]
    finally:
        for handle in handles:
            handle.remove()
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_replayed_experts_give_the_result_and_gradients_of_experts_forced_by_hand(checkpointing):
    group = with_routes(random_group(prompt=5, lengths=[4, 1, 6], vocab=VOCAB))
    plain, model = tiny("Qwen3Moe"), tiny("Qwen3Moe")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    use_shared_prefix(model, router_replay=True)
    policy = TrainPolicy(model)
    ours, _ = policy.score([group])
    by_hand = []
    for g, ids in enumerate(group.responses):
        routes = torch.cat([group.prompt_routes, group.routes[group.offsets[g] : group.offsets[g + 1]]])
        by_hand.append(qwen_by_hand(plain, torch.cat([group.prompt_ids, ids]), routes)[-len(ids) :])
    by_hand = torch.cat(by_hand)
    torch.testing.assert_close(ours.double(), by_hand, rtol=0, atol=1e-6)  # scores are given in fp32
    assert (TrainPolicy(tiny("Qwen3Moe")).score([group])[0] - ours).abs().max() > 1e-2  # its own experts are others
    weights = torch.randn(len(ours), generator=torch.Generator().manual_seed(1)).double()
    (ours.double() @ weights).backward()
    (by_hand @ weights).backward()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-6, msg=name)
    assert model.model.layers[0].mlp.gate.weight.grad.abs().max() > 1e-4  # routers learn


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_replaying_a_models_own_choice_changes_nothing_and_another_changes_something(name):
    model = tiny(name)
    chosen = {}

    def note(number):
        return lambda router, args, output: chosen.__setitem__(
            number, next(out for out in output if not out.is_floating_point())
        )

    check_replay(model)
    policy = TrainPolicy(model)
    group = random_group(prompt=4, lengths=[3, 5], vocab=VOCAB)
    layers = [layer for layer in model.model.layers]
    routers = {
        i: next((m for n, m in layer.named_modules() if n.endswith(("gate", "router"))), None)
        for i, layer in enumerate(layers)
    }
    handles = [router.register_forward_hook(note(i)) for i, router in routers.items() if router is not None]
    before, _ = policy.score([group])
    for handle in handles:
        handle.remove()
    own = torch.zeros(group.num_tokens, LAYERS, CHOSEN, dtype=torch.int16)
    for number, experts in chosen.items():
        own[:, number] = experts.to(torch.int16)
    use_shared_prefix(model, router_replay=True)
    torch.testing.assert_close(policy.score([group])[0], before, rtol=0, atol=0)
    same = replace(group, prompt_routes=own[:4], routes=own[4:])
    torch.testing.assert_close(policy.score([same])[0], before, rtol=0, atol=0)
    assert (policy.score([with_routes(group)])[0] - before).abs().max() > 1e-4
    reference = ReferencePolicy(model)
    torch.testing.assert_close(reference.score([with_routes(group)])[0], before, rtol=0, atol=0)


def test_groups_without_routes_next_to_others_are_left_to_the_router():
    model = use_shared_prefix(tiny("Qwen3Moe"), router_replay=True)
    policy = TrainPolicy(model)
    plain, given = (random_group(prompt=4, lengths=[3, 5], vocab=VOCAB, seed=seed) for seed in range(2))
    given = with_routes(given)
    alone = [policy.score([group])[0] for group in (plain, given)]
    torch.testing.assert_close(policy.score([plain, given])[0], torch.cat(alone))


@pytest.mark.parametrize("ended_first", [True, False])
def test_a_token_that_several_sequences_share_takes_the_route_of_one_that_computed_it(ended_first):
    """One response is the beginning of another: its last token was sampled, and computed in the longer one alone."""
    lengths = [9, 20] if ended_first else [20, 9]
    group = with_routes(random_group(prompt=4, lengths=lengths, vocab=VOCAB))
    short, long = (slice(9), slice(9, 29)) if ended_first else (slice(20, 29), slice(20))
    ids, routes = group.response_ids.clone(), group.routes.clone()
    ids[short], routes[short] = ids[long][:9], routes[long][:9]
    routes[short.stop - 1] = NO_ROUTE
    packed = pack([replace(group, response_ids=ids, routes=routes)])
    assert len(packed.input_ids) == 4 + 20
    assert torch.equal(packed.layout.cache[ROUTES], torch.cat([group.prompt_routes, routes[long]]))


def test_models_that_cant_replay_are_refused_by_name():
    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(ValueError, match="router_replay=true: LlamaForCausalLM has no experts"):
        check_replay(dense)

    model = tiny("Mixtral")
    for layer in model.model.layers:
        gate = layer.mlp.gate
        gate.__class__ = type("Sorts", (type(gate),), {"forward": sorting})
    with pytest.raises(ValueError, match="MixtralForCausalLM's Sorts does not take the experts that it is given"):
        check_replay(model)


def sorting(router, hidden):
    scores = torch.nn.functional.linear(hidden, router.weight).softmax(-1)
    values, chosen = scores.sort(-1, descending=True)
    return scores, values[:, : router.top_k], chosen[:, : router.top_k]
