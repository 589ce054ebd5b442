"""What only vLLM can get wrong."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_rl.engines.base import Sampling
from grpo_rl.testing import save_tiny_model
from grpo_rl.weights.push import WeightSync


def test_a_closed_engine_leaves_no_layer_behind(tmp_path):
    """A sweep builds one engine after another in one process; notes on reloaded layers used to keep every one alive."""
    pytest.importorskip("vllm")
    from grpo_rl.engines.vllm import VLLMEngine

    folder = save_tiny_model(tmp_path / "model")
    frozen = gc.get_freeze_count()
    engine = VLLMEngine(folder, max_model_len=64)
    assert gc.get_freeze_count() <= frozen, "what is frozen is never freed"
    WeightSync(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), engine).push()
    engine.generate([[5, 6]], n=2, sampling=Sampling(max_new_tokens=2))
    engine.close()
    del engine
    gc.collect()
    assert [o for o in gc.get_objects() if type(o).__name__ in ("QKVParallelLinear", "VocabParallelEmbedding")] == []


def test_adapters_in_fp32_are_refused_where_gpu_kernels_do_not_take_them():
    pytest.importorskip("vllm")
    from grpo_rl.engines.vllm_lora import adapter_settings

    for dtype, on_gpu in ((torch.float32, False), (torch.bfloat16, True)):
        assert adapter_settings(4, ["q_proj"], dtype, on_gpu)["max_lora_rank"] == 8
    with pytest.raises(ValueError, match="push=adapter with torch.float32: on a GPU .* train_model.dtype=bfloat16"):
        adapter_settings(4, ["q_proj"], torch.float32, on_gpu=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are for CPUs")
def test_on_cpu_a_short_prompt_is_not_computed_for_every_answer_and_norms_are_kernels(tmp_path):
    pytest.importorskip("vllm")
    from vllm import ir

    from grpo_rl.engines.vllm import VLLMEngine
    from grpo_rl.engines.vllm_cpu import NORMS, PROVIDER

    engine = VLLMEngine(save_tiny_model(tmp_path / "model"), max_model_len=128)
    computed, model = [], engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    handle = model.model.embed_tokens.register_forward_hook(lambda module, args, output: computed.append(len(args[0])))
    try:
        engine.generate([list(range(5, 80))], n=8, sampling=Sampling(max_new_tokens=1))
        # 75 tokens: two blocks of 32 once, the 11 behind them for each of the 8 answers.
        assert computed == [2 * 32 + 8 * 11]
        blocks = engine._llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        assert blocks == 256 * 128 // 32, "room for 256 answers at their longest, and not the 2 GiB it may have"
        for name in NORMS:
            assert getattr(ir.ops, name).get_priority()[0] == PROVIDER
    finally:
        handle.remove()
        engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are for CPUs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norms_on_cpu_are_as_exact_as_pytorchs(dtype):
    pytest.importorskip("vllm")
    from vllm import ir

    from grpo_rl.engines.vllm_cpu import PROVIDER, offer_norms

    offer_norms()
    generator = torch.Generator().manual_seed(0)
    x, residual = (3 * torch.randn(64, 96, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(96, generator=generator).to(dtype)
    for name, args in {"rms_norm": (x,), "fused_add_rms_norm": (x, residual)}.items():

        def normed(provider, tensors, name=name, args=args):
            out = getattr(ir.ops, name).impls[provider].impl_fn(*(t.clone() for t in tensors), 1e-5)
            return out if isinstance(out, tuple) else (out,)

        exact = normed("native", [t.double() for t in (*args, weight)])
        ours, native = (normed(provider, (*args, weight)) for provider in (PROVIDER, "native"))
        for a, b, c in zip(ours, native, exact, strict=True):
            assert (a - c).abs().mean() <= 1.1 * (b - c).abs().mean() + 1e-7
