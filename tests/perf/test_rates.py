"""The machine's rates: measured once, kept, and never in the way of a run."""

from __future__ import annotations

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
