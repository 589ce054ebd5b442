"""What vLLM is started with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from grpo_rl.engines.vllm.common import VLLMBase


@pytest.fixture
def on_gpu(monkeypatch):
    memory = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
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


def test_an_engine_that_takes_a_dead_ones_place_is_told_its_cache_and_does_not_measure(on_gpu):
    assert arguments_of(cache_bytes=12345)["kv_cache_memory_bytes"] == 12345
