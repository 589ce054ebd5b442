"""Low-rank adapters (LoRA) by peft, trained over a frozen base model, which may be quantised to 4 or 8 bits.

Letters: r rank, E inputs and F outputs of a linear layer.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from grpo_rl.policies.before_loading import ALL_LINEAR, LoRA

_ADAPTER = "default"
"""peft's name of the adapter."""

# peft imports bitsandbytes if it is installed, also for a model in full precision. It warns of a kernel that it could
# not fetch, and in every call of every int8 layer that inputs are rounded.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def targeted(model: PreTrainedModel, targets: str | Sequence[str]) -> list[str]:
    """Full names of the linear layers that the targets select, in the model's order.

    Raises:
        ValueError: a target selects none, or ``all-linear`` would leave out other matrices; lists the choices.
    """
    head = model.get_output_embeddings()
    linear = [n for n, m in model.named_modules() if _is_linear(m) and m is not head]
    if targets == ALL_LINEAR:
        if others := _other_matrices(model):
            there = f"[{', '.join(last_names(linear))}]" if linear else "nothing, as it has no linear layer"
            raise ValueError(
                f"train_model.lora.targets={ALL_LINEAR}: {type(model).__name__} has matrices that are no linear layers "
                f"and would get no adapters: {', '.join(others)}. Adapters can be given to {there}: set "
                "train_model.lora.targets to that list, or part of it, to leave the others as they are; or train the "
                "whole model (train_model.lora.rank=0)"
            )
        return linear
    targets = [targets] if isinstance(targets, str) else targets
    chosen = {target: [n for n in linear if n == target or n.endswith(f".{target}")] for target in targets}
    if missing := [target for target, names in chosen.items() if not names]:
        # The head and the embedding too: the head's product is computed in tiles, straight from its weight.
        raise ValueError(
            f"train_model.lora.targets: {', '.join(missing)} is no linear layer inside {type(model).__name__}; choose "
            f"from {', '.join(last_names(linear))}, or {ALL_LINEAR}"
        )
    wanted = set().union(*chosen.values())
    return [name for name in linear if name in wanted]


def _other_matrices(model: PreTrainedModel) -> list[str]:
    """Matrices of the model outside linear layers and embeddings, by the ends of their names."""
    names = (
        ".".join([*name.split(".")[-2:], own])
        for name, module in model.base_model.named_modules()
        if not _is_linear(module) and not isinstance(module, torch.nn.Embedding) and not _is_depthwise(module)
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1
    )
    return list(dict.fromkeys(names))


def _is_linear(module: torch.nn.Module) -> bool:
    """True for a linear layer; routers of Llama 4 and Phi-MoE are such by class, and return more than a product."""
    return isinstance(module, torch.nn.Linear) and not type(module).__name__.endswith("Router")


def _is_depthwise(module: torch.nn.Module) -> bool:
    """True for a hybrid's short convolutions, a few numbers a channel: they stay as they are."""
    return isinstance(module, torch.nn.Conv1d) and module.groups == module.in_channels


