"""Surrogates: tables worked out by hand, and what must hold for every ratio and advantage."""

import math

import pytest
import torch

from grpo_rl.losses.factors import SURROGATE, call
from grpo_rl.losses.surrogate import (
    cispo_surrogate,
    clipped_surrogate,
    clipped_tokens,
    leveled_log_ratio,
    sapo_surrogate,
)
from grpo_rl.losses.surrogate_dppo import dppo_tv_surrogate


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "gradient"),
    [
        # -min(rA, clip(r, 0.8, 1.28) A) and its derivative by log r, which is -rA where the token is not clipped
        (1.0, 2.0, None, -2.0, -2.0),
        (1.0, -2.0, None, 2.0, 2.0),
        (1.25, 1.0, None, -1.25, -1.25),  # inside the wider upper clip
        (1.5, 1.0, None, -1.28, 0.0),  # paid as 1.28
        (1.5, -1.0, None, 1.5, 1.5),  # charged in full
        (0.5, 1.0, None, -0.5, -0.5),  # a good response that got rarer is still pulled up
        (0.5, -1.0, None, 0.8, 0.0),  # a bad response that got rarer has been pushed down enough
        (3.0, 0.0, None, 0.0, 0.0),
        # A ratio that overflows has a zero gradient unless the response is bad.
        (math.inf, 1.0, None, -1.28, 0.0),
        (math.inf, 0.0, None, 0.0, 0.0),
        (math.inf, -1.0, None, math.inf, math.inf),
        # With a dual clip the same up to a ratio of 3, beyond it the price of 3; good responses are not touched.
        (2.0, -2.0, 3.0, 4.0, 4.0),
        (2.9, -1.0, 3.0, 2.9, 2.9),
        (4.0, -2.0, 3.0, 6.0, 0.0),
        (math.inf, -2.0, 3.0, 6.0, 0.0),
        (math.inf, 1.0, 3.0, -1.28, 0.0),
        (0.0, -1.0, 3.0, 0.8, 0.0),
        (0.5, -1.0, 3.0, 0.8, 0.0),
        (4.0, 1.0, 3.0, -1.28, 0.0),
    ],
)
def test_loss_and_gradient_match_the_table_worked_out_by_hand(ratio, advantage, dual_clip, loss, gradient):
    clips = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual_clip}
    log_ratio = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    got = clipped_surrogate(log_ratio, torch.tensor([advantage]).double(), **clips)
    got.sum().backward()
    assert got.item() == pytest.approx(loss, abs=1e-12)
    assert log_ratio.grad.item() == pytest.approx(gradient, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.0, 2.0, 1.0), (7.0, 1.0, 5.0), (7.0, -1.0, 5.0), (0.1, 1.0, 0.5), (0.1, -3.0, 0.5), (math.inf, -1.0, 5.0)],
)
def test_cispo_bounds_a_tokens_weight_and_never_takes_its_gradient(ratio, advantage, weight):
    # -weight * A * log pi, and nothing through the weight.
    log_prob = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    log_ratio = log_prob + math.log(ratio) + 2.0
    loss = cispo_surrogate(log_ratio, torch.tensor([advantage]).double(), log_prob, clip_low=0.5, clip_high=4.0)
    loss.sum().backward()
    assert loss.item() == pytest.approx(2.0 * weight * advantage)
    assert log_prob.grad.item() == pytest.approx(-weight * advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # tau = 2 for good responses, 4 for others. Loss -(4/tau) sigmoid(tau (r - 1)) A; by log r: -4 s (1 - s) r A.
        (1.0, 1.0, -1.0, -1.0),  # s = 1/2: the plain policy gradient
        (1.0, -1.0, 0.5, 1.0),
        (1 + math.log(3) / 2, 1.0, -1.5, -4 * 3 / 16 * (1 + math.log(3) / 2)),  # s = 3/4
        (1 + math.log(3) / 4, -2.0, 1.5, 2 * 4 * 3 / 16 * (1 + math.log(3) / 4)),
        (1 - math.log(3) / 2, 1.0, -0.5, -4 * 3 / 16 * (1 - math.log(3) / 2)),  # s = 1/4
        (1e30, 1.0, -2.0, 0.0),
        (1e30, -1.0, 1.0, 0.0),
    ],
)
def test_the_soft_gate_matches_the_table_worked_out_by_hand(ratio, advantage, loss, gradient):
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    got = sapo_surrogate(log_ratio, torch.tensor([advantage]).double(), tau_pos=2.0, tau_neg=4.0)
    got.sum().backward()
    assert got.item() == pytest.approx(loss, abs=1e-12)
    assert log_ratio.grad.item() == pytest.approx(gradient, abs=1e-12)


