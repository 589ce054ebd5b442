"""Proof of delivery with engines that fail in the ways that engines fail."""

from __future__ import annotations

import pytest
import torch

from grpo_rl.engines.scripted import ScriptedEngine
from grpo_rl.weights.push import WeightDeliveryError, WeightSync


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).bfloat16()


def test_versions_rise_by_one_with_every_push(model):
    engine = ScriptedEngine(lambda prompt, g: [])
    sync = WeightSync(model, engine, version=4)
    assert [sync.push(), sync.push()] == [5, 6] and engine.version == 6


def test_an_engine_that_keeps_the_old_weights_is_found_out(model):
    class Deaf(ScriptedEngine):
        def update_weights(self, weights, version):
            if not self.weights:
                super().update_weights(weights, version)
            self.version = version

    sync = WeightSync(model, Deaf(lambda prompt, g: []))
    sync.push()
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(WeightDeliveryError, match=r"1 of 4 tensors .*0\.weight"):
        sync.push()


def test_an_engine_with_one_flipped_bit_is_found_out(model):
    class Flipper(ScriptedEngine):
        def update_weights(self, weights, version):
            super().update_weights(weights, version)
            self.weights["1.bias"].view(torch.int16)[1] ^= 1

    with pytest.raises(WeightDeliveryError, match=r"1\.bias"):
        WeightSync(model, Flipper(lambda prompt, g: [])).push()


def test_an_engine_that_forgets_the_version_is_found_out(model):
    class Forgetful(ScriptedEngine):
        def update_weights(self, weights, version):
            super().update_weights(weights, version - 1)

    with pytest.raises(WeightDeliveryError, match="engine says version 0"):
        WeightSync(model, Forgetful(lambda prompt, g: [])).push()


def test_fp32_weights_are_compared_as_the_engine_rounds_them():
    model = torch.nn.Linear(4, 3)  # fp32, the engine holds bf16
    WeightSync(model, ScriptedEngine(lambda prompt, g: [])).push()
