"""vLLM on a CPU samples from hybrids, and from the text inside several models, as they are trained and after a push."""

import pytest
import torch
import transformers

from grpo_rl.engines.base import Sampling
from grpo_rl.policies.loading import load_whole
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.weights.push import WeightDeliveryError, WeightSync
from tests.engines.test_contract import as_groups, engine_of

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(torch.cuda.is_available(), reason="what is mended here is vLLM's on a CPU"),
]

SIZES = dict(
    vocab_size=257, hidden_size=64, intermediate_size=96, max_position_embeddings=128, initializer_range=0.1,
    tie_word_embeddings=True, num_attention_heads=2, num_key_value_heads=1,
    pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
HALF = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
# vLLM's kernels on a CPU take heads of linear attention of 64 or 128 numbers.
GATED = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=128, linear_value_head_dim=128)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_chunk_size=64)
VISION = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=64)
MODELS = {
    "linear-attention-under-images": (
        "Qwen3_5ForConditionalGeneration",
        dict(text_config=SIZES | HALF | GATED | dict(head_dim=32), vision_config=VISION, tie_word_embeddings=True),
        "model.layers.0.linear_attn.A_log",
    ),
    "mamba": (
        "GraniteMoeHybridForCausalLM",
        SIZES | HALF | MAMBA | dict(num_local_experts=0, shared_intermediate_size=96, logits_scaling=2.0),
        "model.layers.0.mamba.A_log",
    ),
    "convolution": (
        "Lfm2ForCausalLM",
        SIZES | dict(num_hidden_layers=2, layer_types=["conv", "full_attention"], conv_dim=64, block_dim=64,
                     block_ff_dim=96, block_auto_adjust_ff_dim=False),
        "model.layers.0.conv.conv.weight",
    ),
}  # fmt: skip
"""Class, config, and a weight that vLLM holds in a form or under a name of its own."""
PROMPTS = [[5, 6, 7], [9, 8], list(range(10, 60))]


def save(name: str, config: dict, folder) -> None:
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**config))
    shake(model)
    model.to(torch.bfloat16).save_pretrained(folder)


@torch.no_grad()
def shake(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn_like(parameter)


def mismatch(engine, model) -> float:
    """Mean |sampler - trainer| of sampled tokens, in nats."""
    samples = engine.generate(PROMPTS, 4, Sampling(temperature=1.0, max_new_tokens=16))
    groups = as_groups(PROMPTS, samples)
    scored = TrainPolicy(model).score(groups)[0].detach()
    return (scored - torch.cat([s.log_probs for s in samples])).abs().mean().item()


@pytest.mark.parametrize("kind", MODELS)
def test_hybrids_are_sampled_from_as_they_are_trained_before_and_after_a_push(kind, tmp_path):
    name, config, own = MODELS[kind]
    save(name, config, tmp_path)
    model = load_whole(tmp_path, dtype=torch.bfloat16)
    with engine_of("vllm", tmp_path, 100) as engine:
        assert mismatch(engine, model) < 0.03
        shake(model)
        assert mismatch(engine, model) > 0.03  # it would show
        weights = WeightSync(model, engine)
        assert weights.push() == 1 and weights.push() == 2
        assert mismatch(engine, model) < 0.03
        weights.verify()
        with torch.no_grad():
            model.get_parameter(own)[0] += 1
        with pytest.raises(WeightDeliveryError, match=f"1 of {len(list(model.parameters()))} tensors differ.*{own}"):
            weights.verify()


def test_a_mamba_layer_that_computes_with_old_weights_does_not_pass_as_new(tmp_path):
    from grpo_rl.engines.vllm.held import held_digest

    name, config, _ = MODELS["mamba"]
    save(name, config, tmp_path)
    with engine_of("vllm", tmp_path, 100) as engine:
        vllms = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        mixer = vllms.get_submodule("model.layers.0.mamba")
        for weight, held in (("conv1d.weight", mixer.conv_weights), ("A_log", mixer.A.data)):
            before = held_digest(vllms, f"model.layers.0.mamba.{weight}", torch.bfloat16)
            held[0] *= 2
            assert held_digest(vllms, f"model.layers.0.mamba.{weight}", torch.bfloat16) != before


def test_rotary_embeddings_of_heads_are_those_of_rows():
    from vllm import _custom_ops

    import grpo_rl.engines.vllm.worker  # noqa: F401, mends them

    rows, positions = torch.randn(5, 4 * 32), torch.arange(5) + 3
    angles = torch.rand(16, 16) * 6
    table = torch.cat([angles.cos(), angles.sin()], -1)
    heads, key = rows.clone().view(5, 4, 32), rows.clone().view(5, 4, 32)
    _custom_ops.rotary_embedding(positions, heads, key, 32, table, True)
    left, right = rows.view(5, 4, 32).chunk(2, -1)
    cos, sin = (x[positions][:, None] for x in (angles.cos(), angles.sin()))
    expected = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
    torch.testing.assert_close(heads, expected)
    torch.testing.assert_close(key, expected)
