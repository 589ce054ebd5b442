"""Log-probability and entropy by Liger's fused scaled cross entropy, CuTe kernels for Hopper. For liger-kernel 0.8.5.

It returns entropies in bf16, and adds the weight's gradient up in bf16 by waves of 1,024 tokens: so it is used only
where `train_model.head=liger` selects it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_rl.data.kept import Kept
from grpo_rl.policies.embedding import grad_dtype
from grpo_rl.policies.head import log_prob_and_entropy

MODULE = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
HOPPER = (9, 0)


def check_liger(device: torch.device, head: torch.nn.Module, softcap: float | None) -> None:
    """Checks that Liger's kernels can compute a model's head.

    Raises:
        ValueError: they can't; with the reason.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        why = f"it is for Hopper GPUs, and the model is on {device}"
    elif importlib.util.find_spec("liger_kernel") is None or importlib.util.find_spec("cutlass") is None:
        why = "it is not installed (pip install 'liger-kernel[cutedsl]')"
    elif softcap is not None or getattr(head, "bias", None) is not None:
        why = "it computes neither soft caps nor a head's bias, and the model has one"
    elif head.weight.dtype != torch.bfloat16:
        why = f"it is for bfloat16, and the head is {str(head.weight.dtype).removeprefix('torch.')}"
    else:
        return
    raise ValueError(f"train_model.head=liger: {why}; set it to own")


def liger_log_prob_and_entropy(
    hidden: Float[Tensor, "N E"],
    weight: Float[Tensor, "V E"],
    target_ids: Int[Tensor, " N"],
    temperature: float = 1.0,
    owner: Float[Tensor, "V E"] | None = None,
    kept: Kept | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Computes what `grpo_rl.policies.head.log_prob_and_entropy` does, for a head without bias and soft cap.

    With kept sets, which Liger's kernels don't take, it is that function that computes.
    """
    if not len(hidden) or kept is not None:
        return log_prob_and_entropy(hidden, weight, target_ids, temperature=temperature, owner=owner, kept=kept)
    # Targets are ids of ours: to check them, Liger would wait for the GPU in every call.
    os.environ.setdefault("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "0")
    fused = importlib.import_module(MODULE).LigerFusedLinearScaledCrossEntropyFunction
    owned = _Owned.apply(weight if owner is None else owner, weight.detach())
    loss, entropy = fused.apply(hidden, owned, target_ids, temperature=temperature, return_entropy=True)
    return -loss, entropy.to(loss.dtype)


class _Owned(torch.autograd.Function):
    """The weight, whose gradient goes to its owner in the dtype that it is kept in."""

    @staticmethod
    def forward(ctx, owner, weight):
        ctx.dtype = grad_dtype(owner)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad_weight):  # pyrefly: ignore[bad-override]
        return grad_weight.to(ctx.dtype), None
