"""The attention calls of a model's layers, recorded by running a copy of the model without weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PROBE_NAME = "grpo_rl_probe"
"""The name under which the recording functions below are registered with transformers while a copy runs."""
LENGTH = 8
"""Tokens of the forward pass."""


@dataclass(frozen=True)
class Band:
    """A causal mask; if ``window`` is not None, a token sees only the last ``window`` positions."""

    window: int | None


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function.

    Args:
        layer: name of the calling module.
        kind: name of its class.
        mask: a :class:`Band`, or whatever else the module passed.
        key_size: head size of queries and keys.
        value_size: head size of values.
        keywords: arguments of the call beside tensors and mask.
    """

    layer: str
    kind: str
    mask: object
    key_size: int
    value_size: int
    keywords: Mapping[str, object]

    @property
    def window(self) -> int | None:
        """The window in the keywords, the only one that an attention function without masks knows."""
        return self.keywords.get("sliding_window")  # pyright: ignore[reportReturnType]

    @property
    def any_window(self) -> int | None:
        """The window by which the module attends, in whatever way it is passed."""
        return self.mask.window if isinstance(self.mask, Band) else self.window


def attention_calls(model: PreTrainedModel, **keywords: object) -> list[AttentionCall]:
    """The attention calls in a forward pass of the model's class with its config, in order; weights are not read.

    Args:
        keywords: passed to the forward pass beside ids and positions.

    Raises:
        ValueError: the class can't be run like this; names the error.

    >>> from transformers import MistralConfig, MistralForCausalLM
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MistralForCausalLM(MistralConfig(num_hidden_layers=1, sliding_window=5, **sizes))
    >>> [(call.layer, call.mask, call.window) for call in attention_calls(model)]
    [('model.layers.0.self_attn', Band(window=5), 5)]
    """
    config = copy.deepcopy(model.config)
    if model._can_set_experts_implementation():
        config._experts_implementation = "batched_mm"  # its shapes don't depend on the router's choices
    calls: list[AttentionCall] = []
    with torch.device("meta"):
        empty = type(model)(config).eval()
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    for part in empty.modules():
        if isinstance(part, PreTrainedModel):  # it would look for padding among the ids, which have no data
            part.warn_if_padding_and_no_attention_mask = lambda input_ids, attention_mask: None
    names = {module: name for name, module in empty.named_modules()}
    with _recording(names, calls), torch.no_grad():
        empty.set_attn_implementation(PROBE_NAME)
        try:
            empty.base_model(input_ids=ids, position_ids=ids, use_cache=False, **keywords)
        except Exception as error:  # the model's own code may fail in any way
            if Band.__name__ in str(error):  # Python and torch name the type of an operand that is no tensor
                raise ValueError(
                    "it computes with its attention mask, which shared-prefix attention never sees"
                ) from error
            raise ValueError(
                f"a trial forward without weights, in transformers {transformers.__version__}, ends in "
                f"{type(error).__name__}: {error}"
            ) from error
    return calls


@contextmanager
def _recording(names: Mapping[torch.nn.Module, str], calls: list[AttentionCall]) -> Iterator[None]:
    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object = None,
        **rest: object,
    ) -> tuple[Tensor, None]:
        sizes = query.shape[-1], value.shape[-1]
        calls.append(AttentionCall(names[module], type(module).__name__, attention_mask, *sizes, rest))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    packed = masking_utils.find_packed_sequence_indices
    ALL_ATTENTION_FUNCTIONS.register(PROBE_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE_NAME, _mask)
    # It would look for several sequences in the positions, which have no data here.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = packed
        for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            del type(registry)._global_mapping[PROBE_NAME]


def _mask(*, mask_function: Callable, local_size: int | None = None, **rest: object) -> Band | Callable:
    """Replaces the mask tensor of transformers by a :class:`Band`, found by sampling the mask at the bands' edges."""
    edges = {n * (local_size or LENGTH) + step for n in range(4) for step in (-1, 0, 1)}
    # With data, also if the caller builds models on the meta device.
    places = torch.tensor(sorted(edge for edge in edges if edge >= 0), device="cpu")
    grid = places[0], places[0], places[:, None], places[None]
    shown = mask_function(*grid).expand(len(places), len(places))
    if torch.equal(shown, causal_mask_function(*grid)):
        return Band(None)
    if local_size and torch.equal(shown, sliding_window_causal_mask_function(local_size)(*grid)):
        return Band(local_size)
    return mask_function
