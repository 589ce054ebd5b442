"""The machine's rates: measured once, kept, and never in the way of a run."""

from __future__ import annotations

import pytest
import torch

from grpo_rl.perf import rates
from grpo_rl.perf.rates import RATES_FILE, Rates, machine_rates


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
