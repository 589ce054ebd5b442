"""The machine's rates: measured once, kept, and never in the way of a run."""

from __future__ import annotations

import json
import time

import pytest
import torch

from grpo_rl.perf import rates
from grpo_rl.perf.rates import RATES_FILE, Rates, machine_rates, measure_rates


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / RATES_FILE


@pytest.fixture
def measured(monkeypatch):
    """The rates that were measured; the first measurement finds Rates(1, 10), the second Rates(2, 9), …"""
    calls = []

    def measure(dtype, device):
        calls.append((dtype, str(device)))
        return Rates(len(calls), 11 - len(calls))

    monkeypatch.setattr(rates, "measure_rates", measure)
    return calls


def test_a_machine_is_measured_once(cache, measured):
    assert machine_rates(torch.bfloat16) == machine_rates(torch.bfloat16, torch.device("cpu")) == Rates(1, 10)
    assert measured == [(torch.bfloat16, "cpu")]


def test_another_dtype_and_another_number_of_threads_have_rates_of_their_own(cache, measured, monkeypatch):
    assert machine_rates(torch.bfloat16) == Rates(1, 10)
    assert machine_rates(torch.float32) == Rates(2, 9)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert machine_rates(torch.bfloat16) == Rates(3, 8)
    assert len(json.loads(cache.read_text())) == 3 and len(measured) == 3


def test_measuring_again_keeps_the_higher_of_each_rate(cache, measured):
    machine_rates(torch.bfloat16)
    assert machine_rates(torch.bfloat16, again=True) == Rates(2, 10)
    assert machine_rates(torch.bfloat16) == Rates(2, 10)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\xff",
        '{"a machine": {"gemm_flops_per_s": "fast", "bytes_per_s": 1}}',
        '{"a machine": {"gemm_flops_per_s": NaN, "bytes_per_s": 1}}',
    ],
)
def test_a_corrupt_cache_is_measured_and_written_anew(cache, measured, content):
    cache.parent.mkdir()
    cache.write_bytes(content.encode("latin-1"))
    assert machine_rates(torch.bfloat16) == machine_rates(torch.bfloat16) == Rates(1, 10)
    assert len(measured) == 1 and len(json.loads(cache.read_text())) == 1


@pytest.mark.alone
def test_no_loop_of_products_is_faster_than_the_measured_rate():
    before = measure_rates(torch.float32, seconds=0.2)
    factor = torch.rand(512, 512)
    start = time.perf_counter()
    for _ in range(20):
        factor @ factor
    loop_s = time.perf_counter() - start
    best = before.best(measure_rates(torch.float32, seconds=0.2))
    # 1 at most, but for what a neighbour may have slowed down: an operation counted as half of one would still show.
    assert 0.01 < 20 * 2 * 512**3 / best.gemm_flops_per_s / loop_s < 1.9


@pytest.mark.slow
def test_measuring_draws_none_of_the_runs_random_numbers():
    before = torch.random.get_rng_state()
    measure_rates(torch.float32, seconds=0.01)
    assert torch.equal(torch.random.get_rng_state(), before)
