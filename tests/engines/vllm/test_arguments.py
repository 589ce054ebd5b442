"""Arguments that vLLM is started with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from grpo_rl.engines.vllm import common
from grpo_rl.engines.vllm.common import VLLMBase

# isort: split
from vllm.config import CompilationConfig, VllmConfig


@pytest.mark.parametrize(("max_num_seqs", "graphs"), [(1, 1), (100, 16), (1000, 82), (1024, 83)])
def test_a_full_batch_of_decoding_has_a_cuda_graph_however_large(monkeypatch, max_num_seqs, graphs):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(common, "text_part_arguments", lambda model: {})  # there is no folder
    given = VLLMBase("model", 1024, gpu_memory_utilization=0.4, max_num_seqs=max_num_seqs)._arguments
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
