"""Layers compiled as one on a GPU: exact at any length, gradients too, and compiled for all lengths at once."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from grpo_rl.policies.attention import compile_layers
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group
from tests.helpers import to_fp64
from tests.policies.test_exactness import groups_of

pytestmark = pytest.mark.gpu

SIZES = dict(
    vocab_size=301, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=8192, initializer_range=0.05, tie_word_embeddings=True,
)  # fmt: skip
# Prompt and responses of each group: a few tokens, one block of 128 but for one token, one, one and a token, many.
LENGTHS = {
    "10": [(4, [5, 1])],
    "127": [(60, [67])],
    "128": [(64, [60, 4])],
    "129": [(64, [60, 5])],
    "1300 of three": [(300, [200, 0, 100]), (1, [399]), (50, [125] * 2)],
    "5000 of two": [(1000, [250] * 8), (1000, [100] * 10)],
}


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).train()


def scored(policy: TrainPolicy, name: str) -> list[torch.Tensor]:
    """Log-probabilities and entropies, and the gradients of their weighted sum, on the CPU in fp64."""
    policy.model.zero_grad()
    log_prob, entropy = policy.score(groups_of(LENGTHS[name], vocab=301))
    weight = torch.linspace(-1, 1, len(log_prob), device=log_prob.device)
    ((log_prob * weight + entropy * weight.flip(0)).sum() / len(weight)).backward()
    gradients = [parameter.grad for parameter in policy.model.parameters()]
    return [x.detach().double().cpu() for x in (log_prob, entropy, *gradients)]


def errors(results: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    """Relative L2 errors."""
    return [float((x - y).norm() / y.norm().clamp(min=1e-12)) for x, y in zip(results, exact, strict=True)]


@pytest.fixture(scope="module")
def exact():
    """The results of every length in fp64 on the CPU, uncompiled."""
    policy = TrainPolicy(to_fp64(model()))
    return {name: scored(policy, name) for name in LENGTHS}


@pytest.fixture(scope="module")
def policies():
    """On the GPU, by dtype and by whether its layers are compiled; each of them scores all lengths."""
    made = {}
    for dtype in (torch.float32, torch.bfloat16):
        for is_compiled in (False, True):
            made[dtype, is_compiled] = policy = TrainPolicy(model().to("cuda", dtype))
            if is_compiled:
                compile_layers(policy.model)
    return made


@pytest.mark.parametrize("name", LENGTHS)
def test_in_fp32_values_and_gradients_are_those_of_fp64(policies, exact, name):
    assert max(errors(scored(policies[torch.float32, True], name), exact[name])) <= 1e-3


@pytest.mark.parametrize("name", LENGTHS)
def test_in_bf16_they_are_no_further_from_fp64_than_uncompiled(policies, exact, name):
    compiled, plain = (errors(scored(policies[torch.bfloat16, c], name), exact[name]) for c in (True, False))
    for ours, theirs in zip(compiled, plain, strict=True):
        assert ours <= 1.3 * theirs + 1e-3


@pytest.mark.parametrize("tokens", [512, 16_384])
def test_the_gradient_of_a_large_micro_batch_is_finite_and_the_sum_of_its_halves(policies, tokens):
    """At 16,384 tokens mask tables with a wrong layout once made gradients huge."""
    policy = policies[torch.float32, True]
    each = min(512, tokens // 2)
    groups = [random_group(each // 8, [each * 7 // 64] * 8, 301, group_id=i, seed=i) for i in range(tokens // each)]
    assert sum(group.num_tokens for group in groups) == tokens

    def gradient(batches: list[list]) -> torch.Tensor:
        policy.model.zero_grad()
        for batch in batches:
            policy.score(batch)[0].sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])

    half = len(groups) // 2
    whole, parts = gradient([groups]), gradient([groups[:half], groups[half:]])
    assert whole.isfinite().all()
    assert (whole - parts).norm() <= 1e-3 * parts.norm()
