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
    engine = VLLMEngine(folder, max_model_len=64)
    WeightSync(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), engine).push()
    engine.generate([[5, 6]], n=2, sampling=Sampling(max_new_tokens=2))
    engine.close()
    del engine
    gc.collect()
    assert [o for o in gc.get_objects() if type(o).__name__ in ("QKVParallelLinear", "VocabParallelEmbedding")] == []
