"""Proof of delivery with engines that fail in the ways that engines fail."""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch

from grpo_rl.testing import ScriptedEngine
from grpo_rl.weights.push import InProcess, NullTransport, WeightDeliveryError, WeightSync


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).bfloat16()


def test_listeners_hear_of_a_version_once_it_is_proven_and_a_checkpoint_is_gone_back_to(model):
    class Stops(ScriptedEngine):
        def update_weights(self, weights, version):
            if version == 7:
                raise OSError("no room")
            super().update_weights(weights, version)

    heard = []
    sync = WeightSync(model, Stops(lambda prompt, g: []), version=4)
    sync.subscribe(heard.append)
    assert [sync.push(), sync.push()] == heard == [5, 6]
    with pytest.raises(OSError, match="no room"):
        sync.push()
    assert heard == [5, 6]
    sync.restore(6)
    assert sync.push() == 6 == sync.version and heard == [5, 6, 6]


def test_a_rank_that_waits_for_rank_zero_takes_part_in_deliveries_to_engines_that_join(model):
    class Ranks:
        def __init__(self, rank):
            self.rank = rank

        def broadcast(self, first):
            if self.rank == 0:
                said.put(first)
                return first
            return said.get(timeout=10)

    class Gathers(NullTransport):
        def send(self, weights, version):
            gathered.append((version, [name for name, _ in weights]))
            return {}

    def other_rank():
        sync = WeightSync(model, Gathers(torch.bfloat16, takes_adapters=False), ranks=Ranks(1))
        sync.push()
        return sync.on_rank_zero(lambda: pytest.fail("this is rank zero's work"))

    said, gathered = SimpleQueue(), []
    transport = InProcess(engine := ScriptedEngine(lambda prompt, g: []))
    sync = WeightSync(model, transport, ranks=Ranks(0))

    def work():
        engine.weights.clear()
        transport.on_new_engine()
        return "groups"

    with ThreadPoolExecutor() as threads:
        other = threads.submit(other_rank)
        sync.push()
        assert sync.on_rank_zero(work) == other.result(10) == "groups"
    names = [name for name, _ in model.named_parameters()]
    assert gathered == [(1, names), (1, names)] and list(engine.weights) == names and sync.version == 1


@pytest.mark.parametrize(("late", "message"), [(0, r"1\.bias"), (1, "engine holds version 0")])
def test_an_engine_with_one_flipped_bit_or_another_version_is_found_out(model, late, message):
    class Wrong(ScriptedEngine):
        def update_weights(self, weights, version):
            super().update_weights(weights, version - late)
            self.weights["1.bias"].view(torch.int16)[1] ^= 1 - late

    with pytest.raises(WeightDeliveryError, match=message):
        WeightSync(model, Wrong(lambda prompt, g: [])).push()


def test_fp32_weights_are_compared_as_the_engine_rounds_them():
    model = torch.nn.Linear(4, 3)  # fp32, the engine holds bf16
    WeightSync(model, ScriptedEngine(lambda prompt, g: [])).push()
