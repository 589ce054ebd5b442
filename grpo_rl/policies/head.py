"""Log-probability and entropy of sampled tokens, tiled over tokens: no [N, V] tensor ever exists.

Letters: N tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def log_prob_and_entropy(
    hidden: Float[Tensor, "N E"],
    weight: Float[Tensor, "V E"],
    target_ids: Int[Tensor, " N"],
    bias: Float[Tensor, " V"] | None = None,
    temperature: float = 1.0,
    tile_tokens: int = 256,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability of each target and entropy of its distribution, in nats, differentiable in both.

    Logits are made, used and dropped a tile of tokens at a time, and made again in the backward pass: the price is one
    more GEMM, the gain is that memory does not grow with N * V. Softmax runs in fp32 (fp64 for fp64 input).

    Args:
        temperature: of the sampler; logits are divided by it.
        tile_tokens: rows of the tile.

    Returns:
        log-probabilities and entropies, fp32 (fp64 for fp64 input).

    A uniform distribution over four tokens:

    >>> lp, h = log_prob_and_entropy(torch.zeros(1, 2), torch.ones(4, 2), torch.tensor([3]))
    >>> lp.exp().item(), h.exp().item()
    (0.25, 4.0)
    """
    return _TiledHead.apply(hidden, weight, target_ids, bias, temperature, tile_tokens)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, dtype: torch.dtype) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).to(dtype)
    return logits if temperature == 1.0 else logits.div_(temperature)


class _TiledHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target_ids, bias, temperature, tile_tokens):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs, entropies, lses = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(3))
        for start in range(0, len(hidden), tile_tokens):
            rows = slice(start, start + tile_tokens)
            logits = _logits(hidden[rows], weight, bias, temperature, dtype)
            lse = logits.logsumexp(-1)
            log_probs[rows] = logits.gather(-1, target_ids[rows, None])[:, 0] - lse
            # H = lse - sum_v p_v z_v
            probs = (logits - lse[:, None]).exp_()
            entropies[rows] = lse - torch.einsum("nv,nv->n", probs, logits)
            lses[rows] = lse
        ctx.save_for_backward(hidden, weight, target_ids, bias, entropies, lses)
        ctx.temperature, ctx.tile_tokens = temperature, tile_tokens
        return log_probs, entropies

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropies):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, target_ids, bias, entropies, lses = ctx.saved_tensors
        dtype = lses.dtype
        grad_hidden = torch.empty_like(hidden)
        # bf16 sums over tiles would lose small terms, so the weight's gradient is summed in fp32.
        grad_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and ctx.needs_input_grad[3] else None
        entropy_counts = bool(grad_entropies.any())
        for start in range(0, len(hidden), ctx.tile_tokens):
            rows = slice(start, start + ctx.tile_tokens)
            log_p = _logits(hidden[rows], weight, bias, ctx.temperature, dtype).sub_(lses[rows, None])
            probs = log_p.exp()
            g = grad_log_probs[rows, None]
            if entropy_counts:
                # dH/dz_v = -p_v (log p_v + H)
                scale = log_p.add_(entropies[rows, None]).mul_(-grad_entropies[rows, None]).sub_(g)
                grad_logits = probs.mul_(scale)
            else:
                grad_logits = probs.mul_(-g)
            grad_logits.scatter_add_(-1, target_ids[rows, None], g)
            if ctx.temperature != 1.0:
                grad_logits.div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )
