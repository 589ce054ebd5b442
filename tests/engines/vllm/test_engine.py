"""The properties that only vLLM can get wrong."""

import gc
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_rl.engines.base import Sampling
from grpo_rl.planner.memory import CPU_CACHE_GIB
from grpo_rl.weights.push import WeightSync

pytest.importorskip("vllm")


def check_work_on_cpu(engine):
    """A short prompt is not computed for every response, and norms are kernels."""
    from vllm import ir

    from grpo_rl.engines.vllm.cpu import NORMS, PROVIDER

    computed, model = [], engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    handle = model.model.embed_tokens.register_forward_hook(lambda module, args, output: computed.append(len(args[0])))
    engine.generate([list(range(5, 80))], n=8, sampling=Sampling(max_new_tokens=1))
    handle.remove()
    # 75 tokens: two blocks of 32 once, the 11 behind them for each of the 8 responses.
    assert computed == [2 * 32 + 8 * 11]
    assert all(getattr(ir.ops, name).get_priority()[0] == PROVIDER for name in NORMS)


class Proxy:
    """Fails like Flask's outside of a request, which MLflow's server imports: vLLM would not start beside it."""

    __module__ = "werkzeug.local"

    @property
    def __dict__(self):
        raise RuntimeError("working outside of request context")


@pytest.mark.nightly
def test_a_closed_engine_has_shared_its_prompts_and_leaves_no_layer_behind(tiny_model, monkeypatch):
    """A sweep builds one engine after another in one process; notes on reloaded layers used to keep every one alive."""
    from grpo_rl.engines.vllm.engine import VLLMEngine

    monkeypatch.setitem(globals(), "proxy", Proxy())
    calls = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    engine = VLLMEngine(tiny_model, max_model_len=128)
    assert calls.count("freeze") > 0 and calls[-1] == "unfreeze", "what is frozen is never freed"
    WeightSync(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16), engine).push()
    engine.generate([[5, 6]], n=2, sampling=Sampling(max_new_tokens=2))
    if not torch.cuda.is_available():
        check_work_on_cpu(engine)
    engine.close()
    del engine
    gc.collect()
    assert [o for o in gc.get_objects() if type(o).__name__ in ("QKVParallelLinear", "VocabParallelEmbedding")] == []


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="these are for CPUs")
def test_on_cpu_the_cache_has_room_for_the_longest_responses_and_no_more(tiny_model, monkeypatch):
    from grpo_rl.engines.vllm.cpu import CACHE_BYTES, cpu_arguments
    from grpo_rl.engines.vllm.engine import VLLMEngine

    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    with closing(VLLMEngine(tiny_model, max_model_len=70, max_num_seqs=1)) as engine:
        assert engine._llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == 3 + 1  # of 32 tokens, and vLLM's own
        (samples,) = engine.generate([[5] * 6], n=1, sampling=Sampling(max_new_tokens=64, min_new_tokens=64))
        assert len(samples.response_ids) == 64
    assert CACHE_BYTES == CPU_CACHE_GIB * 2**30
    assert cpu_arguments(tiny_model, torch.bfloat16, 1 << 20, 256, 1)["kv_cache_memory_bytes"] == CACHE_BYTES


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are for CPUs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_on_cpu_that_are_less_exact_than_pytorchs_are_not_taken(dtype):
    from vllm import ir

    from grpo_rl.engines.vllm.cpu import PROVIDER, offer_norms

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
        as_exact = all(
            (a - c).abs().mean() <= 1.1 * (b - c).abs().mean() + 1e-7
            for a, b, c in zip(ours, native, exact, strict=True)
        )
        # vLLM's kernels for CPUs without AVX512-BF16 cut off instead of rounding: PyTorch does these norms there.
        assert getattr(ir.ops, name).impls[PROVIDER].supports_args(*args, weight, 1e-5) == as_exact
        assert as_exact or (dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported())


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are for CPUs")
def test_the_norms_on_cpu_take_heads_that_are_cut_out_of_a_fused_product():
    from vllm import ir

    from grpo_rl.engines.vllm.cpu import PROVIDER, offer_norms

    offer_norms()
    fused, weight = torch.randn(5, 3 * 32 + 7, generator=torch.Generator().manual_seed(0)), torch.rand(32)
    heads = fused[:, 7:].view(5, 3, 32)
    ours = ir.ops.rms_norm.impls[PROVIDER].impl_fn(heads, weight, 1e-5)
    by_hand = heads * (heads.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    torch.testing.assert_close(ours, by_hand)


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are for CPUs")
def test_attention_on_a_cpu_with_amx_takes_the_avx512_kernel(monkeypatch):
    from vllm.v1.attention.backends import cpu_attn

    import grpo_rl.engines.vllm.registered  # noqa: F401

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert cpu_attn._get_attn_isa.__wrapped__(torch.bfloat16, 32) == "amx"  # vLLM's own choice
    assert cpu_attn._get_attn_isa(torch.bfloat16, 32) == "vec"
    assert cpu_attn._get_attn_isa(torch.bfloat16, 16) == "vec16"


@pytest.mark.parametrize(("max_num_seqs", "graphs"), [(1, 1), (100, 16), (1000, 82), (1024, 83)])
def test_a_full_batch_of_decoding_has_a_cuda_graph_however_large(monkeypatch, max_num_seqs, graphs):
    from vllm.config import CompilationConfig, VllmConfig

    from grpo_rl.engines.vllm import common

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(common, "text_part_arguments", lambda model: {})  # there is no folder
    given = common.VLLMBase("model", 1024, gpu_memory_utilization=0.4, max_num_seqs=max_num_seqs)._arguments
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        scheduler_config=SimpleNamespace(**{x: given[x] for x in ("max_num_seqs", "max_num_batched_tokens")}),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        compilation_config=CompilationConfig(**given["compilation_config"]),
        performance_mode="balanced",
        uniform_decode_query_len=1,
    )
    VllmConfig._set_cudagraph_sizes(config)
    sizes = config.compilation_config.cudagraph_capture_sizes
    assert len(sizes) == graphs
    assert sizes[-1] == config.compilation_config.max_cudagraph_capture_size == max_num_seqs


def test_of_a_gpus_kept_sets_those_of_all_tokens_are_returned_as_empty(monkeypatch):
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    from grpo_rl.engines.vllm.kept import leave_out_whole_sets

    monkeypatch.setattr(SamplingMaskTensors, "tolists", SamplingMaskTensors.tolists)  # put back at the end
    whole, two = [0b111], [0b101]  # of three tokens, a bit each
    sets = SamplingMaskTensors(
        torch.tensor([[0, 1, 2], [0, 2, 0]]), torch.tensor([whole, two], dtype=torch.uint8), torch.tensor([3, 2]), 3
    )
    assert sets.tolists().slice_request(0, 1).to_nested_list() == [[0, 1, 2]]
    leave_out_whole_sets()
    assert [sets.tolists().slice_request(i, 1).to_nested_list() for i in (0, 1)] == [[[]], [[0, 2]]]
