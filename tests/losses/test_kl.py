"""The estimators against the true divergence, values and gradients, and k3 at the edges of floating point."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.losses.kl import k3, kl_estimate

LOGITS = st.floats(-3, 3)


VOCABULARIES = st.lists(st.tuples(LOGITS, LOGITS, LOGITS), min_size=2, max_size=6)


def means(kind, logits, ref, sampler=None):
    """Expected value and expected gradient by the logits over tokens from the sampler, by default pi_theta itself.

    Every token of the vocabulary is drawn, and counts as often as it would be: there is no sampling noise.
    """
    theta = logits.clone().requires_grad_()
    log_pi = theta.log_softmax(0)
    log_sampler = log_pi.detach() if sampler is None else sampler
    estimate = kl_estimate(kind, log_pi, ref, log_pi - log_sampler)
    mean = (log_sampler.exp() * estimate).sum()
    (gradient,) = torch.autograd.grad(mean, theta)
    return mean.detach(), gradient


def divergence(logits, ref, reverse=False):
    """KL(pi_theta || ref) as a sum over the vocabulary, or KL(ref || pi_theta), and its gradient by the logits."""
    theta = logits.clone().requires_grad_()
    log_pi = theta.log_softmax(0)
    kl = (ref.exp() * (ref - log_pi)).sum() if reverse else (log_pi.exp() * (log_pi - ref)).sum()
    (gradient,) = torch.autograd.grad(kl, theta)
    return kl.detach(), gradient


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@given(VOCABULARIES)
def test_values_and_gradients_have_the_means_of_the_table(logits):
    pi, ref, sampler = torch.tensor(logits, dtype=torch.float64).unbind(1)
    ref, sampler = ref.log_softmax(0), sampler.log_softmax(0)
    kl, gradient = divergence(pi, ref)
    of_reverse = divergence(pi, ref, reverse=True)[1]
    zero = torch.zeros_like(gradient)
    for kind, value, slope in (
        ("k1", kl, zero), ("k2", None, gradient), ("k3", kl, of_reverse), ("k3+", kl, gradient), ("k3_is", kl, gradient)
    ):  # fmt: skip
        mean, mean_gradient = means(kind, pi, ref)
        close(mean_gradient, slope)
        if value is not None:
            close(mean, value)
    # Tokens of another policy than pi_theta.
    close(means("k3_is", pi, ref, sampler), (kl, gradient))


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
