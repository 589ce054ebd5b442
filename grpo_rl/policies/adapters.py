"""Settings of adapters and of the quantised base under them, checked before torch and peft are loaded."""

from __future__ import annotations

import importlib.util
from typing import Literal

from grpo_rl.section import Section, setting

ALL_LINEAR = "all-linear"
Quantization = Literal["nf4", "fp4", "int8"]


class LoRA(Section):
    r"""Low-rank adapters are trained instead of the model (needs the extra `lora`).

    They train $W + \frac{\alpha}{r} BA$ instead of targeted weights $W$: A is [r, E], B is [F, r], W is frozen.

    Source: https://arxiv.org/abs/2106.09685, section 4.1. All linear layers, alpha 32 and about ten times the
    learning rate of full training are a good start at any rank, see https://thinkingmachines.ai/blog/lora/.

    B starts at zero, so the policy starts equal to its base.
    """

    rank: int | None = setting(0, "adapter rank; 0: none. With adapters use about ten times the learning rate", ge=0)
    alpha: int | float = setting(32, "the adapters' product is scaled by alpha / rank", gt=0)
    dropout: float = setting(
        0.0,
        "dropout of the adapters' inputs, in training; above 0 the ratios of fresh weights scatter around 1",
        ge=0,
        lt=1,
    )
    targets: str | tuple[str, ...] = setting(
        ALL_LINEAR,
        "all linear layers but the head, or a list of names: [q_proj, v_proj]. A mixture of experts needs a list: its "
        "experts get no adapters and stay as they are",
    )
    push: Literal["merged", "adapter"] = setting(
        "merged", "what the engine gets: merged weights, or the adapter next to its own weights (vLLM only)"
    )
    export: Literal["merged", "adapter"] = setting(
        "merged", "what the run writes at its end: a merged model, or an adapter folder for peft"
    )
    seed: int = 0
    """The seed of A's random initialisation."""


def check_adapters(lora: LoRA) -> None:
    """Raises ValueError where there are adapters, and peft is not installed."""
    if lora.rank:
        need("peft", "train_model.lora.rank", "lora")


def check_quantization(quantization: str | None, lora: LoRA, compiled: bool | None) -> None:
    """Raises ValueError for a quantised base without adapters, with compiled MLPs, or without bitsandbytes."""
    if quantization is None:
        return
    if not lora.rank:
        raise ValueError(f"train_model.quantization={quantization} needs adapters to train; set train_model.lora.rank")
    if quantization == "int8":
        import torch  # here alone, as settings are checked before torch is loaded

        if torch.cuda.is_available():
            raise ValueError(
                "train_model.quantization=int8 on a GPU: bitsandbytes rounds the layers' inputs to 8 bits there, the "
                "engine does not, and how far they then differ was never measured; use nf4"
            )
    if compiled:
        raise ValueError(f"train_model.compile=true can't go with quantization={quantization}; leave compile at null")
    need("bitsandbytes", "train_model.quantization", "qlora")


def need(library: str, key: str, extra: str) -> None:
    """Raises ValueError where a library is not installed; names the extra that brings it."""
    if importlib.util.find_spec(library) is None:
        raise ValueError(
            f"{key} needs {library}, which is not installed; install the extra `{extra}`: "
            f"pip install 'grpo-rl[{extra}]'"
        )
