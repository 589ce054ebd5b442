"""vLLM's layers that carry a state, on a CPU and for the proof of delivery: what they hold of a weight. For vLLM 0.32.

Next to the checkpoint's tensors they compute with forms of their own: Mamba with the negative exponentials of the
logarithms ``A_log``, and convolutions with copies, packed where the CPU has instructions for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

DECAY = ("A_log", "A")
"""The checkpoint's name of Mamba's logarithms, and vLLM's of what it makes of them."""


@functools.cache
def record_decays() -> None:
    """Has each Mamba layer that vLLM builds from now on in this process keep the logarithms that it is given.

    They are also counted once: vLLM 0.32 copies them twice, takes a reloaded layer for complete before its last weight
    has come, and drops that one.
    """

    def composed(loader: Callable[..., None], fn: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        def load_and_keep(param: Tensor, loaded_weight: Tensor) -> None:  # vLLM passes them by name
            loader(param, fn(loaded_weight))
            load_and_keep.came = loaded_weight.detach().clone()  # pyrefly: ignore[missing-attribute]

        return load_and_keep

    mamba_mixer2.composed_weight_loader = composed


def refresh_convolutions(model: torch.nn.Module) -> None:
    """Copies the convolutions' new weights to where Mamba computes with them; to be called after weights were reloaded.

    On a CPU that has bfloat16 instructions vLLM packs the weight that it loads, and Mamba goes on with the one that it
    had at the start.
    """
    for mixer in model.modules():
        if isinstance(mixer, MambaMixer2) and hasattr(mixer.conv1d, "_cpu_unpacked_conv_weight"):
            mixer.conv_weights.copy_(mixer.conv1d._cpu_unpacked_conv_weight)


def own_form(model: torch.nn.Module, path: str, kind: str, dtype: torch.dtype) -> Tensor | None:
    """The checkpoint's tensor, as the form of it shows that the layer computes with; None where that is the tensor.

    Raises:
        LookupError: what it was made from was not recorded.
    """
    try:
        module: Any = model.get_submodule(path)
        parent: Any = model.get_submodule(path.rpartition(".")[0])
    except AttributeError:  # part of a fused layer, or not there
        return None
    if isinstance(module, MambaMixer2) and kind in DECAY:
        return _decay(module).to(dtype)
    if kind != "weight":
        return None
    if isinstance(parent, MambaMixer2) and module is parent.conv1d:
        return parent.conv_weights[:, None].to(dtype)
    unpacked = getattr(module, "_cpu_unpacked_conv_weight", None)
    if unpacked is None:
        return None
    is_packed_from_it = torch.equal(_custom_ops.causal_conv1d_weight_pack(unpacked), module.weight)
    return (unpacked if is_packed_from_it else module.weight.view(unpacked.shape))[:, None].to(dtype)


def _decay(mixer: Any) -> Tensor:
    """This worker's logarithms: those that came, if they are what the layer's decay rates were made from."""
    came = getattr(getattr(mixer.A, "weight_loader", None), "came", None)
    if came is None:
        raise LookupError(f"{type(mixer).__name__} has kept no {DECAY[0]}: its decay rates can't be traced back")
    mine = came.to(mixer.A.device).narrow(0, get_tensor_model_parallel_rank() * len(mixer.A), len(mixer.A))
    return mine if torch.equal(-torch.exp(mine.float()), mixer.A) else torch.log(-mixer.A)
