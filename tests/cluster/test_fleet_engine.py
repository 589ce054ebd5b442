"""A fleet as one engine: engines die in the middle of a push or of a response, and the thread that trains goes on."""

import asyncio
import time

import pytest
import torch
from loop_control import Reads

from grpo_rl.cluster.fleet import Fleet, FleetEngine
from grpo_rl.engines.base import EngineDeadError, Samples, Sampling
from grpo_rl.engines.loop_thread import LoopThread
from grpo_rl.weights.push import WeightDeliveryError, WeightSync
from grpo_rl.weights.shared_memory import SharedMemoryTransport


class Engine(Reads):
    """Answers with its number; dies at the call whose name it was given."""

    def __init__(self, number, dies_at=None):
        super().__init__(f"engine {number}")
        self.number, self.dies_at, self.alive = number, dies_at, True

    def begin(self, method):
        super().begin(method)
        if method == self.dies_at:
            self.alive = False
        if not self.alive:
            raise EngineDeadError(f"{self.name} died")

    async def generate(self, request_id, prompt, n, sampling):
        self.begin("generate")
        await asyncio.sleep(0.01)
        return Samples.from_lists([[self.number]] * n, [[0.0]] * n, [False] * n, self.version)

    async def close(self): ...


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 3)).bfloat16()


@pytest.fixture
def made(model):
    """Makes a fleet of engines, of which the first ones die where they are told to."""
    opened = []

    def make(*dies_at, size=None, max_restarts=3):
        launched = []

        async def launch(number):
            dies = dies_at[len(launched)] if len(launched) < len(dies_at) else None
            launched.append(Engine(number, dies))
            return launched[-1]

        loop = LoopThread()
        fleet = Fleet(launch, size or len(dies_at), max_restarts)
        loop.run(fleet.start())
        engine = FleetEngine(fleet, loop, SharedMemoryTransport)
        weights = WeightSync(model, engine)
        opened.append(engine)
        return engine, weights, launched

    yield make
    for engine in opened:
        engine.close()


def holds(engine, model):
    return all(torch.equal(engine.weights[name], parameter) for name, parameter in model.named_parameters())


def test_all_engines_hold_what_was_pushed_and_answer_in_the_order_of_prompts(made, model):
    engine, weights, launched = made(None, None)
    assert weights.push() == 1 and engine.version == 1
    assert all(holds(one, model) and one.version == 1 for one in launched)
    responses = engine.generate([[1], [2], [3], [4]], 2, Sampling())
    # The least loaded first: two groups to each.
    assert [int(a.response_ids[0]) for a in responses] == [0, 1, 0, 1]


PUSH = ["pause", "start_weight_update", "update_weights", "finish_weight_update"]


@pytest.mark.parametrize("method", [*PUSH, "fingerprints", "weight_version", "resume"])
def test_an_engine_that_dies_in_a_push_is_replaced_and_the_others_get_it_all_the_same(made, model, method):
    engine, weights, launched = made(None, method)
    assert weights.push() == 1
    assert holds(launched[0], model) and launched[0].version == 1 and launched[0].calls[-1] == "resume"
    # The next responses are waited for, and meanwhile the new engine is given the same weights under the same version.
    engine.loop.run(engine.fleet.new_engine())
    assert len(launched) == 3 and not launched[2].weights
    numbers = {int(a.response_ids[0]) for _ in range(20) for a in engine.generate([[1], [2], [3]], 1, Sampling())}
    assert numbers == {0, 1} and holds(launched[2], model) and launched[2].version == 1
    assert launched[0].calls.count("update_weights") == 1, "who has the weights is not sent them again"
    assert engine.fleet.restarts == 1


@pytest.mark.parametrize("engines", [("generate", None), ("generate",)])
def test_responses_that_die_with_an_engine_are_asked_for_again(made, model, engines):
    engine, weights, launched = made(*engines)
    weights.push()
    responses = engine.generate([[1], [2], [3]], 1, Sampling())
    assert len(responses) == 3 and {int(a.version) for a in responses} == {1} and engine.fleet.restarts == 1
    assert len(engines) > 1 or holds(launched[1], model)  # the only one was waited for


def test_prompts_are_taken_while_others_are_sampled_and_dropped_ones_are_forgotten(made):
    engine, weights, _ = made("generate", None)
    weights.push()

    engine.submit(5, [1], Sampling())
    found = [request for request, _ in engine.step()]
    engine.submit(6, [2], Sampling())
    while engine._submitted:
        found += [request for request, _ in engine.step()]
    assert sorted(found) == [5, 6] and engine.step() == [] and engine.fleet.restarts == 1
    with pytest.raises(ValueError, match="prompt 0 has 64 tokens"):
        engine.submit(7, [1] * 64, Sampling())
    engine.submit(8, [1], Sampling())
    engine.abort()
    assert engine.step() == []
    until = time.monotonic() + 10
    while (loads := [slot.load for slot in engine.fleet._slots]) != [0, 0] and time.monotonic() < until:
        time.sleep(0.005)
    assert loads == [0, 0], "an aborted response no longer counts as load"


def test_engines_that_die_too_often_end_the_run_by_name(made):
    engine, weights, _ = made("generate", "generate", size=1, max_restarts=1)
    weights.push()
    with pytest.raises(EngineDeadError, match=r"engine 0 died; slot 0 has lost 2 \(inference_model.max_restarts=1"):
        engine.generate([[1]], 1, Sampling())
    engine, weights, _ = made("update_weights", size=1, max_restarts=0)
    with pytest.raises(EngineDeadError, match=r"engine 0 died \(bucket 0 of version 1, .*\); slot 0 has lost 1 \("):
        weights.push()


def test_what_is_wrong_with_the_weights_of_one_engine_still_stops_the_run(made, model):
    _, weights, launched = made(None, None)
    launched[1].finish_weight_update = lambda version: None
    with pytest.raises(WeightDeliveryError, match="engine 1 holds version 0"):
        weights.push()
