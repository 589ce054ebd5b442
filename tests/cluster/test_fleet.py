"""Several engines as one: routed by load, replaced when they die, and holding the same weights."""

import asyncio
import functools

import pytest
from simulation import virtual_time

from grpo_rl.cluster.fleet import Fleet
from grpo_rl.engines.base import EngineDeadError
from grpo_rl.engines.loop_thread import EngineLostError, EngineStartError


class Engine:
    def __init__(self, number, launch):
        self.number, self.launch, self.weights, self.alive, self.closed = number, launch, None, True, False

    async def answer(self, seconds=1.0):
        await asyncio.sleep(seconds)
        if not self.alive:
            raise EngineDeadError(f"engine {self.number} died")
        return self.number, self.launch, self.weights

    async def take(self, weights):
        await asyncio.sleep(0.5)
        self.weights = weights
        return self.number

    async def close(self):
        self.closed = True


async def push(fleet, weights, only_new=False):
    """Gives each engine the weights; numbers of those that took them."""
    engines = [engine for engine in await fleet.present() if not only_new or engine.weights is None]
    numbers = await asyncio.gather(*(engine.take(weights) for engine in engines))
    await fleet.admit(engines)
    return numbers


def harbour(launch_s=0.0, fails=None):
    """A launcher, and all that it has launched; ``fails`` are errors of its launches, by their number from 0."""
    engines, count = [], 0

    async def launch(number):
        nonlocal count
        this, count = count, count + 1
        await asyncio.sleep(launch_s)
        if error := (fails or {}).get(this):
            raise error
        engines.append(Engine(number, this))
        return engines[-1]

    return launch, engines


def simulated(test):
    """Runs a coroutine as a test, in virtual time."""

    @functools.wraps(test)
    def run(*arguments, **named):
        virtual_time.run(test(*arguments, **named))

    return run


async def dies(fleet):
    """Starts a fleet of one engine, which dies of its first call."""
    await fleet.start()
    (engine,) = await fleet.present()
    await fleet.admit([engine])
    engine.alive = False
    with pytest.raises(EngineLostError):
        await fleet.call(lambda e: e.answer())


@simulated
async def test_a_call_goes_to_the_engine_with_the_least_to_do():
    fleet = Fleet(harbour()[0], size=3)
    await fleet.start()
    await push(fleet, "v0")
    calls = [asyncio.create_task(fleet.call(lambda e: e.answer(), answers)) for answers in (8, 2, 4, 1, 1)]
    # 8, 2 and 4 answers to each; one more to the second (3), and again to it (4, as many as the third, but first).
    assert [number for number, _, _ in await asyncio.gather(*calls)] == [0, 1, 2, 1, 1]


@simulated
async def test_a_dead_engine_is_replaced_once_and_answers_when_it_has_weights():
    launch, engines = harbour(launch_s=3.0)
    fleet = Fleet(launch, size=2)
    await fleet.start()
    assert sorted(await push(fleet, "v1")) == [0, 1]
    engines[0].alive = False
    calls = [asyncio.create_task(fleet.call(lambda e: e.answer(), 1)) for _ in range(4)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    lost = [r for r in results if isinstance(r, EngineLostError)]
    assert len(lost) == 2 and fleet.restarts == 1
    assert (await fleet.call(lambda e: e.answer(), 1))[0] == 1  # the other goes on
    assert await push(fleet, "v2") == [1]  # it is being launched still
    await fleet.new_engine()
    assert (await fleet.call(lambda e: e.answer(), 1))[0] == 1
    assert await push(fleet, "v2", only_new=True) == [0]
    assert [(e.number, e.launch, e.weights) for e in engines] == [(0, 0, "v1"), (1, 1, "v2"), (0, 2, "v2")]
    assert engines[0].closed
    busy = asyncio.create_task(fleet.call(lambda e: e.answer(), 1))
    assert (await fleet.call(lambda e: e.answer(), 1))[1] in (1, 2)
    await busy
    await fleet.close()
    assert all(e.closed for e in engines)


@simulated
async def test_an_engine_that_cannot_be_launched_again_ends_the_waiting():
    fleet = Fleet(harbour(fails={1: OSError("no memory")})[0], size=1)
    await dies(fleet)
    with pytest.raises(EngineDeadError, match="engine 0 can't be started again: no memory"):
        await fleet.call(lambda e: e.answer())


@simulated
async def test_an_engine_that_can_t_even_be_closed_is_replaced_all_the_same(monkeypatch):
    async def broken(_):
        raise OSError("its pipe is gone")

    monkeypatch.setattr(Engine, "close", broken)
    launch, engines = harbour()
    fleet = Fleet(launch, size=1)
    await dies(fleet)
    await fleet.new_engine()
    assert len(engines) == 2


@pytest.mark.parametrize(("max_restarts", "took_s"), [(3, 2 + 4), (2, 2)])  # a pause before each further try
@simulated
async def test_an_engine_that_dies_while_it_starts_is_replaced_as_often_as_any(max_restarts, took_s):
    error = EngineStartError("engine 0 did not start: head.\n\n  more\nthe node ran out of memory.\n")
    launch, engines = harbour(fails={1: error, 2: error})
    fleet = Fleet(launch, size=1, max_restarts=max_restarts)
    await dies(fleet)
    began = asyncio.get_running_loop().time()
    if max_restarts == 3:
        await fleet.new_engine()
    else:
        with pytest.raises(EngineDeadError, match="engine 0 can't be started again: engine 0 did not start"):
            await fleet.new_engine()
    events = [text for text in fleet.events if "did not start" in text]
    assert all(text.endswith("did not start: head: the node ran out of memory. It is replaced") for text in events)
    assert [e.launch for e in engines] == [0, 3][: max_restarts - 1] and fleet.restarts == max_restarts
    assert asyncio.get_running_loop().time() - began == took_s


@simulated
async def test_an_engine_that_dies_while_it_is_first_started_is_replaced_too():
    error = EngineStartError("engine 0 did not start: its process was killed")
    fleet = Fleet(harbour(fails={0: error, 1: error})[0], size=1, max_restarts=2)
    await fleet.start()
    assert (fleet.restarts, len(fleet.events)) == (2, 2)
    with pytest.raises(EngineStartError, match="its process was killed"):
        await Fleet(harbour(fails={0: error, 1: error})[0], size=1, max_restarts=1).start()


@simulated
async def test_the_others_may_still_be_on_their_way_when_one_can_t_be_started_again():
    launches = 0

    async def launch(number):
        nonlocal launches
        launches += 1
        if launches == 3:
            raise OSError("no room")
        await asyncio.sleep(5.0 if launches == 4 else 0.0)
        return Engine(number, launches)

    fleet = Fleet(launch, size=2)
    await fleet.start()
    await fleet.admit(await fleet.present())
    for engine in await fleet.present():
        engine.alive = False
    lost = await asyncio.gather(*(fleet.call(lambda e: e.answer()) for _ in range(2)), return_exceptions=True)
    assert all(isinstance(error, EngineLostError) for error in lost)
    await fleet.new_engine()
    assert asyncio.get_running_loop().time() == 6.0, "the second engine, five seconds after both had died at 1"
    assert any("can't be started again: no room. The others go on without it" in one for one in fleet.events)
