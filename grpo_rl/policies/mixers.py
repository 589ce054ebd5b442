"""Layers that carry a state from token to token: a node takes over its parent's state, with its gradient.

Linear attention, state-space layers and short convolutions of transformers read and write their state through a cache.
Here each node of a micro-batch runs once, with a cache that keeps gradients, and its children run on from it, side by
side: they are independent of one another. The arithmetic stays transformers' own, and that of the kernels it uses.

Letters: T tokens of the micro-batch, E hidden size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_rl.policies.packing import LAYOUT, Layout, Node, bucket

CACHES = ("cache_params", "past_key_values")
"""Names under which mixers of transformers take their cache."""
SHORTEST = 2
"""Tokens of a continuation, at least: for a single one, some mixers step their state in place, without a gradient."""


class State:
    """A mixer's state after some tokens, with the part of transformers' cache that mixers use; gradients flow through.

    Args:
        conv: the last inputs of each convolution, by its number in the mixer.
        recurrent: recurrent states, likewise.
    """

    record_past = True  # otherwise mixers step in place

    def __init__(self, conv: dict[int, Tensor] | None = None, recurrent: dict[int, Tensor] | None = None) -> None:
        self.conv_states = conv or {}
        self.recurrent_states = recurrent or {}

    @property
    def layers(self) -> State:
        """The states of all layers, as a cache has them; a mixer reads its own only."""
        return self

    def __getitem__(self, layer_idx: int) -> State:
        return self

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        """True after the first tokens."""
        return bool(self.conv_states)

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int | None = None, conv_kernel_size: int | None = None, state_idx: int = 0
    ) -> Tensor:
        """The inputs of a convolution, [sequences, channels, tokens], after those of earlier tokens."""
        width = conv_kernel_size or inputs.shape[-1]
        if state_idx in self.conv_states:
            inputs = torch.cat([self.conv_states[state_idx], inputs], -1)
        elif inputs.shape[-1] < width:
            inputs = pad(inputs, (width - inputs.shape[-1], 0))
        self.conv_states[state_idx] = inputs[..., -width:]
        return inputs

    def update_recurrent_state(self, state: Tensor, layer_idx: int | None = None, state_idx: int = 0) -> Tensor:
        """Keeps the recurrent state after the last token."""
        self.recurrent_states[state_idx] = state
        return state

    def copies(self, count: int) -> State:
        """The state of one sequence as that of ``count``, in memory of their own: kernels may step in place."""
        return State(*({i: x.repeat(count, *[1] * (x.ndim - 1)) for i, x in of.items()} for of in self.parts))

    @property
    def parts(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Both kinds of states."""
        return self.conv_states, self.recurrent_states


class ToldLayout:
    """Mixed into the class of a module that has to know the layout of the micro-batch at hand."""

    layout: weakref.ref[Layout] | None = None
    """The layout that the module's layer was called with; the call keeps it alive."""


def tell_layout(layer: torch.nn.Module) -> None:
    """Has a layer hand the layout of each call to its :class:`ToldLayout` modules, again when it is recomputed."""
    if _tell not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(_tell, with_kwargs=True)


def _tell(layer: torch.nn.Module, args: tuple, keywords: dict[str, Any]) -> None:
    for module in layer.modules():
        if isinstance(module, ToldLayout):
            module.layout = None if keywords.get(LAYOUT) is None else weakref.ref(keywords[LAYOUT])


class SharesPrompts(ToldLayout):
    """Mixed into the class of a mixer: a micro-batch with shared prompts is run by its layout."""

    def forward(self, hidden_states: Tensor, *args: Any, **keywords: Any) -> Tensor:
        """The mixer's output, [1, T, E]; without a layout, that of plain sequences."""
        plain = super().forward  # pyrefly: ignore[missing-attribute]
        if self.layout is None:
            return plain(hidden_states, *args, **keywords)
        layout = self.layout()
        assert layout is not None
        cache = cache_name(type(self))

        def run(hidden: Tensor, state: State) -> Tensor:
            return plain(hidden, *args, **keywords | {cache: state})

        return _run_tree(run, hidden_states[0], layout.nodes)[None]