@pytest.mark.parametrize("surrogate", [name for name in SURROGATE.functions if name != "none"])
def test_a_response_without_advantage_has_no_loss_even_where_its_ratio_overflows(surrogate):
    log_ratio, log_prob = torch.tensor([[1000.0, math.inf, -1000.0], [-1.0] * 3]).requires_grad_().unbind()
    tokens = {"trained": torch.ones(3), "response": torch.arange(3)}
    tokens |= {"covariance_rank": torch.ones(3), "covariance_draw": torch.ones(3)}
    function = SURROGATE.function(surrogate)
    loss = call(function, log_ratio=log_ratio, advantage=torch.zeros(3), log_prob=log_prob, **tokens)
    assert loss.eq(0).all()
    for gradient in torch.autograd.grad(loss.sum(), (log_ratio, log_prob), allow_unused=True):
        assert gradient is None or gradient.eq(0).all()


def test_dppos_squared_term_holds_every_token_and_its_cap_bounds_the_weight():
    log_prob = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    log_ratio, advantage = log_prob + 1 + math.log(4), torch.tensor([0.0, -1.0]).double()
    loss = dppo_tv_surrogate(log_ratio, advantage, log_prob, ratio_cap=2.0, squared_coef=0.5)
    loss.sum().backward()
    # By hand: ln 4 squared / 2, and where A is -1 also 2 log pi, of weight min(4, 2).
    square = math.log(4) ** 2 / 2
    assert loss.tolist() == pytest.approx([square, square - 2])
    assert log_prob.grad.tolist() == pytest.approx([math.log(4), math.log(4) + 2])


TRAINED = torch.tensor([True, True, False, True, True])
RESPONSE = torch.tensor([0, 0, 0, 2, 2])  # response 1 is empty
LOGS = [1.0, 3.0, 0.0, -2.0, 0.0]  # of the untrained token 0, as the loss puts it


def test_gspo_gives_every_token_of_a_response_an_equal_share_of_the_gradient_and_gspo_token_its_own():
    # f = 1 r0 + 10 r1 + 100 r2 + 1000 r3 + 10000 r4, with r the ratio at each token; e^2 = a and e^-1 = b.
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0], dtype=torch.float64)
    a, b = math.exp(2.0), math.exp(-1.0)  # means over the trained tokens
    # Two trained tokens share 111 a, and the untrained one is given its share too: the loss puts its weight to 0.
    expected = {
        "sequence": [111 * a / 2, 111 * a / 2, 111 * a / 2, 5500 * b, 5500 * b],
        "sequence_token": [a, 10 * a, 100 * a, 1000 * b, 10000 * b],
    }
    for level, gradient in expected.items():
        log_ratio = torch.tensor(LOGS, dtype=torch.float64, requires_grad=True)
        ratio = leveled_log_ratio(log_ratio, level, TRAINED, RESPONSE).exp()
        (weights * ratio).sum().backward()
        assert ratio.tolist() == pytest.approx([a, a, a, b, b])
        assert log_ratio.grad.tolist() == pytest.approx(gradient)


def test_clipped_tokens_are_those_whose_gradient_or_weight_a_clip_has_changed():
    log_ratio = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5, 4.0]).log()
    advantage = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    both = {"log_ratio": log_ratio, "advantage": advantage, "clip_low": 0.2, "clip_high": 0.2}
    flags = clipped_tokens("clipped", **both, dual_clip=3.0)
    assert {name: flag.int().tolist() for name, flag in flags.items()} == {
        "clip_low": [0, 1, 0, 0, 0, 0], "clip_high": [0, 0, 0, 1, 0, 0], "clip_dual": [0, 0, 0, 0, 0, 1]
    }  # fmt: skip
    flags = clipped_tokens("cispo", **both)
    assert flags["clip_low"].int().tolist() == [1, 1, 0, 0, 0, 0]
    assert flags["clip_high"].int().tolist() == [0, 0, 0, 1, 1, 1]
    assert not any(flag.any() for kind in ("sapo", "plain") for flag in clipped_tokens(kind, **both).values())
