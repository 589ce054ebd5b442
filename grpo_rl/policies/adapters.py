"""Settings of adapters and of the quantised base under them, checked before torch and peft are loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ALL_LINEAR = "all-linear"
Quantization = Literal["nf4", "fp4", "int8"]
MAX_PUSHED_RANK = 512
"""The largest rank for which vLLM has adapter slots."""


@dataclass(frozen=True)
class LoRA:
    r"""Trains $W + \frac{\alpha}{r} BA$ instead of targeted weights $W$: A is [r, E], B is [F, r], W is frozen.

    Source: https://arxiv.org/abs/2106.09685, section 4.1. All linear layers, alpha 32 and about ten times the
    learning rate of full training are a good start at any rank, see https://thinkingmachines.ai/blog/lora/.

    Args:
        rank: r; 0 or None: no adapters, the whole model is trained.
        alpha: the product BA is scaled by ``alpha / rank``.
        dropout: probability of dropping an input of A in training. The engine drops nothing: with more than 0 the ratio
            of fresh weights is not 1 but scatters around it, as if weights were stale.
        targets: names of linear layers in the model, like ``q_proj``, or ``all-linear``: all but the head. A model with
            matrices that are no linear layers, like stacked experts, needs names: those matrices stay frozen.
        push: the engine gets ``merged`` weights, or the ``adapter`` next to its base.
        export: the run saves a ``merged`` model, or an ``adapter`` folder for peft.
        seed: of A's random initialisation; B starts at zero, so the policy starts equal to its base.

    Raises:
        ValueError: vLLM has no slots for the rank, or peft is not installed.
    """

    rank: int | None = 0
    alpha: float | int = 32
    dropout: float | int = 0.0
    targets: str | Sequence[str] = ALL_LINEAR
    push: str = "merged"
    export: str = "merged"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank and self.push == "adapter" and self.rank > MAX_PUSHED_RANK:
            raise ValueError(
                f"train_model.lora.rank is {self.rank}, and vLLM holds adapters of rank {MAX_PUSHED_RANK} at most; "
                "lower it or set train_model.lora.push=merged"
            )
        if self.rank:
            need("peft", "train_model.lora.rank", "lora")


def check_quantization(quantization: str | None, lora: LoRA, compiled: bool | None) -> None:
    """Checks the quantisation of the base model.

    Raises:
        ValueError: there are no adapters, MLPs are compiled, or bitsandbytes is not installed.
    """
    if quantization is None:
        return
    if not lora.rank:
        raise ValueError(
            f"train_model.quantization={quantization} without adapters: weights of so few bits can't be trained; set "
            "train_model.lora.rank, or quantization=null"
        )
    if quantization == "int8":
        import torch  # here alone, as settings are checked before torch is loaded

        if torch.cuda.is_available():
            raise ValueError(
                "train_model.quantization=int8 on a GPU: bitsandbytes rounds the layers' inputs to 8 bits there, the "
                "engine does not, and how far they then differ was never measured; use nf4"
            )
    if compiled:
        raise ValueError(
            f"train_model.compile=true with quantization={quantization}: bitsandbytes' products would break "
            "the graph of every compiled MLP; leave compile at null"
        )
    need("bitsandbytes", "train_model.quantization", "qlora")


def need(library: str, key: str, extra: str) -> None:
    """Raises ValueError where a library is not installed; names the extra that brings it."""
    if importlib.util.find_spec(library) is None:
        raise ValueError(
            f"{key} needs {library}, which is not installed; install the extra `{extra}`: "
            f"pip install 'grpo-rl[{extra}]'"
        )
