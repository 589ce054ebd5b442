"""Tests that need a GPU: compiled kernels equal fp64 definitions, in value and gradient, and hold nothing large."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from grpo_rl.policies.attention import compile_layers
from grpo_rl.policies.attention_flex import flex_shared_prefix
from grpo_rl.policies.head import log_prob_and_entropy
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group, save_tiny_model
from tests.helpers import forked_groups
from tests.policies.test_attention_flex import SHAPES, dense, layout_of, who_sees_whom
from tests.policies.test_head import full

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MIB = 1 << 20


def random(*shape: int, seed: int = 0, dtype=torch.float32, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * spread).to(DEVICE, dtype)


def values_and_gradients(road: Callable, inputs: list[torch.Tensor], up: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a function of several, and the gradient of their weighted sum by each input, in fp64."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    results = road(*leaves)
    grads = torch.autograd.grad(sum((u * r).sum() for u, r in zip(up, results, strict=True)), leaves)
    return [x.detach().double() for x in (*results, *grads)]


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that was held beyond what is held before; after a call that compiles and fills caches."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def head_problem(dtype: torch.dtype):
    tokens, size, vocabulary = 300, 64, 5003
    inputs = [random(tokens, size), random(vocabulary, size, seed=1, spread=0.3), random(vocabulary, seed=2)]
    target = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    return [x.to(dtype) for x in inputs], target, [random(tokens, seed=4), random(tokens, seed=5)]


@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (0.7, 3.0)])
def test_the_head_in_fp32_equals_full_logits_in_fp64(temperature, softcap):
    inputs, target, up = head_problem(torch.float32)
    exact = values_and_gradients(
        lambda h, w, b: full(h, w, target, b, temperature, softcap), [x.double() for x in inputs], up
    )
    tiled = values_and_gradients(
        lambda h, w, b: log_prob_and_entropy(h, w, target, b, temperature, softcap), inputs, up
    )
    for result, expected in zip(tiled, exact, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_the_head_in_bf16_is_no_further_from_fp64_than_the_plain_bf16_road():
    inputs, target, up = head_problem(torch.bfloat16)
    exact = values_and_gradients(lambda h, w, b: full(h, w, target, b, 0.7), [x.double() for x in inputs], up)
    plain = values_and_gradients(lambda h, w, b: full(h, w, target, b, 0.7), inputs, up)
    tiled = values_and_gradients(lambda h, w, b: log_prob_and_entropy(h, w, target, b, 0.7), inputs, up)
    for result, other, expected in zip(tiled, plain, exact, strict=True):
        assert (result - expected).abs().mean() <= 1.2 * (other - expected).abs().mean()


def test_the_heads_memory_does_not_grow_with_tokens_times_vocabulary():
    """8,192 tokens more would be 4.9 GB more of fp32 logits; of hidden states and their gradient they are 8 MiB."""
    vocabulary, size = 150_000, 256
    weight = random(vocabulary, size, seed=1, dtype=torch.bfloat16).requires_grad_()

    def peak(tokens: int) -> int:
        hidden = random(tokens, size, dtype=torch.bfloat16).requires_grad_()
        target = torch.arange(tokens, device=DEVICE)
        return peak_bytes(
            lambda: torch.autograd.grad(
                sum(x.sum() for x in log_prob_and_entropy(hidden, weight, target)), [hidden, weight]
            )
        )

    assert peak(16_384) - peak(8_192) <= 64 * MIB


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (None, 2.0), (133, 2.0)])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flex_attention_in_fp32_equals_dense_attention_in_fp64(kv_heads, window, softcap):
    layout = layout_of(SHAPES, forked_groups())
    seen, total = who_sees_whom(layout, window).to(DEVICE), layout.tokens
    inputs = [random(1, heads, total, 64, seed=heads + i) for i, heads in enumerate((4, kv_heads, kv_heads))]
    up = [random(1, 4, total, 64, seed=9)]
    exact = values_and_gradients(lambda q, k, v: [dense(q, k, v, seen, 0.2, softcap)], [x.double() for x in inputs], up)
    flex = values_and_gradients(lambda q, k, v: [flex_shared_prefix(q, k, v, layout, 0.2, window, softcap)], inputs, up)
    for result, expected in zip(flex, exact, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_flex_attention_in_bf16_is_no_further_from_fp64_than_sdpa_on_separate_sequences():
    layout = layout_of([(300, [200] * 4)])
    seen, total = who_sees_whom(layout, None).to(DEVICE), layout.tokens
    inputs = [random(1, heads, total, 64, seed=heads + i, dtype=torch.bfloat16) for i, heads in enumerate((8, 2, 2))]
    up = [random(1, 8, total, 64, seed=9)]

    def sdpa(q, k, v):
        outs = []
        for g, node in enumerate(layout.nodes[1:]):
            response = slice(node.start, node.end)
            q_, k_, v_ = (torch.cat([x[:, :, :300], x[:, :, response]], 2) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q_, k_, v_, is_causal=True, scale=0.2, enable_gqa=True
            )
            outs += [out[:, :, :300]] * (g == 0) + [out[:, :, 300:]]
        return [torch.cat(outs, 2)]

    def shared(q, k, v):
        return [flex_shared_prefix(q, k, v, layout, 0.2)]

    exact = values_and_gradients(lambda q, k, v: [dense(q, k, v, seen, 0.2)], [x.double() for x in inputs], up)
    plain, flex = values_and_gradients(sdpa, inputs, up), values_and_gradients(shared, inputs, up)
    for result, other, expected in zip(flex, plain, exact, strict=True):
        assert (result - expected).abs().mean() <= 1.2 * (other - expected).abs().mean()


def test_flex_attention_compiles_once_for_a_bucket_of_lengths_whatever_the_layout_and_the_window():
    def run(shapes, window):
        layout = layout_of(shapes)
        total = layout.tokens
        inputs = [random(1, heads, total, 64, dtype=torch.bfloat16).requires_grad_() for heads in (4, 2, 2)]
        flex_shared_prefix(*inputs, layout, 0.125, window).sum().backward()

    run(SHAPES, None)
    with torch.compiler.set_stance("fail_on_recompile"):
        run([(9, [400, 3])], None)
        run([(256, [128, 128])], None)
        run(SHAPES, 20)


def test_flex_attention_holds_no_scores():
    """All scores of 16,384 tokens and 8 heads would be 4 GiB in bf16."""
    layout = layout_of([(512, [192] * 8)] * 8)
    inputs = [random(1, heads, 16_384, 64, dtype=torch.bfloat16).requires_grad_() for heads in (8, 2, 2)]
    run = lambda: torch.autograd.grad(flex_shared_prefix(*inputs, layout, 0.125).sum(), inputs)  # noqa: E731
    assert peak_bytes(run) <= 512 * MIB


SIZES = dict(
    vocab_size=301, hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.1,
)  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, sliding_window=20, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    ),
}


@pytest.mark.parametrize("as_layers", [False, True], ids=["uncompiled", "layers"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_and_their_gradients_are_those_of_the_cpu(name, checkpointing, as_layers):
    groups = [random_group(p, lengths, 301, group_id=i, seed=i) for i, (p, lengths) in enumerate(SHAPES)]

    def scored(device: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = MODELS[name]().to(device).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = TrainPolicy(model, temperature=0.7)
        if as_layers and device == DEVICE:
            compile_layers(policy.model)
        log_prob, entropy = policy.score(groups)
        weight = torch.linspace(-1, 1, len(log_prob), device=device)
        ((log_prob * weight + entropy * weight.flip(0)).sum() / len(weight)).backward()
        return [log_prob.detach().cpu(), entropy.detach().cpu()], {n: p.grad.cpu() for n, p in model.named_parameters()}

    (expected, expected_grads), (results, grads) = scored("cpu"), scored(DEVICE)
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-4)
    for parameter, grad in grads.items():
        error = (grad - expected_grads[parameter]).norm() / expected_grads[parameter].norm()
        assert error <= 1e-3, f"{parameter}: {error}"


def test_a_model_with_compiled_layers_needs_no_cpp_compiler(tmp_path):
    """In a process of its own with nothing cached: PATH has a C compiler, for Triton, and CXX names none."""
    program = (
        "import torch\n"
        "from grpo_rl.policies.policy import TrainPolicy\n"
        "from grpo_rl.testing import random_group, save_tiny_model\n"
        f"folder = save_tiny_model({str(tmp_path / 'model')!r}, hidden_size=64)\n"
        "policy = TrainPolicy.load(folder, torch.bfloat16, 'cuda', compile=None)\n"
        "assert any(module._compiled_call_impl for module in policy.model.modules())\n"
        "log_prob, entropy = policy.score([random_group(prompt=5, lengths=[7, 3])])\n"
        "(log_prob.sum() + entropy.sum()).backward()\n"
        "assert all(weight.grad.isfinite().all() for weight in policy.model.parameters())\n"
    )
    env = os.environ | {"CXX": "/no/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def test_one_graph_serves_short_and_long_micro_batches_and_gradients_are_those_of_uncompiled_layers(tmp_path):
    """Norms of 6,000 rows of 1,024: where PyTorch's own choice of kernels changes."""
    folder = save_tiny_model(tmp_path / "model", hidden_size=1024)

    def step(policy: TrainPolicy, responses: int) -> torch.Tensor:
        policy.model.zero_grad()
        log_prob, entropy = policy.score([random_group(prompt=100, lengths=[295] * responses)])
        (log_prob.sum() + entropy.sum()).backward()
        return torch.cat([weight.grad.flatten() for weight in policy.model.parameters()]).double()

    plain, policy = (TrainPolicy.load(folder, torch.bfloat16, DEVICE, compile=c) for c in (False, True))
    exact = TrainPolicy.load(folder, torch.float32, DEVICE, compile=False)
    sizes = (2, 10, 20, 55)
    expected, theirs = ([step(other, responses) for responses in sizes] for other in (exact, plain))
    for responses in (1, 3):
        step(policy, responses)
    with torch.compiler.set_stance("fail_on_recompile"):
        ours = [step(policy, responses) for responses in sizes]
    for compiled, uncompiled, fp32 in zip(ours, theirs, expected, strict=True):
        assert (compiled - fp32).norm() <= 1.5 * (uncompiled - fp32).norm()
