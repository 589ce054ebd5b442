"""Layers with a state: a response goes on from its prompt's, with its gradient, and sees no other response."""

import copy

import pytest
import torch
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from grpo_rl.policies.mixers import State
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group
from tests.helpers import KeepFp64, forked_groups, to_fp64

pytestmark = pytest.mark.slow

VOCAB = 32
SHARED = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, initializer_range=0.3, tie_word_embeddings=False, pad_token_id=0,
)  # fmt: skip


def qwen(checkpointing: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        **SHARED, head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=3,
    )  # fmt: skip
    model = to_fp64(Qwen3_5ForCausalLM(config))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def lfm() -> PreTrainedModel:
    torch.manual_seed(0)
    return to_fp64(Lfm2ForCausalLM(Lfm2Config(**SHARED, layer_types=["conv", "full_attention"], conv_L_cache=3)))


def mamba() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, pad_token_id=0)
    return to_fp64(Mamba2ForCausalLM(Mamba2Config(**sizes, state_size=8, n_groups=2, conv_kernel=3, chunk_size=16)))


def separate(model: PreTrainedModel, group) -> torch.Tensor:
    """Log-probabilities of the responses, each after a prompt of its own, by the model alone."""
    found = []
    for ids in group.responses:
        whole = torch.cat([group.prompt_ids, ids])
        log_p = model(whole[None]).logits[0, len(group.prompt_ids) - 1 : -1].log_softmax(-1)
        found.append(log_p.gather(-1, ids[:, None])[:, 0])
    return torch.cat(found)


SHAPES = [None, (1, [5, 1, 0, 2]), (1, [1, 1]), (2, [1]), (7, [0, 4]), (40, [70, 1])]
"""Tokens of a prompt and of its responses; None is for a tree of prefixes."""


@pytest.mark.cases(6)
@pytest.mark.parametrize("make", [qwen, lfm, mamba])
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_and_responses_of_any_length_and_a_tree_of_prefixes_are_scored_like_separate_sequences(make, shape):
    model, groups = make(), [random_group(*shape, VOCAB)] if shape else forked_groups(VOCAB)
    with KeepFp64():
        expected = torch.cat([separate(model, group) for group in groups])
        weights = torch.randn(len(expected), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        wanted = torch.autograd.grad(expected @ weights, list(model.parameters()))
    policy = TrainPolicy(model)
    copied = TrainPolicy(copy.deepcopy(model))  # what was switched to shared prompts can be copied
    with KeepFp64():
        found = policy.score(groups)[0]
        assert torch.equal(copied.score(groups)[0], found)
        (found @ weights).backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close([p.grad for p in model.parameters()], list(wanted), rtol=0, atol=1e-9)


def test_what_is_handed_over_matters_and_carries_the_gradient(monkeypatch):
    """The planted fault: responses start from nothing, or from a state without gradient."""
    model, group = qwen(), random_group(6, [4, 5], VOCAB)

    def scored():
        model.zero_grad()
        log_probs, _ = TrainPolicy(model).score([group])
        log_probs.sum().backward()
        return log_probs.detach(), model.model.layers[0].linear_attn.in_proj_qkv.weight.grad.clone()

    (values, slope), copies = scored(), State.copies
    monkeypatch.setattr(State, "copies", lambda self, count: State())
    assert (scored()[0] - values).abs().max() > 0.01
    monkeypatch.setattr(State, "copies", lambda self, count: copies(detached(self), count))
    assert torch.equal(scored()[0], values) and (scored()[1] - slope).abs().max() > 1e-3


def detached(state: State) -> State:
    return State(*({i: x.detach() for i, x in of.items()} for of in state.parts))


def test_layers_that_are_recomputed_know_the_micro_batch_they_were_called_with():
    groups = [random_group(5, [3, 2], VOCAB), random_group(2, [6], VOCAB, group_id=1, seed=1)]

    def gradient(checkpointing: bool, together: bool) -> torch.Tensor:
        model = qwen(checkpointing)
        policy = TrainPolicy(model)
        losses = [policy.score([group])[0].sum() for group in groups] if together else []
        for i, group in enumerate(groups):
            (losses[i] if together else policy.score([group])[0].sum()).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    expected = gradient(checkpointing=False, together=False)
    torch.testing.assert_close(gradient(checkpointing=True, together=True), expected, rtol=0, atol=1e-9)
