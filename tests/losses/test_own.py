"""A surrogate or KL estimate of the user's own: it computes what ours would; others are refused."""

from __future__ import annotations

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
