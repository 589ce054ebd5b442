"""Shared-prefix scoring equals separate sequences, in value and in gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_rl.policies.prefix import Layout, attention, pack, use_shared_prefix
from grpo_rl.policies.train import TrainPolicy
from grpo_rl.testing import random_group

VOCAB = 50
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
FAMILIES = {
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama-untied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
}


class Fp64RMSNorm(torch.nn.Module):
    """transformers' norms round to fp32 inside; for a comparison at 1e-9 they must not."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def fp64_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = FAMILIES[family]().double()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, Fp64RMSNorm(child))
    return model


def random_groups(seed: int) -> list:
    """Ragged groups: equal and unequal lengths, empty answers, one-token answers, one-token prompts."""
    shapes = [(5, [3, 2, 0, 3, 1]), (1, [4, 7]), (9, [1, 1, 1]), (3, [0, 0]), (2, [17, 33, 20])]
    return [random_group(p, lengths, VOCAB, group_id=i, seed=seed + i) for i, (p, lengths) in enumerate(shapes)]


def separate_sequences(model, groups, temperature):
    """The plain road: each answer behind its own copy of the prompt, full logits, one sequence at a time."""
    log_probs, entropies = [], []
    for group in groups:
        for response in group.responses:
            ids = torch.cat([group.prompt_ids, response])[None]
            logits = model(ids).logits[0, len(group.prompt_ids) - 1 : -1] / temperature
            log_p = logits.log_softmax(-1)
            log_probs.append(log_p.gather(-1, response[:, None])[:, 0])
            entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def gradients(model, log_prob, entropy):
    weight = torch.linspace(-1, 1, len(log_prob), dtype=torch.float64)
    model.zero_grad()
    (log_prob * weight + entropy * weight.flip(0)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_equal_those_of_separate_sequences_in_fp64(family, checkpointing):
    model = fp64_model(family)
    groups = random_groups(seed=3)
    expected = separate_sequences(model, groups, temperature=0.7)
    expected_grads = gradients(model, *expected)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    scored = TrainPolicy(model, temperature=0.7).score(groups)
    torch.testing.assert_close(scored[0], expected[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(scored[1], expected[1], rtol=0, atol=1e-9)
    for name, grad in gradients(model, *scored).items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_bf16_is_no_further_from_fp64_than_the_plain_bf16_road():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.2))
    groups = random_groups(seed=5)
    exact = separate_sequences(model.double(), groups, 1.0)[0]
    model.bfloat16()
    plain = separate_sequences(model, groups, 1.0)[0].float()
    shared = TrainPolicy(model).score(groups)[0]
    assert (shared - exact).abs().mean() <= 1.2 * (plain - exact).abs().mean()


def test_an_answer_sees_neither_its_siblings_nor_another_group():
    model = fp64_model("llama-tied")
    groups = random_groups(seed=7)
    policy = TrainPolicy(model)
    before = policy.score(groups)[0].split([len(g.response_ids) for g in groups])
    changed = list(groups)
    changed[1] = random_group(1, [4, 7], VOCAB, group_id=1, seed=99)
    after = policy.score(changed)[0].split([len(g.response_ids) for g in groups])
    for g in (0, 2, 3, 4):
        torch.testing.assert_close(before[g], after[g], rtol=0, atol=1e-12)
    group = groups[0]
    ids = group.response_ids.clone()
    ids[: group.offsets[1]] = (ids[: group.offsets[1]] + 1) % VOCAB  # another first answer
    alone = policy.score([replace(group, response_ids=ids)])[0]
    first = int(group.offsets[1])
    torch.testing.assert_close(alone[first:], before[0][first:], rtol=0, atol=1e-12)
    assert (alone[:first] - before[0][:first]).abs().max() > 1e-3


def test_the_masked_road_of_other_devices_equals_the_two_part_road(monkeypatch):
    from grpo_rl.policies import prefix

    groups = random_groups(seed=1)
    model = fp64_model("llama-tied")
    policy = TrainPolicy(model)
    two_part = policy.score(groups)
    grads = gradients(model, *two_part)
    monkeypatch.setattr(
        prefix._TwoPartAttention,
        "apply",
        lambda q, k, v, layout, scale: torch.cat(
            [prefix._masked(q, k, v, span, scale) for span in layout.spans], dim=2
        ),
    )
    masked = policy.score(groups)
    torch.testing.assert_close(masked, two_part, rtol=0, atol=1e-9)
    for name, grad in gradients(model, *masked).items():
        torch.testing.assert_close(grad, grads[name], rtol=0, atol=1e-9)


def test_a_prompt_is_computed_once():
    groups = [random_group(prompt=10, lengths=[2, 3, 4])]
    assert len(pack(groups).input_ids) == 10 + 2 + 3 + 4


def test_sliding_windows_are_refused_by_name():
    windowed = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(ValueError, match="sliding_attention"):
        use_shared_prefix(Qwen2ForCausalLM(windowed))
    mistral = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))
    with pytest.raises(ValueError, match="sliding"):
        TrainPolicy(mistral).score([random_group(vocab=VOCAB)])
    with pytest.raises(ValueError, match="dropout"):
        q = torch.zeros(1, 1, 1, 4)
        attention(torch.nn.Module(), q, q, q, None, prefix_layout=Layout((), ()), dropout=0.1)
