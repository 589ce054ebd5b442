"""Clipped surrogate: a table worked out by hand, and what must hold for every ratio and advantage."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.losses.surrogate import clipped_surrogate

LOG_RATIOS = st.floats(-5, 5)
ADVANTAGES = st.floats(-5, 5)
CLIPS = st.floats(0, 0.9)


def loss_and_gradient(log_ratio, advantage, **clips):
    log_ratio = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    loss = clipped_surrogate(log_ratio, torch.tensor(advantage, dtype=torch.float64), **clips)
    loss.sum().backward()
    return loss.detach(), log_ratio.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # -min(rA, clip(r, 0.8, 1.28) A) and its derivative by log r, which is -rA where the token is not clipped
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.25, 1.0, -1.25, -1.25),  # inside the wider upper clip
        (1.5, 1.0, -1.28, 0.0),  # paid as 1.28
        (1.5, -1.0, 1.5, 1.5),  # charged in full
        (0.5, 1.0, -0.5, -0.5),  # a good answer that got rarer is still pulled up
        (0.5, -1.0, 0.8, 0.0),  # a bad answer that got rarer has been pushed down enough
        (3.0, 0.0, 0.0, 0.0),
    ],
)
def test_loss_and_gradient_match_the_table_worked_out_by_hand(ratio, advantage, loss, gradient):
    got_loss, got_gradient = loss_and_gradient([math.log(ratio)], [advantage], clip_low=0.2, clip_high=0.28)
    assert got_loss.item() == pytest.approx(loss, abs=1e-12)
    assert got_gradient.item() == pytest.approx(gradient, abs=1e-12)


@given(LOG_RATIOS, ADVANTAGES, CLIPS, CLIPS)
def test_clipping_never_promises_more_than_the_plain_surrogate(log_ratio, advantage, low, high):
    loss, _ = loss_and_gradient([log_ratio], [advantage], clip_low=low, clip_high=high)
    assert loss.item() >= -math.exp(log_ratio) * advantage - 1e-9


@given(ADVANTAGES, CLIPS, CLIPS)
def test_a_ratio_of_one_gives_the_policy_gradient(advantage, low, high):
    loss, gradient = loss_and_gradient([0.0], [advantage], clip_low=low, clip_high=high)
    assert loss.item() == -advantage
    # With a clip of 0 a ratio of 1 lies on the border, where the derivative is anything between 0 and -A.
    if low > 0 and high > 0:
        assert gradient.item() == pytest.approx(-advantage)


@given(LOG_RATIOS, ADVANTAGES)
def test_the_gradient_is_zero_or_that_of_the_plain_surrogate(log_ratio, advantage):
    _, gradient = loss_and_gradient([log_ratio], [advantage])
    plain = -math.exp(log_ratio) * advantage
    clipped = (advantage > 0 and log_ratio > math.log(1.2)) or (advantage < 0 and log_ratio < math.log(0.8))
    assert gradient.item() == pytest.approx(0.0 if clipped else plain, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_ratio_that_overflows_on_an_answer_that_is_not_bad_has_a_zero_gradient(advantage):
    log_ratio = torch.tensor([1000.0], requires_grad=True)
    loss = clipped_surrogate(log_ratio, torch.tensor([advantage]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(-1.2 * advantage)
    assert log_ratio.grad.item() == 0.0


def test_a_ratio_that_overflows_on_a_bad_answer_is_seen_as_infinite():
    assert clipped_surrogate(torch.tensor([1000.0]), torch.tensor([-1.0])).item() == math.inf


@pytest.mark.parametrize("clips", [{"clip_low": -0.1}, {"clip_low": 1.5}, {"clip_high": -0.1}])
def test_impossible_clips_are_refused(clips):
    with pytest.raises(ValueError, match="need clip_low in .0, 1., clip_high >= 0"):
        clipped_surrogate(torch.zeros(1), torch.ones(1), **clips)
