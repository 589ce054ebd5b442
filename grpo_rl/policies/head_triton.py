"""The element-wise part of the tiled head on CUDA: one pass over a tile of logits each way, instead of PyTorch's seven.

The matrix products stay with cuBLAS, see `grpo_rl.policies.head`. Triton's interpreter runs the same kernels on CPU
tensors if ``TRITON_INTERPRET=1`` is set before Triton is imported.
Letters: n tokens of the tile, V vocabulary; z the logits that softmax sees.
"""

from typing import Any, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

try:
    import triton
    import triton.language as tl

    jit: Any = triton.jit
except ImportError:  # no build for this platform: `available` returns False, and nothing below is called
    triton = tl = None
    jit = no_type_check

BLOCK = 4096
"""Logits of a row that a kernel loads at a time."""
WARPS = 8
LOWEST = -3e38
"""Start of a running maximum: finite, so that a difference of two maxima is never infinity minus infinity."""


def available(device: torch.device | str) -> bool:
    """True if the kernels can run on tensors of this device.

    >>> available("cpu")
    False
    """
    return triton is not None and torch.device(device).type == "cuda" and torch.cuda.is_available()


def tile_statistics(
    logits: Float[Tensor, "n V"], target_ids: Int[Tensor, " n"], temperature: float = 1.0, softcap: float | None = None
) -> tuple[Float[Tensor, " n"], ...]:
    """Log-probability, entropy, top, total and mean_below of each row, fp32 (fp64 for fp64 logits).

    The log-probability is the target's; both are in nats. The gradient needs the others: top, the row's largest z;
    total, the sum of exp(z - top); and mean_below, the mean of z - top.

    Args:
        logits: of the model, bias included, rows contiguous.
        temperature: of the sampler; z is the (soft-capped) logit divided by it.
        softcap: logits become ``softcap * tanh(logits / softcap)`` before the temperature divides them.
    """
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1, "a row of the tile must be contiguous"
    dtype = torch.promote_types(logits.dtype, torch.float32)
    results = tuple(torch.empty(rows, dtype=dtype, device=logits.device) for _ in range(5))
    if rows:
        with torch.cuda.device_of(logits):  # Triton launches on the current device, wherever the tensors are
            _statistics[(rows,)](
                logits,
                target_ids,
                *results,
                logits.stride(0),
                vocabulary,
                temperature,
                softcap,
                LOWEST,
                _block(vocabulary),
                num_warps=WARPS,
            )
    return results


def tile_gradient_(
    logits: Float[Tensor, "n V"],
    target_ids: Int[Tensor, " n"],
    top: Float[Tensor, " n"],
    total: Float[Tensor, " n"],
    mean_below: Float[Tensor, " n"],
    grad_log_prob: Float[Tensor, " n"],
    grad_entropy: Float[Tensor, " n"],
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Float[Tensor, "n V"]:
    r"""Overwrites the logits with their gradient, rounded to their dtype once, and returns them.

    $\partial L/\partial z_v = g_{lp}(1[v = t] - p_v) - g_H\,p_v(\log p_v + H)$, then through temperature and soft cap.

    Args:
        top: with ``total`` and ``mean_below``, from :func:`tile_statistics` on the same logits, temperature and soft
            cap.
    """
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1, "a row of the tile must be contiguous"
    block = _block(vocabulary)
    if rows:
        with torch.cuda.device_of(logits):
            _gradient[(rows, triton.cdiv(vocabulary, block))](
                logits,
                target_ids,
                top,
                total,
                mean_below,
                grad_log_prob.contiguous(),  # the gradient of a sum is one number, expanded
                grad_entropy.contiguous(),
                logits.stride(0),
                vocabulary,
                temperature,
                softcap,
                block,
                num_warps=WARPS,
            )
    return logits


def _block(vocabulary: int) -> int:
    return min(BLOCK, triton.next_power_of_2(vocabulary))  # pyrefly: ignore[missing-attribute]


# Triton reads a kernel's source: `no_type_check` keeps the tests' run-time type checks from wrapping it.
@jit
@no_type_check
def _tempered(x, TEMPERATURE: tl.constexpr, SOFTCAP: tl.constexpr):
    if SOFTCAP is not None:
        # tanh by a power that can't overflow
        small = tl.exp(-2 * tl.abs(x / SOFTCAP))
        x = SOFTCAP * tl.where(x < 0, small - 1, 1 - small) / (1 + small)
    return x / TEMPERATURE


@jit
@no_type_check
def _statistics(
    logits,
    target_ids,
    log_prob,
    entropy,
    tops,
    totals,
    means_below,
    STRIDE,
    V,
    TEMPERATURE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype = tops.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)  # a tile may have more than 2^31 logits
    logits += row * STRIDE
    # Running values: largest z, sum of exp(z - top), and sum of exp(z - top) * (z - top). Relative to the
    # top, the entropy does not come out as a small difference of two large numbers.
    top = tl.full((), LOWEST, dtype)
    total = tl.full((), 0.0, dtype)
    moment = tl.full((), 0.0, dtype)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = _tempered(tl.load(logits + column, mask=column < V, other=0.0).to(dtype), TEMPERATURE, SOFTCAP)
        z = tl.where(column < V, z, float("-inf"))
        new_top = tl.maximum(top, tl.max(z, 0))
        shift = top - new_top
        carry = tl.exp(shift)
        moment = carry * (moment + shift * total)
        total = carry * total
        below = z - new_top
        weight = tl.exp(below)
        moment += tl.sum(weight * tl.where(weight > 0, below, 0.0), 0)  # p log p is 0 for p = 0, not NaN
        total += tl.sum(weight, 0)
        top = new_top
    target = _tempered(tl.load(logits + tl.load(target_ids + row)).to(dtype), TEMPERATURE, SOFTCAP)
    log_total = tl.log(total)
    mean_below = moment / total
    tl.store(log_prob + row, target - top - log_total)
    # Neither term can be negative: the total counts the top as 1, and no z is larger than the top.
    tl.store(entropy + row, log_total - mean_below)
    tl.store(tops + row, top)
    tl.store(totals + row, total)
    tl.store(means_below + row, mean_below)


@jit
@no_type_check
def _gradient(
    logits,
    target_ids,
    tops,
    totals,
    means_below,
    grad_log_prob,
    grad_entropy,
    STRIDE,
    V,
    TEMPERATURE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype = tops.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * STRIDE + column
    z = _tempered(tl.load(place, mask=column < V, other=float("-inf")).to(dtype), TEMPERATURE, SOFTCAP)
    below = z - tl.load(tops + row)
    p = tl.exp(below) / tl.load(totals + row)
    by_log_prob = tl.load(grad_log_prob + row).to(dtype)
    by_entropy = tl.load(grad_entropy + row).to(dtype)
    beyond_mean = tl.where(p > 0, below - tl.load(means_below + row), 0.0)  # log p + H
    grad = tl.where(column == tl.load(target_ids + row), by_log_prob, 0.0)
    grad -= p * (by_log_prob + by_entropy * beyond_mean)
    grad /= TEMPERATURE
    if SOFTCAP is not None:
        tanh = z * TEMPERATURE / SOFTCAP
        grad *= 1 - tanh * tanh
    tl.store(place, grad.to(logits.dtype.element_ty), mask=column < V)
