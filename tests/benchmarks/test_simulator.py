"""The simulator's engines grow responses as a hand computes, and the loop over them holds what it promises."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import virtual_time
from simulator import LogNormal, SimulatedEngine, SimulatorConfig, simulate

from grpo_rl.engines.base import EngineDeadError

SLOW = SimulatorConfig(slots=2, token_s=1.0, token_s_per_response=1.0, push_s=7.0)
LONG_TAIL = SimulatorConfig(engines=8, max_staleness=2, train_tokens_per_s=5e3, steps=40)
"""8 engines and a trainer that takes about as long for a batch as they do; 1 response in 100 is 8 times the median."""


def ends(config, *groups, act=None):
    """The time at which each group of responses is complete."""

    async def main():
        loop = asyncio.get_running_loop()
        engine = SimulatedEngine(0, config)

        async def end(lengths):
            group = await engine.group(lengths)
            return round(loop.time(), 6), group.version

        tasks = [asyncio.create_task(end(lengths)) for lengths in groups]
        if act:
            await act(engine)
        return await asyncio.gather(*tasks)

    return virtual_time.run(main())


def test_responses_grow_alike_and_faster_when_there_are_fewer():
    # Both at 1/3 token/s: the first ends at 30 s; the other has 10 tokens left at 1/2 token/s.
    assert ends(SLOW, [10], [20]) == [(30.0, 0), (50.0, 0)]


def test_what_finds_no_slot_waits_for_one():
    # Two at 1/3 until 30 s, then the third beside the second's last 10 tokens until 60 s, then 10 tokens at 1/2.
    assert ends(SLOW, [10], [20], [20]) == [(30.0, 0), (60.0, 0), (80.0, 0)]


def test_a_group_is_complete_with_its_longest_response():
    assert ends(SLOW, [10, 20]) == [(50.0, 0)]


def test_in_a_push_nothing_grows_and_nothing_is_lost():
    async def push(engine):
        await asyncio.sleep(4.0)
        await engine.update(3)
        assert await engine.group([1]) is not None and engine.version == 3

    # Ten tokens alone take 20 s; the push 7 more, and the second response, of one token, 3 s beside it instead of 2.
    assert ends(SLOW, [10], act=push) == [(28.0, 0)]


def test_a_dead_engine_loses_its_answers_and_takes_no_more():
    async def die(engine):
        await asyncio.sleep(1.0)
        engine.die()
        with pytest.raises(EngineDeadError, match="engine 0 is dead"):
            await engine.update(1)

    with pytest.raises(EngineDeadError, match="engine 0 died"):
        ends(SLOW, [10], act=die)


@pytest.mark.slow
def test_with_a_long_tail_the_trainer_hardly_waits_and_both_phases_overlap():
    both, turns = simulate(LONG_TAIL), simulate(replace(LONG_TAIL, max_staleness=0))
    sample_s, train_s = turns.waiting * turns.seconds, turns.training * turns.seconds
    ideal = (sample_s + train_s) / max(sample_s, train_s)
    gain = both.responses_per_s / turns.responses_per_s
    assert both.waiting <= 0.1 and both.staleness_max <= 2
    assert gain >= 1.7 and gain >= 0.9 * ideal


def test_what_a_hand_computes_for_taking_turns():
    # One group of 4 x 100 tokens a step on one engine: 100 tokens at 0.01 + 4 x 0.01 s, then 400 tokens at 100/s.
    even = SimulatorConfig(
        engines=1, slots=8, token_s=0.01, token_s_per_response=0.01, lengths=LogNormal(100), group_size=4,
        groups_per_step=1, train_tokens_per_s=100.0, push_s=1.0, max_staleness=0, steps=3,
    )  # fmt: skip
    outcome = simulate(even)
    assert outcome.seconds == pytest.approx(3 * (5 + 4 + 1))
    assert outcome.waiting == pytest.approx(0.5) and outcome.training == pytest.approx(0.4)
    assert outcome.idle == pytest.approx(0.5) and outcome.staleness_max == 0


@pytest.mark.parametrize("margin", [0, 1])
def test_an_engine_idles_until_another_has_taken_its_place(margin):
    # As before, a step is 5 s of sampling, 4 s of training and 1 s of a push. The engine dies after 2 s of the second
    # step; 5 s later another is there, takes weights for 1 s, and samples the group anew: 38 s, of which 5 + 2 + 5 + 5
    # are sampling.
    config = SimulatorConfig(
        engines=1, slots=8, token_s=0.01, token_s_per_response=0.01, lengths=LogNormal(100), group_size=4,
        groups_per_step=1, train_tokens_per_s=100.0, push_s=1.0, max_staleness=0, steps=3, launch_s=5.0,
        deaths=[(12.0 + 10 * margin, 0)], margin=margin,
    )  # fmt: skip
    outcome = simulate(config)
    assert outcome.seconds == pytest.approx(38) and outcome.restarts == 1
    assert outcome.idle == pytest.approx(21 / 38)


@settings(deadline=None, max_examples=25)
@given(
    engines=st.integers(1, 4),
    bound=st.integers(0, 3),
    tail=st.floats(1, 20),
    deaths=st.lists(st.tuples(st.floats(0, 300), st.integers(0, 3)), max_size=5),
    seed=st.integers(0, 100),
)
def test_whatever_dies_every_group_is_trained_on_once_and_none_is_too_old(engines, bound, tail, deaths, seed):
    config = SimulatorConfig(
        engines=engines, slots=8, lengths=LogNormal(100, tail), group_size=2, groups_per_step=4, steps=6,
        train_tokens_per_s=500.0, max_staleness=bound, launch_s=5.0, max_restarts=9, seed=seed,
        deaths=[(at, number % engines) for at, number in deaths],
    )  # fmt: skip
    outcome = simulate(config)
    assert outcome.trained == outcome.started == 24 and outcome.left == 0 and not outcome.dropped
    assert outcome.staleness_max <= bound and 0 <= outcome.idle <= 1


def test_an_engine_that_dies_too_often_ends_the_run_by_name():
    config = replace(LONG_TAIL, engines=1, deaths=[(10.0 + 70 * i, 0) for i in range(9)], max_restarts=2)
    with pytest.raises(EngineDeadError, match="slot 0 has lost 3"):
        simulate(config)


@pytest.mark.parametrize("settings", [{"median": 0}, {"median": 9, "p99_over_median": 0.5}, {"median": 9, "limit": 0}])
def test_lengths_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match="must be 1 or more"):
        LogNormal(**settings)