def _run_tree(run: Callable[[Tensor, State], Tensor], hidden: Tensor, nodes: Sequence[Node]) -> Tensor:
    """The output of all nodes, each of which goes on from its parent's state.

    Siblings without children, of about the same length, run together: one long response must not pad all the others.
    """
    states: dict[int, State] = {}
    outputs: dict[int, Tensor] = {}
    batches: dict[tuple[int, int], list[Node]] = {}
    for number, node in enumerate(nodes):
        if node.parent < 0 or node.until > node.end:
            states[number] = states[node.parent].copies(1) if node.parent >= 0 else State()
            outputs[node.start] = run(hidden[None, node.start : node.end], states[number])[0]
        else:
            batches.setdefault((node.parent, bucket(node.end - node.start)), []).append(node)
    for (parent, _), siblings in batches.items():
        rows = pad_sequence([hidden[node.start : node.end] for node in siblings], batch_first=True)
        rows = pad(rows, (0, 0, 0, max(0, SHORTEST - rows.shape[1])))
        mixed = run(rows, states[parent].copies(len(siblings)))
        outputs |= {node.start: row[: node.end - node.start] for row, node in zip(mixed, siblings, strict=True)}
    return torch.cat([outputs[node.start] for node in nodes])


def cache_name(mixer_class: type[torch.nn.Module]) -> str:
    """The name under which a mixer takes its cache; empty for a module that is none."""
    for plain in mixer_class.__mro__:
        if not issubclass(plain, ToldLayout):
            names = inspect.signature(plain.forward).parameters
            return next((name for name in CACHES if name in names), "")
    return ""


def mixers(model: PreTrainedModel) -> Iterator[tuple[str, GradientCheckpointingLayer, torch.nn.Module]]:
    """The model's mixers that keep their state in a cache: name, layer, module."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
    for layer_name, layer in layers.items():
        for name, module in layer.named_modules(prefix=layer_name):
            convolves = any(isinstance(child, torch.nn.Conv1d) for child in module.children())
            if convolves and hasattr(module, "layer_idx") and cache_name(type(module)):
                yield name, layer, module


@contextlib.contextmanager
def reference_arithmetic(model: PreTrainedModel) -> Iterator[None]:
    """Lets the model's mixers compute by PyTorch's operators: optional kernels take no tensors without data."""
    with contextlib.ExitStack() as stack:
        for file in {sys.modules[type(mixer).__module__] for *_, mixer in mixers(model)}:
            for name, wrapped in list(vars(file).items()):
                if inspect.isfunction(wrapped) and inspect.isfunction(plain := getattr(wrapped, "__wrapped__", None)):
                    stack.enter_context(mock.patch.object(file, name, _known_arguments(plain)))
        yield


def _known_arguments(function: Callable) -> Callable:
    """Calls the function with those keywords that it has, as transformers calls its kernels."""
    known = inspect.signature(function).parameters

    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **{name: value for name, value in keywords.items() if name in known})

    return call


def continues_from_state(mixer: torch.nn.Module, hidden: Tensor) -> bool:
    """True if a mixer that is given several tokens and an earlier state computes with all parts of that state.

    Some mixers of transformers do so for a single token only. The autograd graph shows it, without weights too.

    Args:
        hidden: hidden states of at least two tokens, [1, tokens, E].
    """
    cache = cache_name(type(mixer))
    with torch.enable_grad():
        mixer(hidden, **{cache: (state := State())})
        leaves = [{i: x.detach().requires_grad_() for i, x in of.items()} for of in state.parts]
        inputs = [x for of in leaves for x in of.values()]
        output = mixer(hidden, **{cache: State(*leaves)})
        grads = torch.autograd.grad(output.sum(), inputs, allow_unused=True) if inputs else [None]
        return all(grad is not None for grad in grads)


def share_prompts(model: PreTrainedModel) -> None:
    """Switches the model's mixers to micro-batches with shared prompts, if their layers are called with a layout."""
    for _, layer, mixer in list(mixers(model)):
        if isinstance(mixer, SharesPrompts):
            continue
        assert "forward" not in vars(mixer), "a wrapped forward would be called instead of ours"
        tell_layout(layer)
        mixer.__class__ = with_mixin(SharesPrompts, type(mixer))


@functools.cache
def with_mixin(mixin: type, module_class: type[torch.nn.Module]) -> Any:
    """The class with a mixin before it, under its own name."""
    return type(module_class.__name__, (mixin, module_class), {})
