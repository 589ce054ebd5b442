"""The simulator's engines grow responses as a hand computes, and the loop over them holds what it promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import LogNormal, SimulatorConfig, simulate

LONG_TAIL = SimulatorConfig(engines=8, max_staleness=2, train_tokens_per_s=5e3, steps=40)
"""8 engines and a trainer that takes about as long for a batch as they do; 1 response in 100 is 8 times the median."""


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
