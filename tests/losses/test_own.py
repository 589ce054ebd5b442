"""A surrogate or KL estimate of the user's own: it computes what ours would; others are refused."""

from __future__ import annotations

import re

import pytest
import torch
from tensordict import TensorDict

from grpo_rl.losses.grpo import GRPOLoss

N = 6


def tokens():
    generator = torch.Generator().manual_seed(0)
    log_prob = (-torch.rand(N, generator=generator) * 3).requires_grad_()
    near = [log_prob.detach() + torch.randn(N, generator=generator) for _ in range(3)]
    return log_prob, TensorDict(
        log_prob=log_prob, sampler_log_prob=near[0], old_log_prob=near[1], ref_log_prob=near[2], entropy=torch.ones(N),
        advantage=torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, -0.5]), trainable=torch.tensor([1, 1, 1, 1, 1, 0]).bool(),
        weight=torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2, 0.0]), response=torch.tensor([0, 0, 0, 1, 1, 1]), batch_size=[N],
    )  # fmt: skip


def result(**settings):
    log_prob, batch = tokens()
    loss = GRPOLoss(kl_coef=0.1, **settings)(batch)["loss"]
    loss.backward()
    return loss.detach(), log_prob.grad


def own_clip(advantage, log_ratio, clip_high, clip_low):
    """PPO's clip in other words: by cases."""
    ratio = log_ratio.exp()
    bound = torch.where(advantage > 0, ratio.clamp(max=1 + clip_high), ratio.clamp(min=1 - clip_low))
    return -bound * advantage


@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("correction", ["none", "truncate", "mask"])
def test_an_own_surrogate_has_the_loss_and_gradient_of_ours_with_every_ratio_and_correction(ratio, correction):
    shared = {"ratio": ratio, "correction": correction, "clip_low": 0.1, "clip_high": 0.3}
    (loss, gradient), (ours, our_gradient) = result(surrogate=own_clip, **shared), result(**shared)
    assert gradient.any()
    torch.testing.assert_close((loss, gradient), (ours, our_gradient))


def test_an_own_kl_has_the_loss_and_gradient_of_ours():
    def own_k2(log_prob, ref_log_prob):
        return 0.5 * (ref_log_prob - log_prob) ** 2

    torch.testing.assert_close(result(kl=own_k2), result(kl="k2"))


def test_a_surrogate_through_log_prob_alone_counts_as_trainable():
    weighted = result(surrogate=lambda log_ratio, advantage, log_prob: -log_ratio.detach().exp() * advantage * log_prob)
    torch.testing.assert_close(weighted, result(surrogate="cispo", clip_low=1.0, clip_high=1e6))


def in_place(log_ratio, advantage):
    advantage.mul_(2)
    return -log_ratio.exp() * advantage


@pytest.mark.parametrize(
    ("surrogate", "message"),
    [
        (lambda log_ratio, advantage: (log_ratio * advantage).mean(), r"returned shape [] for 10 tokens; return [10]"),
        (lambda log_ratio, advantage: 3.0, "returned 3.0 for 10 tokens"),
        (lambda log_ratio, advantage: (log_ratio * advantage).double(), "returned torch.float64 for torch.float32"),
        (lambda log_ratio, advantage: -advantage, "no gradient reaches the policy; compute with log_ratio or log_prob"),
        (lambda log_ratio, advantage: -log_ratio.detach().exp() * advantage, "no gradient reaches the policy"),
        (lambda log_ratio, advantage: -log_ratio.square().exp() * advantage, "the value is -inf at a log-ratio of 12"),
        (lambda log_ratio, advantage: -log_ratio.abs().sqrt() * advantage, "the gradient is nan at a log-ratio of 0"),
        (lambda log_ratio, advantage: -log_ratio * (advantage - advantage.mean()), "where other tokens are beside it"),
        (lambda log_ratio, advantage: -log_ratio.exp() * advantage / advantage.abs().mean(), "where other tokens are"),
        (lambda log_ratio, advantage: -log_ratio.exp() * advantage / advantage.abs().max(), "where other tokens are"),
        (in_place, "changes advantage in place"),
        (lambda log_ratio, mask: log_ratio, "asks for mask; what it can get by name is log_ratio, advantage, log_prob"),
        (lambda log_ratio, advantage: log_ratio @ torch.ones(3), "raised RuntimeError: "),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_refused_before_training(surrogate, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        GRPOLoss(surrogate=surrogate)
    assert str(error.value).startswith("loss.surrogate=")


def test_a_dual_clip_is_refused_unless_the_own_surrogate_reads_it():
    with pytest.raises(ValueError, match="loss.dual_clip is 3.0"):
        GRPOLoss(surrogate=own_clip, dual_clip=3.0)
    GRPOLoss(surrogate=lambda log_ratio, advantage, dual_clip: -log_ratio * advantage * dual_clip, dual_clip=3.0)
