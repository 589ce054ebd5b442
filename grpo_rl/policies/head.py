"""Log-probability and entropy of sampled tokens, tile by tile: no [N, V] tensor is ever allocated.

With a tied head, the embedding's lookups (:class:`Lookups`) share the gradient table of the head.

Letters: N tokens, E hidden size, V vocabulary, K ids of all kept sets; n tokens and v words of a tile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from grpo_rl.data.group import Kept
from grpo_rl.policies.compiler import why_uncompiled
from grpo_rl.policies.probe import HIDDEN, measured_logits

CPU_TILE = (1024, 2048)
"""Tokens and words of a tile, which stays in a CPU's caches between operations."""
GPU_TILE_LOGITS = 1 << 28
"""Logits of a tile of whole rows on a GPU: half a GiB in bf16."""


def log_prob_and_entropy(
    hidden: Float[Tensor, "N E"],
    weight: Float[Tensor, "V E"],
    target_ids: Int[Tensor, " N"],
    bias: Float[Tensor, " V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    tile: tuple[int, int] = CPU_TILE,
    owner: Float[Tensor, "V E"] | None = None,
    kept: Kept | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability of each target and entropy of its distribution, in nats, differentiable in both.

    Logits are computed a tile at a time, and again in the backward pass: at the cost of one more GEMM, memory does not
    grow with N * V. Softmax runs in fp32 (fp64 for fp64 input).

    Args:
        temperature: of the sampler; logits are divided by it.
        softcap: logits become ``softcap * tanh(logits / softcap)`` first, as in Gemma 2.
        tile: tokens and words of a tile; not used by the Triton kernels (`grpo_rl.policies.head_triton`).
        owner: the tensor that gets the weight's gradient instead (:attr:`Lookups.stand_in`).
        kept: the kept sets of the tokens: softmax is over them alone, where a token has one. Every logit is computed
            all the same, and a tile's others are set to -inf. With a soft cap, the Triton kernels are not used then.

    Returns:
        log-probabilities and entropies, fp32 (fp64 for fp64 input).

    A uniform distribution over four tokens:

    >>> lp, h = log_prob_and_entropy(torch.zeros(1, 2), torch.ones(4, 2), torch.tensor([3]))
    >>> lp.exp().item(), h.exp().item()
    (0.25, 4.0)
    """
    owner = weight if owner is None else owner
    # The kernels apply a soft cap themselves: it would make a finite number of -inf.
    fits = hidden.device.type == "cuda" and hidden.dtype != torch.float64 and (kept is None or softcap is None)
    if fits and why_uncompiled(hidden.device) is None:
        cut = None if kept is None else _Cut(kept, (_rows_of_a_tile(weight), len(weight)), len(weight))
        return _RowTiledHead.apply(hidden, owner, weight.detach(), target_ids, bias, temperature, softcap, cut)
    cut = None if kept is None else _Cut(kept, tile, len(weight))
    make = _Logits(temperature, softcap, tile, cut)
    return _TiledHead.apply(hidden, owner, weight.detach(), target_ids, bias, make)


def logit_scaling(model: PreTrainedModel) -> tuple[float, float | None]:
    r"""The factor from the head's product with the hidden states to the model's logits, and their soft cap.

    The factor is 1 for most models. With a soft cap c the product x becomes $c\tanh(x / c)$; no model has both.

    Raises:
        ValueError: its logits are neither, or a copy of the model without weights can't be run.

    >>> from transformers import GraniteConfig, GraniteForCausalLM
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> logit_scaling(GraniteForCausalLM(GraniteConfig(**sizes, num_key_value_heads=2, logits_scaling=8.0)))
    (0.125, None)
    """
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    logits = measured_logits(model)
    if softcap and torch.allclose(logits, softcap * torch.tanh(HIDDEN / softcap)):
        return 1.0, softcap
    factors = logits / HIDDEN
    if softcap or not torch.allclose(factors, factors[0]):
        raise ValueError("its logits are no multiple of the head's product with the hidden states")
    return factors[0].item(), softcap


class _Cut:
    """Sets the logits of a tile to -inf that are in no kept set."""

    def __init__(self, kept: Kept, tile: tuple[int, int], words: int) -> None:
        rows, ids = torch.repeat_interleave(kept.counts), kept.ids.long()
        self._tile, self._across = tile, -(-words // tile[1])
        place = rows // tile[0] * self._across + ids // tile[1]
        order = place.argsort()
        self._rows, self._columns = rows[order] % tile[0], ids[order] % tile[1]
        tiles = max(1, -(-len(kept.counts) // tile[0])) * self._across  # rows without a token are a tile all the same
        self._ends = [0, *place.bincount(minlength=tiles).cumsum(0).tolist()]
        self._is_cut = (kept.counts > 0)[:, None]

    def __call__(self, logits: Float[Tensor, "n v"], first_token: int, first_word: int = 0) -> None:
        place = first_token // self._tile[0] * self._across + first_word // self._tile[1]
        inside = slice(self._ends[place], self._ends[place + 1])
        rows, columns = self._rows[inside], self._columns[inside]
        values = logits[rows, columns]
        logits.masked_fill_(self._is_cut[first_token : first_token + len(logits)], -torch.inf)
        logits[rows, columns] = values


@dataclass(frozen=True)
class _Logits:
    """Computes a tile of logits from a tile of hidden states and a tile of the head."""

    temperature: float
    softcap: float | None
    tile: tuple[int, int]
    cut: _Cut | None = None

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits over temperature, and the slope of the soft cap if there is one."""
        logits = linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))
        slope = None
        if self.softcap is not None:
            tanh = logits.div_(self.softcap).tanh_()
            slope = 1 - tanh * tanh
            logits = tanh.mul_(self.softcap)
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        return logits, slope


