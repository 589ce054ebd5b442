"""Arguments that vLLM is started with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from grpo_rl.engines.base import Sampling
from grpo_rl.engines.vllm import common
from grpo_rl.engines.vllm.common import VLLMBase
from grpo_rl.engines.vllm.worker import WorkerExtension

# isort: split
from vllm.config import CompilationConfig, VllmConfig


@pytest.fixture
def on_gpu(monkeypatch):
    memory = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(common, "text_part_arguments", lambda model: {})  # there is no folder
    return memory


def arguments_of(max_num_seqs=96, max_model_len=1024, **settings):
    settings |= {"gpu_memory_utilization": 0.4, "max_num_seqs": max_num_seqs}
    return VLLMBase("model", max_model_len, **settings)._arguments


def test_an_engine_on_a_gpu_shares_prompts_and_computes_large_batches_in_parts(on_gpu):
    given = arguments_of()
    assert given["enable_prefix_caching"] and given["enable_chunked_prefill"]
    assert (given["max_num_seqs"], given["max_num_batched_tokens"]) == (96, 16384)
    assert given["kv_cache_memory_bytes"] is None and given["gpu_memory_utilization"] == 0.4
    assert arguments_of(max_num_seqs=16, max_model_len=64)["max_num_batched_tokens"] == 16 * 64
    on_gpu.total_memory = 24 << 30
    assert arguments_of()["max_num_batched_tokens"] == 8192


def test_an_engine_on_a_gpu_returns_kept_sets_if_it_is_started_for_sampling_that_cuts(on_gpu):
    assert arguments_of(sampling=Sampling(top_p=0.9))["return_sampling_mask"] is True
    assert arguments_of()["return_sampling_mask"] is False
    with pytest.raises(ValueError, match="this engine returns no kept sets"):
        VLLMBase("model", 64)._parameters(1, Sampling(min_p=0.1))


def test_an_engine_that_takes_a_dead_ones_place_is_told_its_cache_and_does_not_measure(on_gpu):
    assert arguments_of(cache_bytes=12345)["kv_cache_memory_bytes"] == 12345


@pytest.mark.parametrize(("max_num_seqs", "graphs"), [(1, 1), (100, 16), (1000, 82), (1024, 83)])
def test_a_full_batch_of_decoding_has_a_cuda_graph_however_large(on_gpu, max_num_seqs, graphs):
    given = arguments_of(max_num_seqs=max_num_seqs)
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
    assert (len(sizes), sizes[-1], config.compilation_config.max_cudagraph_capture_size) == (
        graphs,
        *[max_num_seqs] * 2,
    )


def test_the_size_of_the_cache_is_what_was_given_or_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    worker: Any = WorkerExtension()
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
    with pytest.raises(RuntimeError, match="vLLM does not say how large its KV cache is"):
        worker.cache_bytes()
    worker.available_kv_cache_memory_bytes = 12345
    assert worker.cache_bytes() == 12345
    worker.cache_config.kv_cache_memory_bytes = 678
    assert worker.cache_bytes() == 678
