"""Covariance of log-probability and advantage over an optimizer step. Letters: N tokens of the step, M of them."""

import torch
from jaxtyping import Float
from torch import Tensor


class Covariance:
    """The covariance of log-probability and advantage over the trained tokens of an optimizer step.

    Tokens of high covariance lower the policy's entropy. Source: https://arxiv.org/abs/2505.22617, eq. 10.

    Args:
        log_probs: of sampling, so that they stay the same while the step is computed.
        advantages: of each token's response.
        draws: uniform in [0, 1), one for each token.
        window: the lowest and highest covariance of the tokens that may be drawn.

    Three tokens of mean log-probability -2 and mean advantage 0, with covariances of 1, 0 and 1:

    >>> step = Covariance(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1.0, 0.0, -1.0]), torch.zeros(3), (0.5, 5.0))
    >>> step.ranks(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 0.0]), torch.zeros(2))
    (tensor([0.0000, 0.6667], dtype=torch.float64), tensor([0., 1.], dtype=torch.float64))
    """

    def __init__(
        self,
        log_probs: Float[Tensor, " N"],
        advantages: Float[Tensor, " N"],
        draws: Float[Tensor, " N"],
        window: tuple[float, float],
    ) -> None:
        self._means, self._window = (log_probs.mean(), advantages.mean()), window
        covariances = self._of(log_probs, advantages)
        self._sorted, self._candidates = covariances.sort().values, draws[self._inside(covariances)].sort().values

    def ranks(
        self, log_probs: Float[Tensor, " M"], advantages: Float[Tensor, " M"], draws: Float[Tensor, " M"]
    ) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """For each of these tokens two shares of the step's tokens: of larger covariance, and drawn earlier.

        The second is 1 outside the window.
        """
        own, count = self._of(log_probs, advantages), max(len(self._sorted), 1)
        larger = len(self._sorted) - torch.searchsorted(self._sorted, own, right=True)
        earlier = torch.searchsorted(self._candidates, draws)
        return larger.double() / count, torch.where(self._inside(own), earlier.double() / count, 1.0)

    def _of(self, log_probs: Tensor, advantages: Tensor) -> Tensor:
        return (log_probs - self._means[0]) * (advantages - self._means[1])

    def _inside(self, covariances: Tensor) -> Tensor:
        return (covariances > self._window[0]) & (covariances < self._window[1])