class _TiledHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, owner, weight, target_ids, bias, make):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        target_logit, total, moment = (torch.zeros(len(hidden), dtype=dtype, device=hidden.device) for _ in range(3))
        # Running values: largest logit z, sum of exp(z - top), sum of exp(z - top) * (z - top). Relative
        # to the top, no result is a small difference of large numbers. The top starts finite: inf - inf would be NaN.
        top = torch.full_like(total, torch.finfo(dtype).min / 2)
        has_masked = False  # words that the model masks out, or that are in no kept set
        for tokens in _tiles(len(hidden), make.tile[0]):
            for words in _tiles(len(weight), make.tile[1]):
                logits, _ = make(hidden[tokens], weight[words], None if bias is None else bias[words])
                if make.cut is not None:
                    make.cut(logits, tokens.start, words.start)
                place = target_ids[tokens, None] - words.start
                inside = (place >= 0) & (place < logits.shape[1])
                target_logit[tokens] += logits.gather(1, place.where(inside, 0)).where(inside, 0)[:, 0]
                new_top = torch.maximum(top[tokens], logits.amax(-1))
                shift = top[tokens] - new_top
                carry = shift.exp()
                below = logits.sub_(new_top[:, None])
                weights = below.exp()
                moment[tokens] = carry * (moment[tokens] + shift * total[tokens])
                total[tokens] = carry * total[tokens] + weights.sum(-1)
                below_sum = weights.mul_(below).sum(-1)
                if below_sum.isnan().any():  # logits of -inf: p log p is 0, not 0 * inf
                    below_sum, has_masked = weights.nansum(-1), True
                moment[tokens] += below_sum
                top[tokens] = new_top
        # H = log sum - mean of (z - top): neither term can be negative, as the sum counts the top as 1 and z <= top.
        mean_below = moment / total
        ctx.save_for_backward(hidden, weight, target_ids, bias, top, total, mean_below)
        ctx.make, ctx.weight_grad_dtype, ctx.has_masked = make, grad_dtype(owner), has_masked
        log_total = total.log()
        return target_logit - top - log_total, log_total - mean_below

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):  # pyrefly: ignore[bad-override]
        hidden, weight, target_ids, bias, top, total, mean_below = ctx.saved_tensors
        make = ctx.make
        # Sums over tiles are fp32: bf16 would lose small terms.
        grad_hidden = torch.zeros_like(hidden, dtype=total.dtype)
        grad_weight = torch.empty_like(weight, dtype=ctx.weight_grad_dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[4] else None
        entropy_counts = bool(grad_entropy.any())
        for words in _tiles(len(weight), make.tile[1]):
            word_weight, word_bias = weight[words], None if bias is None else bias[words]
            sum_weight, sum_bias = torch.zeros_like(word_weight, dtype=total.dtype), total.new_zeros(len(word_weight))
            for tokens in _tiles(len(hidden), make.tile[0]):
                logits, slope = make(hidden[tokens], word_weight, word_bias)
                if make.cut is not None:
                    make.cut(logits, tokens.start, words.start)
                below = logits.sub_(top[tokens, None])
                g, share = grad_log_prob[tokens, None], 1 / total[tokens, None]
                if entropy_counts:
                    # dH/dz_v = -p_v (log p_v + H), and log p_v + H is z_v less the mean z.
                    weights = below.exp()
                    if ctx.has_masked:
                        below.masked_fill_(weights == 0, 0)
                    by_entropy = grad_entropy[tokens, None] * share
                    grad = below.sub_(mean_below[tokens, None]).mul_(-by_entropy).sub_(g * share).mul_(weights)
                else:
                    grad = below.exp_().mul_(-g * share)
                place = target_ids[tokens, None] - words.start
                inside = (place >= 0) & (place < grad.shape[1])
                grad.scatter_add_(1, place.where(inside, 0), g * inside)
                if slope is not None:
                    grad *= slope
                if make.temperature != 1.0:
                    grad.div_(make.temperature)
                if grad_bias is not None:
                    sum_bias += grad.sum(0)
                grad = grad.to(hidden.dtype)
                if ctx.needs_input_grad[0]:
                    grad_hidden[tokens] += grad @ word_weight
                if grad_weight is not None:
                    sum_weight += grad.T @ hidden[tokens]
            if grad_weight is not None:
                grad_weight[words] = sum_weight
            if grad_bias is not None:
                grad_bias[words] = sum_bias
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, grad_bias, None


class _RowTiledHead(torch.autograd.Function):
    """The same on CUDA: tiles of whole rows, their element-wise part in one kernel each way."""

    @staticmethod
    def forward(ctx, hidden, owner, weight, target_ids, bias, temperature, softcap, cut=None):
        from grpo_rl.policies.head_triton import tile_statistics

        parts = []
        for tokens in _tiles(max(len(hidden), 1), _rows_of_a_tile(weight)):
            logits = linear(hidden[tokens], weight, bias)
            if cut is not None:
                cut(logits, tokens.start)
            parts.append(tile_statistics(logits, target_ids[tokens], temperature, softcap))
        log_prob, entropy, *statistics = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, target_ids, bias, *statistics)
        ctx.temperature, ctx.softcap, ctx.weight_grad_dtype, ctx.cut = temperature, softcap, grad_dtype(owner), cut
        return log_prob, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):  # pyrefly: ignore[bad-override]
        from grpo_rl.policies.head_triton import tile_gradient_

        hidden, weight, target_ids, bias, *statistics = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        tiles = _tiles(max(len(hidden), 1), _rows_of_a_tile(weight))
        # Sums over tiles are fp32: bf16 would lose small terms. A single tile has nothing to sum.
        sum_dtype = torch.float32 if len(tiles) > 1 else ctx.weight_grad_dtype
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if ctx.needs_input_grad[1] else None
        wants_bias = bias is not None and ctx.needs_input_grad[4]
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        for tokens in tiles:
            logits = linear(hidden[tokens], weight, bias)
            if ctx.cut is not None:
                ctx.cut(logits, tokens.start)
            rows = (x[tokens] for x in (*statistics, grad_log_prob, grad_entropy))
            grad = tile_gradient_(logits, target_ids[tokens], *rows, temperature=ctx.temperature, softcap=ctx.softcap)
            grad_hidden[tokens] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[tokens]
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
        grad_weight = None if grad_weight is None else grad_weight.to(ctx.weight_grad_dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, None, None, grad_bias, None, None, None


def _rows_of_a_tile(weight: Float[Tensor, "V E"]) -> int:
    return max(1, GPU_TILE_LOGITS // len(weight))


def _tiles(count: int, step: int) -> list[slice]:
    return [slice(first, first + step) for first in range(0, count, step)]


def grad_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that the weight's gradient is kept in: fp32 if an optimizer with fp32 masters requests it."""
    return (weight.grad_dtype if weight.is_leaf else None) or weight.dtype


class Lookups(TorchFunctionMode):
    """Replaces the lookups in an embedding weight while a model runs.

    PyTorch allocates a gradient as large as the table in the weight's dtype, another in the dtype that the gradient is
    kept in, and adds that to the gradient of a tied head: for a small model more memory than all else in a step. Here
    the rows' gradients are added to the kept table directly.

    >>> weight = torch.nn.Parameter(torch.eye(3))
    >>> with Lookups(weight) as lookups:
    ...     rows = embedding(torch.tensor([1, 1]), weight)
    >>> (rows.sum() + 10 * lookups.stand_in.sum()).backward()
    >>> weight.grad
    tensor([[10., 10., 10.],
            [12., 12., 12.],
            [10., 10., 10.]])
    """

    def __init__(self, weight: Float[Tensor, "V E"]) -> None:
        super().__init__()
        self._weight = weight
        self.stand_in: Tensor | None = None
        """[V, E] after a lookup: a placeholder without data, the owner of a tied head's gradient."""

    @no_type_check  # it is called for every operation, and a run-time type check would take longer
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is embedding and args[1] is self._weight and self.stand_in is None and torch.is_grad_enabled():
            rows, self.stand_in = _Lookup.apply(self._weight, args[0], kwargs["padding_idx"])
            return rows
        return func(*args, **kwargs)


@contextmanager
def lookups_in(module: torch.nn.Module) -> Iterator[Lookups]:
    """Takes over an embedding's lookups in its weight, in a mode that is on while the module runs and at no other time.

    What compiles under a mode is compiled for it, and anew where the mode's state changes.
    """
    lookups = Lookups(module.weight)
    before = module.register_forward_pre_hook(lambda *_: lookups.__enter__() and None)
    after = module.register_forward_hook(lambda *_: lookups.__exit__(None, None, None), always_call=True)
    try:
        yield lookups
    finally:
        before.remove()
        after.remove()


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Float[Tensor, "V E"], ids: Int[Tensor, " *T"], padding_idx: int | None):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.padding_idx, ctx.shape, ctx.dtype = padding_idx, weight.shape, grad_dtype(weight)
        return embedding(ids, weight), weight.new_zeros((), dtype=ctx.dtype).expand(weight.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows, grad_weight):  # pyrefly: ignore[bad-override]
        if grad_rows is None:
            return grad_weight, None, None
        (ids,) = ctx.saved_tensors
        if grad_weight is None:
            grad_weight = grad_rows.new_zeros(ctx.shape, dtype=ctx.dtype)
        if ctx.padding_idx is not None:
            grad_rows = grad_rows.masked_fill((ids == ctx.padding_idx)[..., None], 0)
        # In place: nothing else uses the placeholder's gradient. Not `index_add_`, whose order varies on CUDA.
        grad_weight = grad_weight.contiguous()
        grad_weight.index_put_((ids,), grad_rows.to(ctx.dtype), accumulate=True)
        return grad_weight, None, None
