"""A surrogate or KL estimate of the user's own: it computes what ours would; others are refused."""

import pytest
import torch

from grpo_rl.losses.grpo import GRPOLoss
from tests.losses.test_grpo import random_tokens


def result(**settings):
    tokens = random_tokens()
    log_prob = tokens["log_prob"].requires_grad_()
    loss = GRPOLoss(kl_coef=0.1, **settings)(tokens)["loss"]
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
    shared = {"ratio": ratio, "correction": correction, "clip_low": 0.1, "clip_high": 0.12, "correction_high": 1.5}
    (loss, gradient), (ours, our_gradient) = result(surrogate=own_clip, **shared), result(**shared)
    assert gradient.any()
    torch.testing.assert_close((loss, gradient), (ours, our_gradient))


def test_an_own_kl_has_the_loss_and_gradient_of_ours():
    def own_k2(log_prob, ref_log_prob):
        return 0.5 * (ref_log_prob - log_prob) ** 2

    torch.testing.assert_close(result(kl=own_k2), result(kl="k2"))
