"""The machine's rates: measured once, kept, and never in the way of a run."""

import torch

from grpo_rl.perf import roofline
from grpo_rl.perf.roofline import Rates, machine_rates


def test_a_machine_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path / "cache"))
    measured = []

    def measure(dtype, device):
        measured.append((dtype, str(device)))
        return Rates(len(measured), 11 - len(measured))

    monkeypatch.setattr(roofline, "measure_rates", measure)
    assert machine_rates(torch.bfloat16) == machine_rates(torch.bfloat16, torch.device("cpu")) == Rates(1, 10)
    assert measured == [(torch.bfloat16, "cpu")]
