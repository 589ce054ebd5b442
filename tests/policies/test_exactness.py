"""Scores of packed groups equal transformers' own padded forward, in value and gradient, for every family of models.

The plain road knows nothing of groups: a right-padded batch, each response behind its own copy of the prompt, eager
attention with the masks that transformers makes, full logits.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial, partialmethod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch.nn.attention import flex_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GemmaForCausalLM,
    GraniteSWAForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3ForCausalLM,
    MinistralForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from grpo_rl.data.batching import MicroBatching
from grpo_rl.data.group import Group, Kept
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.policies import attention
from grpo_rl.policies.packing import pack
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group
from grpo_rl.training.micro_batches import scored_micro_batches
from tests.helpers import KeepFp64, forked_groups, to_fp64

VOCAB = 50
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=12,  # not hidden_size / num_attention_heads
    max_position_embeddings=128,
    initializer_range=0.3,  # scores far from uniform: a wrong mask, scale or cap then shows in the first digits
)


def rope(kind: str, **settings: float) -> dict:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=1000.0, **settings))


WINDOWS = dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)
FAMILIES: dict[str, tuple[type[PreTrainedModel], dict]] = {
    "llama-tied": (LlamaForCausalLM, dict(tie_word_embeddings=True)),
    "llama-mha": (LlamaForCausalLM, dict(num_key_value_heads=6, head_dim=None)),
    "llama-mqa": (LlamaForCausalLM, dict(num_key_value_heads=1)),
    "llama-biases": (LlamaForCausalLM, dict(attention_bias=True, mlp_bias=True)),
    "llama-head-bias": (LlamaForCausalLM, {}),
    "llama-rope-linear": (LlamaForCausalLM, rope("linear", factor=4.0)),
    "llama-rope-llama3": (
        LlamaForCausalLM,
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-rope-yarn": (LlamaForCausalLM, rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "qwen2": (Qwen2ForCausalLM, {}),
    "qwen2-windows": (Qwen2ForCausalLM, WINDOWS),
    "qwen3": (Qwen3ForCausalLM, {}),
    "qwen3-windows": (Qwen3ForCausalLM, WINDOWS),
    "mistral": (MistralForCausalLM, dict(sliding_window=None)),
    "mistral-window": (MistralForCausalLM, dict(sliding_window=5)),
    "ministral": (MinistralForCausalLM, dict(sliding_window=3, layer_types=["sliding_attention", "full_attention"])),
    "gemma": (GemmaForCausalLM, dict(num_key_value_heads=1)),
    "gemma2": (
        Gemma2ForCausalLM,
        dict(
            num_hidden_layers=4,  # windows in the first and third
            sliding_window=4,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        dict(
            num_hidden_layers=3,
            sliding_window=4,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            query_pre_attn_scalar=20,
            final_logit_softcapping=3.0,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            },
        ),
    ),
    "granite-sinks": (
        GraniteSWAForCausalLM,
        dict(
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            logits_scaling=1.6,
            attention_multiplier=0.4,
            residual_multiplier=0.7,
            embedding_multiplier=3.0,
        ),
    ),
    "mla": (
        MiniCPM3ForCausalLM,
        dict(
            num_key_value_heads=6,
            head_dim=8,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=10,
        ),
    ),
}


@cache
def fp64_model(family: str, **overrides: object) -> PreTrainedModel:
    """A small random model, built once; each road sets the attention that it needs."""
    torch.manual_seed(0)
    model_class, config = FAMILIES[family]
    model = model_class(model_class.config_class(**SIZES | config | overrides))
    if family == "llama-head-bias":
        model.lm_head = torch.nn.Linear(SIZES["hidden_size"], VOCAB, bias=True)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases of 0 and norms of 1 would hide that they are left out
                parameter += 0.3 * torch.randn_like(parameter)
    return to_fp64(model)


def groups_of(shapes: Sequence[tuple[int, Sequence[int]]], seed: int = 0, vocab: int = VOCAB) -> list[Group]:
    return [random_group(p, lengths, vocab, group_id=i, seed=seed + i) for i, (p, lengths) in enumerate(shapes)]


RAGGED = [(5, [3, 2, 0, 3, 1]), (1, [4, 7]), (9, [1, 1, 1]), (3, [0, 0]), (2, [17, 33, 20]), (20, [6, 16])]
"""Equal and unequal lengths, empty and one-token responses, a one-token prompt, responses longer than every window."""


def plain_road(
    model: PreTrainedModel, groups: Sequence[Group], temperature: float, attention: str = "eager"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of every response token, at least in fp32."""
    log_p = plain_distributions(model, groups, temperature, attention)
    target = torch.cat([g.response_ids for g in groups])
    return log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def plain_distributions(
    model: PreTrainedModel, groups: Sequence[Group], temperature: float, attention: str = "eager"
) -> torch.Tensor:
    """[N, V] log-probability of every word at every response token, at least in fp32."""
    sequences = [(len(g.prompt_ids), torch.cat([g.prompt_ids, ids])) for g in groups for ids in g.responses]
    batch = pad_sequence([ids for _, ids in sequences], batch_first=True)
    mask = pad_sequence([torch.ones_like(ids) for _, ids in sequences], batch_first=True)
    model.set_attn_implementation(attention)
    with KeepFp64() if model.dtype == torch.float64 else nullcontext():
        logits = model(batch, attention_mask=mask).logits
    logits = torch.cat([logits[row, prompt - 1 : len(ids) - 1] for row, (prompt, ids) in enumerate(sequences)])
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def random_loss(log_prob: torch.Tensor, entropy: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
    """Log-probabilities and entropies under random weights, which belong to the tokens however these are split."""
    weights = []
    for g in groups:
        generator = torch.Generator().manual_seed(g.group_id)
        weights.append(torch.randn(2, len(g.response_ids), dtype=torch.float64, generator=generator))
    return (torch.cat(weights, dim=1).to(log_prob.dtype) * torch.stack([log_prob, entropy])).sum()


def assert_equal_gradients(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-9
) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_scored_like_the_plain_road(
    model: PreTrainedModel,
    groups: Sequence[Group],
    temperature: float = 0.7,
    checkpointing: bool = False,
    micro_batches: Sequence[Sequence[Group]] | None = None,
    prepare: Callable[[PreTrainedModel], None] = lambda _: None,
    gradient_tolerance: float = 1e-9,
) -> None:
    """Values of all groups at once, and gradients summed over ``micro_batches`` (default: all groups at once).

    ``prepare`` changes the model after the plain road and before ours.
    """
    expected = plain_road(model, groups, temperature)
    expected_gradients = gradients(model, random_loss(*expected, groups))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        policy = TrainPolicy(model, temperature)
        prepare(model)
        scored = policy.score(groups)
        split = [random_loss(*policy.score(micro), micro) for micro in micro_batches or []]
        actual_gradients = gradients(model, sum(split) if split else random_loss(*scored, groups))
    finally:
        model.gradient_checkpointing_disable()
    assert scored[0].dtype == scored[1].dtype == torch.float64
    torch.testing.assert_close(scored, expected, rtol=0, atol=1e-9)
    assert_equal_gradients(actual_gradients, expected_gradients, gradient_tolerance)


IN_MAKE_TEST = {"llama-tied", "qwen3-windows", "gemma2", "mla"}
EACH_FAMILY = [pytest.param(f, marks=() if f in IN_MAKE_TEST else pytest.mark.nightly) for f in FAMILIES]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
@pytest.mark.parametrize("family", EACH_FAMILY)
@pytest.mark.parametrize("groups", [groups_of(RAGGED, seed=3), forked_groups(VOCAB)], ids=["ragged", "tree"])
def test_every_family_is_scored_like_the_plain_road(groups, family, checkpointing):
    assert_scored_like_the_plain_road(fp64_model(family), groups, checkpointing=checkpointing)


def test_tokens_that_sequences_share_keep_each_its_own_kept_set():
    """Sets differ by rounding between equal tokens; here they are drawn, and every third token has none."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for group in forked_groups(VOCAB):
        drawn = [torch.randperm(VOCAB, generator=generator)[:7].tolist() for _ in group.response_ids]
        sets = [[token, *(set(own) - {token})] for token, own in zip(group.response_ids.tolist(), drawn, strict=True)]
        kept = Kept.from_lists([[] if i % 3 == 2 else own for i, own in enumerate(sets)])
        groups.append(replace(group, kept_ids=kept.ids, kept_counts=kept.counts))
    groups[1] = forked_groups(VOCAB)[1]  # nothing was cut there
    policy = TrainPolicy(fp64_model("llama-tied"))
    found = policy.score(groups)
    alone = [policy.score([group.with_only([g])]) for group in groups for g in range(group.size)]
    for together, each in zip(found, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(together, torch.cat(each), rtol=0, atol=1e-12)


@pytest.fixture
def traced(monkeypatch):
    """Layers are compiled as on CUDA, but run by PyTorch's operators in the place of Triton's kernels."""
    # FlexAttention refuses gradients on a CPU, for which it has no kernels; its operators have them.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    monkeypatch.setattr(attention, "why_uncompiled", lambda _: None)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True):
        yield
    torch._dynamo.reset()


COMPILED = [*((family, False) for family in FAMILIES), *((f, True) for f in ("llama-tied", "gemma2", "qwen3-windows"))]


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "checkpointing"), COMPILED)
@pytest.mark.usefixtures("traced")
def test_layers_compiled_as_one_with_their_attention_are_scored_like_the_plain_road(family, checkpointing):
    assert_scored_like_the_plain_road(
        fp64_model.__wrapped__(family),
        groups_of(RAGGED, seed=3) + [replace(g, group_id=g.group_id + len(RAGGED)) for g in forked_groups(VOCAB)],
        checkpointing=checkpointing,
        prepare=attention.compile_layers,
        # In a graph, PyTorch takes FlexAttention's log-sum-exp for fp32, whatever it is.
        gradient_tolerance=1e-5 if "sinks" in family else 1e-9,
    )


@pytest.mark.nightly
@pytest.mark.usefixtures("traced")
def test_a_layer_that_is_compiled_too_often_or_is_not_one_graph_with_its_attention_is_an_error(monkeypatch):
    model = fp64_model.__wrapped__("llama-tied", num_hidden_layers=1)
    policy, groups = TrainPolicy(model), groups_of([(5, [3, 2])])
    attention.compile_layers(model)
    policy.score(groups)
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():  # without gradients it is another graph
        with pytest.raises(FailOnRecompileLimitHit):
            policy.score(groups)
    torch._dynamo.reset()
    mlp = model.get_submodule("model.layers.0.mlp")
    forward = type(mlp).forward

    def broken(self, x):
        torch._dynamo.graph_break()
        return forward(self, x)

    monkeypatch.setattr(type(mlp), "forward", broken)
    with pytest.raises(Unsupported):
        policy.score(groups)


LENGTH = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 32, 33]) | st.integers(0, 40)
SHAPE = st.tuples(st.integers(1, 24), st.lists(LENGTH, min_size=1, max_size=5))


@pytest.mark.slow
@settings(max_examples=60)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    shapes=st.lists(st.tuples(SHAPE, st.integers(0, 2)), min_size=1, max_size=6),
    temperature=st.sampled_from([0.5, 1.0, 1.5]),
    checkpointing=st.booleans(),
)
def test_any_ragged_groups_split_in_any_way_are_scored_like_the_plain_road(family, shapes, temperature, checkpointing):
    groups = groups_of([shape for shape, _ in shapes])
    split: dict[int, list[Group]] = {}
    for group, (_, micro_batch) in zip(groups, shapes, strict=True):
        split.setdefault(micro_batch, []).append(group)
    model = fp64_model(family)
    assert_scored_like_the_plain_road(model, groups, temperature, checkpointing, list(split.values()))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param("llama-tied", {}, id="full"),
        pytest.param("mistral-window", {}, id="narrow-window"),
        pytest.param("mistral-window", dict(sliding_window=150), id="wide-window"),
        pytest.param("gemma2", dict(num_hidden_layers=2), id="capped-alternating"),
    ],
)
def test_prompts_and_responses_of_hundreds_of_tokens_are_scored_like_the_plain_road(family, overrides):
    """Long enough that queries, keys and heads are computed in several blocks."""
    model = fp64_model.__wrapped__(family, **overrides)
    groups = groups_of([(300, [290, 3, 270]), (2, [310])])
    later = replace(groups[1], group_id=2, prompt_ids=groups[0].response_ids[:280])
    later = replace(later, prompt_ids=torch.cat([groups[0].prompt_ids, later.prompt_ids]))
    assert len(pack([*groups, later]).input_ids) == sum(group.num_tokens for group in groups) + 310
    assert_scored_like_the_plain_road(model, [*groups, later])


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [1, 40, 1000])
@pytest.mark.parametrize("family", ["llama-tied", "gemma2"])
def test_a_tools_tokens_are_read_but_not_trained_on(family, max_tokens):
    """Two turns: what the policy wrote, a tool's reply, what the policy wrote next; loss and gradient by hand."""
    clip, kl_coef, entropy_coef = 0.2, 0.1, 0.01
    model = fp64_model(family)
    groups = groups_of([(6, [9, 5]), (1, [12, 5]), (11, [6, 5]), (3, [7, 2])], seed=11)
    log_prob, entropy = plain_road(model, groups, temperature=0.8)
    # Each response trains 2, 4 or 8 tokens and the step has 8 responses: weights that fp32 holds exactly.
    tool = {12: slice(3, 7), 9: slice(2, 7), 7: slice(1, 4), 6: slice(2, 4), 5: slice(0, 3), 2: slice(0, 0)}
    torch.manual_seed(0)
    written, loss, start = [], 0.0, 0
    for group in groups:
        lp, h = (x[start : start + len(group.response_ids)] for x in (log_prob, entropy))
        start += len(lp)
        old, ref = (lp.detach().float() + 0.3 * torch.randn(len(lp)) for _ in range(2))
        trainable = torch.ones(len(lp), dtype=torch.bool)
        advantages = torch.randn(group.size)
        for g, length in enumerate(group.lengths.tolist()):
            trainable[group.offsets[g] :][tool[length]] = False
            own = (torch.repeat_interleave(group.lengths) == g) & trainable
            ratio, gap, a = (lp[own] - old[own]).exp(), ref[own] - lp[own], advantages[g].double()
            surrogate = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
            loss = loss + (surrogate + kl_coef * (gap.exp() - gap - 1) - entropy_coef * h[own]).mean() / 8
        old[~trainable] = 0.0  # nothing sampled them
        written.append(replace(group, log_probs=old, ref_log_probs=ref, trainable=trainable, advantages=advantages))
    expected = gradients(model, loss)

    policy = TrainPolicy(model, temperature=0.8)
    torch.testing.assert_close(policy.score(written), (log_prob, entropy), rtol=0, atol=1e-9)
    grpo = GRPOLoss(clip_low=clip, clip_high=clip, kl_coef=kl_coef, entropy_coef=entropy_coef)
    losses = [grpo(micro)["loss"] for micro in scored_micro_batches(policy, written, MicroBatching(max_tokens))]
    assert len(losses) == {1: 4, 40: 2, 1000: 1}[max_tokens]
    assert_equal_gradients(gradients(model, sum(losses)), expected)


def errors_in_bf16(seed: int) -> torch.Tensor:
    """Errors of the plain and the packed forward: mean of log-probabilities, and relative of the gradient's norm."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, initializer_range=0.09)).bfloat16()
    exact_model = LlamaForCausalLM(model.config)
    exact_model.load_state_dict(model.state_dict())  # the same rounded weights: only the arithmetic differs
    groups = groups_of([(40, [30, 7, 50, 19]), (12, [25, 25, 3])], seed=seed, vocab=512)

    def scored_with_gradient(road, model):
        scored = road(model, groups, 1.0)
        gradient = gradients(model, random_loss(*scored, groups))
        return scored[0].double(), torch.cat([g.flatten().double() for g in gradient.values()])

    exact, exact_gradient = scored_with_gradient(plain_road, to_fp64(exact_model))
    errors = []
    for road in (partial(plain_road, attention="sdpa"), lambda model, groups, t: TrainPolicy(model, t).score(groups)):
        log_prob, gradient = scored_with_gradient(road, model)
        distance = (gradient - exact_gradient).norm() / exact_gradient.norm()
        errors.append(torch.stack([(log_prob - exact).abs().mean(), distance]))
    return torch.stack(errors).detach()


@pytest.mark.nightly
def test_bf16_is_no_further_from_fp64_than_the_plain_bf16_road():
    """Both roads round at every product, each at other places, so their errors differ by chance.

    The mean over 16 models still moves by about 1 % with the choice of models; 5 % is past that, and well below what
    one more rounding in each layer costs (scores in bf16: 8 %).
    """
    plain, packed = torch.stack([errors_in_bf16(seed) for seed in range(16)]).mean(0)
    assert (packed <= 1.05 * plain).all(), f"errors of log-probabilities and gradient: {packed}, plain road {plain}"
