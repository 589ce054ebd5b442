"""The GRPO loss as a TorchRL loss module: surrogate, KL and entropy, each summed with the weights of the whole step.

Letters: N response tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torchrl.objectives import LossModule

from grpo_rl.losses.kl import k3
from grpo_rl.losses.surrogate import clipped_surrogate

LOSSES = ("loss_objective", "loss_kl", "loss_entropy")
"""Their sum is what is minimised."""
METRIC_SUMS = ("tokens", "clip_low", "clip_high", "kl_sampler", "kl_ref", "entropy", "ratio", "ratio_squared")
"""Sums over trained tokens that the loss reports; divide by ``tokens``."""


class GRPOLoss(LossModule):
    r"""$\sum_t w_t \left[-\min(r_t A, \mathrm{clip}(r_t) A) + \beta\, \mathrm{KL}_t - \gamma H_t\right]$ of tokens.

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 3 and 4. The weights ``w`` come from
    `grpo_rl.losses.aggregate.token_weights`, which counts over the whole optimizer step: losses of micro-batches add
    up to the step's loss, and splitting it differently never changes the gradient.

    Args:
        clip_low: ratios below ``1 - clip_low`` are clipped.
        clip_high: ratios above ``1 + clip_high`` are clipped.
        kl_coef: weight of the k3 estimate of KL(policy || reference).
        entropy_coef: weight of the entropy bonus.

    A fresh policy has ratios of 1, so its loss is minus the weighted advantage:

    >>> loss = GRPOLoss()
    >>> tokens = TensorDict(
    ...     log_prob=torch.tensor([-1.0, -2.0]), entropy=torch.ones(2), old_log_prob=torch.tensor([-1.0, -2.0]),
    ...     advantage=torch.tensor([1.0, -0.5]), trainable=torch.tensor([True, True]), weight=torch.tensor([0.5, 0.5]),
    ...     batch_size=[2])
    >>> loss(tokens)["loss_objective"]
    tensor(-0.2500)
    """

    @dataclass
    class _AcceptedKeys:
        log_prob: NestedKey = "log_prob"
        """[N] log pi_theta of the sampled tokens, with gradient."""
        entropy: NestedKey = "entropy"
        """[N] entropy of the distribution each was drawn from."""
        old_log_prob: NestedKey = "old_log_prob"
        """[N] log-probability under the policy that sampled."""
        ref_log_prob: NestedKey = "ref_log_prob"
        """[N] under the reference; read only when kl_coef is not 0."""
        advantage: NestedKey = "advantage"
        """[N] the advantage of each token's answer."""
        trainable: NestedKey = "trainable"
        """[N] False on tokens that the policy did not choose."""
        weight: NestedKey = "weight"
        """[N] from `token_weights`; 0 where not trainable."""

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    out_keys = (*LOSSES, *METRIC_SUMS)  # pyright: ignore[reportAssignmentType]

    def __init__(
        self, clip_low: float = 0.2, clip_high: float = 0.2, kl_coef: float = 0.0, entropy_coef: float = 0.0
    ) -> None:
        super().__init__()
        if not 0 <= clip_low <= 1 or clip_high < 0:
            raise ValueError(f"loss.clip_low is {clip_low} and loss.clip_high {clip_high}; need 0..1 and 0 or more")
        self.clip_low, self.clip_high = clip_low, clip_high
        self.kl_coef, self.entropy_coef = kl_coef, entropy_coef

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries that :meth:`forward` reads."""
        keys = self.tensor_keys
        ref = [keys.ref_log_prob] if self.kl_coef else []
        names = [keys.log_prob, keys.entropy, keys.old_log_prob, keys.advantage, keys.trainable, keys.weight]
        return names + ref

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        """GRPO has no value estimator."""

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """The three losses, whose sum is to be minimised, and :data:`METRIC_SUMS` without gradient."""
        keys = self.tensor_keys
        log_prob, entropy, weight = (tensordict[k] for k in (keys.log_prob, keys.entropy, keys.weight))
        advantage, trainable = tensordict[keys.advantage], tensordict[keys.trainable]
        # What a tool wrote has no sampler's log-probability; a ratio of 1 keeps it out of every sum without a NaN.
        log_ratio = torch.where(trainable, log_prob - tensordict[keys.old_log_prob], 0.0)
        surrogate = clipped_surrogate(log_ratio, advantage, self.clip_low, self.clip_high)
        out = TensorDict(
            loss_objective=(weight * surrogate).sum(),
            loss_entropy=-self.entropy_coef * (weight * entropy).sum(),
        )
        if self.kl_coef:
            ref_log_prob = torch.where(trainable, tensordict[keys.ref_log_prob], log_prob.detach())
            kl = k3(log_prob, ref_log_prob)
            out["loss_kl"] = self.kl_coef * (weight * kl).sum()
        else:
            kl = torch.zeros_like(log_prob)
            out["loss_kl"] = torch.zeros_like(out["loss_objective"])
        with torch.no_grad():
            ratio = log_ratio.exp()
            sums = {
                "tokens": trainable,
                "clip_low": (ratio < 1 - self.clip_low) & (advantage < 0),
                "clip_high": (ratio > 1 + self.clip_high) & (advantage > 0),
                "kl_sampler": k3(tensordict[keys.old_log_prob], log_prob),
                "kl_ref": kl,
                "entropy": entropy,
                "ratio": ratio,
                "ratio_squared": ratio.square(),
            }
            for name, value in sums.items():
                out[name] = torch.where(trainable, value.to(log_prob.dtype), 0.0).sum()
        return out
