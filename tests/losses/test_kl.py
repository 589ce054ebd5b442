"""The k3 estimator against the true divergence, and at the edges of floating point."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.losses.kl import k3

LOG_PROBS = st.floats(-20, 0)
LOGITS = st.floats(-3, 3)


def test_the_expected_estimate_is_the_divergence():
    # Two tokens: pi = (1/2, 1/2), ref = (1/4, 3/4). KL = ln(2)/2 + ln(2/3)/2 = ln(4/3)/2.
    pi, ref = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    assert (pi * k3(pi.log(), ref.log())).sum().item() == pytest.approx(math.log(4 / 3) / 2, rel=1e-6)


@given(st.lists(st.tuples(LOGITS, LOGITS), min_size=1, max_size=6))
def test_the_expected_estimate_is_the_divergence_of_any_two_distributions(logits):
    pi, ref = torch.tensor(logits, dtype=torch.float64).log_softmax(0).unbind(1)
    expected = (pi.exp() * (pi - ref)).sum()
    torch.testing.assert_close((pi.exp() * k3(pi, ref)).sum(), expected, rtol=1e-9, atol=1e-12)


@given(LOG_PROBS, LOG_PROBS)
def test_it_is_never_negative_and_pulls_towards_the_reference(log_prob, ref_log_prob):
    log_prob = torch.tensor([log_prob], dtype=torch.float64, requires_grad=True)
    ref_log_prob = torch.tensor([ref_log_prob], dtype=torch.float64)
    estimate = k3(log_prob, ref_log_prob)
    estimate.sum().backward()
    assert estimate.item() >= 0
    # d/dlog_prob (e^d - d - 1) = 1 - e^d
    torch.testing.assert_close(log_prob.grad, 1 - (ref_log_prob - log_prob.detach()).exp())


def test_equal_policies_are_at_a_divergence_of_exactly_zero():
    log_prob = torch.rand(8).log().requires_grad_()
    estimate = k3(log_prob, log_prob.detach())
    estimate.sum().backward()
    assert estimate.eq(0).all()
    assert log_prob.grad.eq(0).all()


def test_a_small_difference_keeps_its_digits_in_fp32():
    # d = 2^-10: d^2/2 + d^3/6 = 4.7683716e-07 + 1.55e-10; exp(d) - d - 1 would be a multiple of 2^-23 = 1.2e-7.
    d = 2.0**-10
    estimate = k3(torch.tensor([-d]), torch.tensor([0.0])).item()
    assert estimate == pytest.approx(d**2 / 2 + d**3 / 6, rel=1e-3)


def test_a_token_far_below_the_reference_keeps_its_gradient():
    # d = 5: the estimate is 142, which verl would clamp to 10, with no gradient left.
    log_prob = torch.tensor([-5.0], requires_grad=True)
    k3(log_prob, torch.tensor([0.0])).sum().backward()
    assert log_prob.grad.item() == pytest.approx(1 - math.exp(5), rel=1e-5)


def test_an_overflow_shows():
    assert k3(torch.tensor([-100.0]), torch.tensor([0.0])).item() == math.inf
