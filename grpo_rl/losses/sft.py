"""The loss of supervised fine-tuning (SFT) as a TorchRL loss module. Letter: N response tokens of a micro-batch."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives import LossModule


def sft_loss(
    log_prob: Float[Tensor, " N"], trainable: Bool[Tensor, " N"], weight: Float[Tensor, " N"]
) -> Float[Tensor, ""]:
    r"""The loss $-\sum_t w_t \log \pi_\theta(y_t)$ over the tokens of demonstrations.

    Source: InstructGPT, https://arxiv.org/abs/2203.02155, section 3.1. With weights of one over the optimizer step's
    tokens (`token_weights`, ``token_mean``) the losses of micro-batches add up to the mean over all tokens.

    Args:
        log_prob: log pi_theta of each token, in nats.
        trainable: False on tokens that are not imitated.
        weight: of each token in the step's loss.

    >>> sft_loss(torch.tensor([-1.0, -3.0]), torch.tensor([True, True]), torch.tensor([0.5, 0.5]))
    tensor(2.)
    """
    wide = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))
    return -(weight * torch.where(trainable, wide, 0.0)).sum()


class SFTLoss(LossModule):
    """The mean of -log pi over the tokens of demonstrations, as :func:`sft_loss`; it reads what `GRPOLoss` reads.

    >>> tokens = TensorDict(
    ...     log_prob=torch.tensor([-1.0, -3.0]), entropy=torch.ones(2), trainable=torch.tensor([True, True]),
    ...     weight=torch.tensor([0.5, 0.5]), batch_size=[2])
    >>> SFTLoss()(tokens)["loss_sft"]
    tensor(2.)
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        log_prob: NestedKey = "log_prob"
        """[N] log pi_theta of each token, with gradient."""
        entropy: NestedKey = "entropy"
        """[N] entropy of the policy's distribution at the token, for a metric."""
        trainable: NestedKey = "trainable"
        """[N] False on tokens that are not imitated."""
        weight: NestedKey = "weight"
        """[N] from `token_weights`; 0 on tokens that are not imitated."""

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    out_keys = ("loss", "loss_sft", "tokens", "entropy")  # pyrefly: ignore[bad-override-mutable-attribute]

    @property
    def in_keys(self) -> list[NestedKey]:  # pyrefly: ignore[bad-override]
        """The entries that :meth:`forward` reads."""
        keys = self.tensor_keys
        return [keys.log_prob, keys.entropy, keys.trainable, keys.weight]

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        """SFT has no value estimator."""

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """``loss``, which is minimised, the same as its only term ``loss_sft``, and sums over tokens without gradient.

        The sums are ``tokens`` and ``entropy``.
        """
        keys = self.tensor_keys
        trainable, entropy = tensordict[keys.trainable], tensordict[keys.entropy].detach()
        loss = sft_loss(tensordict[keys.log_prob], trainable, tensordict[keys.weight])
        return TensorDict(
            loss=loss,
            loss_sft=loss,
            tokens=trainable.sum().to(loss.dtype),
            entropy=torch.where(trainable, entropy, 0.0).sum().to(loss.dtype),
        )