def last_names(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def add_adapters(model: PreTrainedModel, lora: LoRA) -> PreTrainedModel:
    """The model with adapters in its own dtype, the only trainable parameters; at first they change no output.

    Raises:
        ValueError: a target selects no linear layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = targeted(model, lora.targets)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank or 0,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=[],
        base_model_name_or_path=model.name_or_path,
    )
    # A's initialisation neither depends on earlier random draws nor changes later ones.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        torch.default_generator.manual_seed(lora.seed)  # peft draws on the CPU, wherever the model is
        # By a state's names: of some mixtures peft takes `gate_proj` among target_modules for the stacked experts'.
        inject_adapter_in_model(config, model, _ADAPTER, state_dict=dict.fromkeys(f"{name}.lora_A" for name in names))
    config.target_modules = names
    model._hf_peft_config_loaded = True
    model.set_adapter(_ADAPTER)
    layers = adapted_layers(model)
    assert list(layers) == names, (list(layers), names)
    for layer in layers.values():
        for part in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
            part.to(model.dtype)  # over 8-bit weights peft makes them fp32
    return model


def check_readable(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Checks that peft, when it reads a folder with adapters of these layers, gives them to the same ones.

    Raises:
        ValueError: it would not; names the layers.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    lost = []
    for name in last_names(names):
        config = LoraConfig(target_modules=[name])
        with suppress(ValueError):  # of a part of what is stacked together
            convert_peft_config_for_transformers(config, model, None)
            if name in (config.target_modules or ()):
                continue
        lost.append(name)
    if lost:
        raise ValueError(
            f"train_model.lora.export=adapter: peft takes {', '.join(lost)} of {type(model).__name__} for its stacked "
            "experts, and would not read the adapters again as they were trained; leave these out of "
            "train_model.lora.targets, or set train_model.lora.export=merged"
        )


def has_adapters(model: torch.nn.Module) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def adapted_layers(model: torch.nn.Module) -> dict[str, Any]:
    """peft's layers by the checkpoint's name of the layer that they adapt; empty for a plain model."""
    if not has_adapters(model):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def factors(layer: Any) -> tuple[Float[Tensor, "r E"], Float[Tensor, "F r"]]:
    """A and ``scale * B`` in fp32 at least; ``scale * B @ A`` is the learnt change of the weight."""
    a, b = (part[_ADAPTER].weight.detach() for part in (layer.lora_A, layer.lora_B))
    dtype = torch.promote_types(a.dtype, torch.float32)
    return a.to(dtype), b.to(dtype) * layer.scaling[_ADAPTER]


def merged(layer: Any, weight: Float[Tensor, "F E"]) -> Float[Tensor, "F E"]:
    r"""The adapted layer's weight, in fp32 at least: $W + \frac{\alpha}{r} BA$, by DoRA scaled row by row.

    The lengths of rows are rounded as in the layer itself, so that fresh adapters change nothing.
    """
    a, b = factors(layer)
    summed = torch.addmm(weight.to(a.dtype), b, a)
    if _ADAPTER not in layer.lora_magnitude_vector:
        return summed
    dora, own = layer.lora_magnitude_vector[_ADAPTER], (layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER])
    change, dtype = dora.get_lora_weight(*own).detach(), dora.weight.dtype
    lengths = dora.get_weight_norm(weight.to(dtype), change, layer.scaling[_ADAPTER])
    return summed * (dora.weight.detach() / lengths).to(summed.dtype)[:, None]


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the model computes without its adapters."""
    try:
        model.disable_adapters()
        yield
    finally:
        model.enable_adapters()


def base_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters and saved buffers by name, without adapters, quantised ones dequantised.

    >>> [name for name, _ in base_weights(torch.nn.Linear(2, 2))]
    ['weight', 'bias']
    """
    adapted = has_adapters(model)
    for name, parameter in model.named_parameters():
        if adapted and ".lora_" in name:
            continue
        yield name.replace(".base_layer.", ".") if adapted else name, _dequantized(model, name, parameter)
    for name, buffer in saved_buffers(model).items():
        yield name.replace(".base_layer.", ".") if adapted else name, buffer


def saved_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Numbers of the checkpoint that are not trained, like the bias by which DeepSeek's routers balance experts.

    They keep their own dtype wherever they go: that bias would lose in bfloat16 what it is there for.
    """
    kept = ((name, module) for name, module in model.named_modules() if module._buffers)
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in kept
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set
    }


def _dequantized(model: torch.nn.Module, name: str, parameter: Tensor) -> Tensor:
    if type(parameter).__name__ not in ("Params4bit", "Int8Params"):
        return parameter.detach()
    from peft.utils.integrations import dequantize_bnb_weight

    # peft's dequantize_module_weight, which asks for less, also replaces the weight on a CPU: in 8 bits by one without
    # its scales once there was a forward.
    state = getattr(model.get_submodule(name.rpartition(".")[0]), "state", None)
    return dequantize_bnb_weight(parameter, state).detach()
