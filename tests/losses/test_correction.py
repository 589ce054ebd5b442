"""Weights of sampler against trainer: tables worked out by hand, and the edges of floating point."""

import math

import pytest
import torch

from grpo_rl.losses.correction import correction_weight
from grpo_rl.losses.factors import CORRECTION

RATIOS = [0.25, 0.5, 1.0, 2.0, 4.0]
RESPONSE = torch.tensor([0, 0, 2, 2, 3])  # products 1/8, 2 and 4; response 1 is empty


@pytest.mark.parametrize(
    ("how", "level", "weights", "bounded"),
    [
        # Bounds 0.4 and 3.
        ("truncate", "token", [0.25, 0.5, 1, 2, 3], [0, 0, 0, 0, 1]),
        ("mask", "token", [0, 0.5, 1, 2, 0], [1, 0, 0, 0, 1]),
        ("truncate", "sequence", [0.125, 0.125, 2, 2, 3], [0, 0, 0, 0, 1]),
        ("mask", "sequence", [0, 0, 2, 2, 0], [1, 1, 0, 0, 1]),
        # Geometric means: the roots of 1/8 and of 2, and 4.
        ("truncate", "geometric", [0.125**0.5, 0.125**0.5, 2**0.5, 2**0.5, 3], [0, 0, 0, 0, 1]),
        ("mask", "geometric", [0, 0, 2**0.5, 2**0.5, 0], [1, 1, 0, 0, 1]),
    ],
)
def test_weights_match_the_table_worked_out_by_hand(how, level, weights, bounded):
    log_ratio = torch.tensor(RATIOS, dtype=torch.float64).log()
    function = CORRECTION.bound(how, correction_low=0.4, correction_high=3.0)
    got, met_bound = correction_weight(log_ratio, function, level, RESPONSE, torch.ones(5))
    assert got.tolist() == pytest.approx(weights) and met_bound.int().tolist() == bounded


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("how", "weight"), [("truncate", 2.0), ("mask", 0.0)])
def test_an_overflow_meets_the_bound(how, weight, level):
    log_ratio = torch.tensor([1000.0, math.inf])
    assert correction_weight(log_ratio, how, level, response=torch.tensor([0, 1]))[0].tolist() == [weight, weight]


def test_a_weight_has_no_gradient():
    log_ratio = torch.zeros(2, requires_grad=True)
    assert not correction_weight(log_ratio, "truncate")[0].requires_grad
