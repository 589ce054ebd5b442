"""vLLM's refusals for lack of memory become one line in terms of our settings; its texts are the installed vLLM's."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from types import SimpleNamespace

import pytest
import torch

from grpo_rl.engines.vllm import refusals
from grpo_rl.testing import save_tiny_model

GIB = 1 << 30


def explained(error: Exception) -> str:
    """The exception of a start of vLLM that fails with the error."""
    with pytest.raises(ValueError) as caught, refusals.refusals_explained(0.3, 2048):
        raise error
    assert caught.value.__cause__ is error and "\n" not in str(caught.value)
    return str(caught.value)


def raised(call) -> Exception:
    with pytest.raises(ValueError) as caught:
        call()
    return caught.value


def test_too_little_memory_for_keys_and_values():
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    none = raised(lambda: utils._check_enough_kv_cache_memory(0, lambda: GIB, 2048, lambda left: 0))
    assert explained(none) == (
        "inference_model.gpu_memory_utilization=0.3 leaves vLLM no room for keys and values beside its weights; raise "
        "it, or take a smaller model"
    )
    short = raised(lambda: utils._check_enough_kv_cache_memory(GIB // 2, lambda: 4 * GIB, 2048, lambda left: 256))
    assert explained(short) == (
        "inference_model.max_model_len=2048 takes 4.0 GiB of keys and values, and "
        "inference_model.gpu_memory_utilization=0.3 leaves 0.5 GiB for them; raise gpu_memory_utilization, or lower "
        "max_model_len to 256"
    )
    shortest = raised(lambda: utils._check_enough_kv_cache_memory(GIB // 2, lambda: 4 * GIB, 2048, lambda left: 0))
    assert explained(shortest).endswith("or lower max_model_len")


def test_memory_that_is_taken():
    utils = pytest.importorskip("vllm.v1.worker.utils")
    snapshot = SimpleNamespace(total_memory=80 * GIB, free_memory=30 * GIB, device_=torch.device("cuda", 1))
    config = SimpleNamespace(gpu_memory_utilization=0.5)
    assert explained(raised(lambda: utils.request_memory(snapshot, config))) == (
        "inference_model.gpu_memory_utilization=0.3 asks for 40.0 of the 80.0 GiB of cuda:1, and 30.0 GiB are free; "
        "lower it to 0.37 or less, or end what else holds memory there"
    )


def test_memory_that_another_process_frees_meanwhile():
    worker = pytest.importorskip("vllm.v1.worker.gpu_worker")
    source = inspect.getsource(worker)
    assert '"Error in memory profiling. "\n' in source and 'f"Initial free memory {format_gib(' in source
    assert 'GiB, "\n                f"current free memory {format_gib(' in source
    text = "Error in memory profiling. Initial free memory 30.0 GiB, current free memory 42.5 GiB. This happens when"
    assert explained(AssertionError(text)).startswith(
        "another process on the GPU freed memory while vLLM measured what inference_model.gpu_memory_utilization=0.3 "
        "leaves: 30.0 GiB were free, then 42.5 GiB"
    )


@pytest.fixture
def reporting():
    before = logging.getLogRecordFactory()
    refusals.report_failures.__wrapped__()
    yield
    logging.setLogRecordFactory(before)


def test_the_reason_of_a_process_that_ended_is_what_it_reported(reporting):
    log = logging.getLogger("vllm.v1.engine.core")
    with pytest.raises(ValueError, match="gpu_memory_utilization=0.1 leaves vLLM no room"):
        with refusals.refusals_explained(0.1, 64):
            try:
                raise ValueError("No available memory for the cache blocks. Try increasing")
            except ValueError:
                log.exception("EngineCore failed to start.")
            raise RuntimeError("Engine core initialization failed. See root cause above.")
    assert refusals.REPORT not in os.environ
    log.exception("later")


def test_a_start_leaves_the_report_of_the_process_around_it(monkeypatch):
    monkeypatch.setenv(refusals.REPORT, "/outer")
    with refusals.refusals_explained(0.1, 64):
        assert os.environ[refusals.REPORT] != "/outer"
        del os.environ[refusals.REPORT]
    assert os.environ[refusals.REPORT] == "/outer"


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="^bad weights$"), refusals.refusals_explained(0.1, 64):
        raise RuntimeError("bad weights")


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="the cache's size is set on CPUs")
@pytest.mark.parametrize("name", ["engine.VLLMEngine", "asynchronous.AsyncVLLMEngine"])
def test_both_engines_explain_a_start_with_too_little_memory(name, tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    from grpo_rl.engines.vllm import cpu

    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(cpu, "CACHE_BYTES", 1 << 14)
    module, engine = name.split(".")
    make = getattr(importlib.import_module(f"grpo_rl.engines.vllm.{module}"), engine)
    with pytest.raises(ValueError, match=r"^inference_model\.max_model_len=512 takes .* leaves .* GiB for them; raise"):
        make(save_tiny_model(tmp_path / "model"), max_model_len=512)
    assert not torch.distributed.is_initialized(), "the next engine of this process would find the group"


def test_heads_that_vllm_has_no_kernel_for_are_told_with_the_other_engine():
    for text in ("chunk_gated_delta_rule_cpu: expect head_dim to be multiples of 32.", "Unexpected head dim size, 32"):
        assert "inference_model.engine=transformers" in (refusals.refusal(text, 0.5, 64) or "")
