"""Counts the operators of one decoder layer, forward and backward: `python benchmarks/operators.py`.

A small step on a GPU takes as long as its launches do, and each operator is at least one. The count needs no GPU: one
group of random tokens is scored, with gradients added to those that are there, by models of one layer and of two; the
difference is a layer's. Views and empty tensors are left out. A compiled kernel counts as one, whatever it fuses.
Attention is left out: on a CPU it is many operators, on a GPU one kernel forward and three backward (FlexAttention).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from unittest import mock

import torch
import torch._inductor.config
from shapes import SHAPES
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_rl.policies import attention
from grpo_rl.policies.attention import compile_pointwise
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group
from grpo_rl.training.optimizer import PolicyOptimizer


def compile_around_attention(model: PreTrainedModel) -> None:
    """Makes each decoder layer compile as two graphs, before and after its attention."""
    compile_pointwise(model)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True)


VARIANTS: dict[str, Callable[[PreTrainedModel], None]] = {
    "nothing compiled": lambda _: None,
    "norms and MLPs compiled": compile_pointwise,
    "whole layers compiled": compile_around_attention,
}
"""Name -> what it does to a model. On a GPU the last has attention in the layer's graph too."""
KINDS = {
    "matrix products": ("mm", "addmm", "bmm"),
    "copies and casts": ("copy_", "cat", "stack", "index", "index_select"),
    "element-wise and reductions": (
        "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "exp", "exp_", "log", "log_", "pow", "rsqrt",
        "mean", "sum", "silu", "silu_backward", "sigmoid", "_softmax", "_softmax_backward_data", "logaddexp", "where",
        "fill_", "zero_", "amax", "maximum", "cos", "sin",
    ),
}  # fmt: skip
"""Kind -> PyTorch's names of its operators."""
NOT_COUNTED = frozenset({
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "empty",
    "empty_strided", "expand", "lift_fresh", "narrow", "permute", "promote_types", "resize_", "resolve_conj",
    "result_type", "select", "set_", "slice", "split", "squeeze", "t", "to", "transpose", "unbind", "unsqueeze",
    "view",
})  # fmt: skip
"""Operators that compute and move nothing."""


def kind(name: str) -> str | None:
    """The kind of an operator by its name in the profile; None for views, empty tensors and what only calls others.

    >>> kind("aten::mm"), kind("graph_3_cpp_fused_add_mul_0"), kind("aten::view")
    ('matrix products', 'compiled kernels', None)
    """
    if "_cpp_fused" in name:
        return "compiled kernels"
    return next((kind for kind, names in KINDS.items() if name.removeprefix("aten::") in names), None)


class NoAttention(torch.autograd.Function):
    """Passes queries on in attention's place, without an operator that counts."""

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(key, value)
        return query.detach().transpose(1, 2)

    @staticmethod
    def backward(ctx, grad):
        return grad.transpose(1, 2), *(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


@torch.compiler.disable
def no_attention(module, query, key, value, attention_mask, **keywords):
    return NoAttention.apply(query, key, value), None


def operators(layers: int, variant: str, tokens: int) -> Counter[str]:
    """Counts the operators of a forward and backward pass of a model of so many layers, by kind."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    shape = SHAPES["toy"] | {"num_hidden_layers": layers}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, tie_word_embeddings=True), dtype=torch.bfloat16)
    VARIANTS[variant](model)
    policy = TrainPolicy(model)
    PolicyOptimizer(model, name="sgd", lr=0.0)
    group = random_group(tokens // 2, [tokens // 8] * 4, vocab=shape["vocab_size"])

    def score() -> None:
        log_probs, _ = policy.score([group])
        log_probs.mean().backward()

    with mock.patch.object(attention, "attention", no_attention):
        score()  # compiles, and leaves a gradient
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            score()
    outermost = [event for event in profiled.events() or () if not part_of_another(event)]
    return Counter(found for event in outermost if (found := kind(event.name) or unknown(event)))


def unknown(event: FunctionEvent) -> str | None:
    """``others`` for an operator that calls no other, and of which it is not known that it computes nothing."""
    name = event.name.removeprefix("aten::")
    return "others" if name != event.name and not event.cpu_children and name not in NOT_COUNTED else None


def part_of_another(event: FunctionEvent) -> bool:
    """True if an operator that counts has called this one."""
    caller = event.cpu_parent
    return caller is not None and (kind(caller.name) is not None or part_of_another(caller))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=512, help="of the group, half of them its prompt")
    tokens = parser.parse_args().tokens
    torch._inductor.config.cpp.enable_kernel_profile = True  # or compiled kernels have no names in a profile
    kinds = [*KINDS, "others", "compiled kernels"]
    print("| one layer, forward and backward |", " | ".join(kinds), "| all |")
    print("| --- |", " | ".join(["---:"] * len(kinds)), "| ---: |")
    for variant in VARIANTS:
        two, one = operators(2, variant, tokens), operators(1, variant, tokens)
        row = [two[kind] - one[kind] for kind in kinds]
        print(f"| {variant} |", " | ".join(map(str, row)), f"| {sum(row)} |", flush=True)


if __name__ == "__main__":
    main()
