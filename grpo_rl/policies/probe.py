"""Demands of a model's layers on attention and state, and its logits, by running a copy without weights."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_rl.policies.mixers import continues_from_state, mixers, reference_arithmetic

PROBE_NAME = "grpo_rl_probe"
"""The name under which the recording functions below are registered with transformers while a copy runs."""
LENGTH = 8
"""Tokens of the forward pass."""
HIDDEN = torch.tensor([-3.0, -0.5, 0.25, 2.0], dtype=torch.float64, device="cpu")
"""Hidden states of size 1, of four tokens."""


@dataclass(frozen=True)
class Band:
    """A causal mask; if ``window`` is not None, a token sees only the last ``window`` positions."""

    window: int | None


@dataclass(frozen=True)
class Chunks:
    """A causal mask within chunks: a token sees only positions from the last multiple of ``size`` on."""

    size: int


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function.

    Args:
        layer: name of the calling module.
        kind: name of its class.
        mask: a :class:`Band`, :class:`Chunks`, or whatever else the module passed.
        head_size: the smaller of the head sizes of keys and of values.
        keywords: arguments of the call other than tensors and mask.
    """

    layer: str
    kind: str
    mask: object
    head_size: int
    keywords: Mapping[str, object]

    @property
    def window(self) -> int | None:
        """The window in the keywords, the only one that an attention function without masks gets."""
        return self.keywords.get("sliding_window")  # pyrefly: ignore[bad-return]

    @property
    def any_window(self) -> int | None:
        """The window by which the module attends, in whatever way it is passed."""
        return self.mask.window if isinstance(self.mask, Band) else self.window


@dataclass(frozen=True)
class MixerCall:
    """One call of a mixer, a module that keeps its state in transformers' cache (`grpo_rl.policies.mixers`).

    Args:
        layer_keywords: keywords that its decoder layer was called with.
        hidden_states_only: it got hidden states and keywords, and returned one tensor.
        continues: it computes with the state of earlier tokens (`grpo_rl.policies.mixers.continues_from_state`), by the
            reference arithmetic of transformers; optional kernels are not tried.
    """

    module: str
    kind: str
    layer_keywords: Collection[str]
    hidden_states_only: bool
    continues: bool


class Calls(NamedTuple):
    """The calls of a forward pass, in order."""

    attention: list[AttentionCall]
    mixers: list[MixerCall]


def trunk(model: PreTrainedModel) -> torch.nn.Module:
    """The part of a model that makes its last hidden states; some classes do not name it as their base model."""
    if model.base_model is not model:
        return model.base_model
    parts = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return parts[0]


def trial_calls(model: PreTrainedModel, **keywords: object) -> Calls:
    """The calls in a forward pass of the model's class with its config; weights are not read.

    Args:
        keywords: passed to the forward pass in addition to ids and positions.

    Raises:
        ValueError: the class can't be run like this; names the error.

    >>> from transformers import MistralConfig, MistralForCausalLM
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=2)
    >>> model = MistralForCausalLM(MistralConfig(num_hidden_layers=1, sliding_window=5, **sizes))
    >>> [(call.layer, call.mask, call.window) for call in trial_calls(model).attention]
    [('model.layers.0.self_attn', Band(window=5), 5)]
    """
    config = copy.deepcopy(model.config)
    if model._can_set_experts_implementation():
        config._experts_implementation = "batched_mm"  # its shapes don't depend on the router's choices
    calls = Calls([], [])
    with torch.device("meta"):
        empty = type(model)(config).eval()
    for name, layer, mixer in list(mixers(empty)):
        _record_mixer(name, layer, mixer, calls.mixers)
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    for part in empty.modules():
        if isinstance(part, PreTrainedModel):  # it would look for padding among the ids, which have no data
            part.warn_if_padding_and_no_attention_mask = lambda input_ids, attention_mask: None
    names = {module: name for name, module in empty.named_modules()}
    with _recording(names, calls.attention), reference_arithmetic(empty), torch.no_grad():
        empty.set_attn_implementation(PROBE_NAME)
        try:
            trunk(empty)(input_ids=ids, position_ids=ids, use_cache=False, **keywords)
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


def _record_mixer(name: str, layer: torch.nn.Module, mixer: torch.nn.Module, calls: list[MixerCall]) -> None:
    of_layer: set[str] = set()
    asked = False

    def enter(layer: torch.nn.Module, args: tuple, keywords: dict[str, object]) -> None:
        of_layer.update(keywords)

    def leave(mixer: torch.nn.Module, args: tuple, keywords: dict[str, object], output: object) -> None:
        nonlocal asked
        if asked:
            return
        hidden, asked = (*args, keywords.get("hidden_states"))[0], True
        only = len(args) < 2 and isinstance(hidden, Tensor) and isinstance(output, Tensor)
        continues = only and continues_from_state(mixer, hidden)
        calls.append(MixerCall(name, type(mixer).__name__, of_layer, only, continues))

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    mixer.register_forward_hook(leave, with_kwargs=True)


def measured_logits(model: PreTrainedModel) -> Tensor:
    """The logits that the model's class makes of the :data:`HIDDEN` states with a head of one weight, 1; [4].

    Raises:
        ValueError: the class can't be run like this; names the error.
    """
    # With data, also if the caller builds models on the meta device.
    head = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64, device="cpu")
    ids = torch.zeros(1, len(HIDDEN), dtype=torch.long, device="cpu")
    torch.nn.init.ones_(head.weight)
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config)).eval()
    given = _Given(HIDDEN[None, :, None])
    for part in empty.modules():
        if part is not empty and isinstance(part, PreTrainedModel):  # some classes call a part of their base model
            part.forward = lambda *args, **keywords: given
    empty.set_output_embeddings(head)
    try:
        with torch.no_grad():
            return empty(input_ids=ids, use_cache=False).logits.flatten()
    except Exception as error:  # the model's own code may fail in any way
        raise ValueError(f"measuring its logits ends in {type(error).__name__}: {error}") from error


class _Given:
    """Last hidden states as a base model's output: every other attribute that a class reads is None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]


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
        size = min(query.shape[-1], value.shape[-1])
        calls.append(AttentionCall(names[module], type(module).__name__, attention_mask, size, rest))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    packed = masking_utils.find_packed_sequence_indices
    ALL_ATTENTION_FUNCTIONS.register(PROBE_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE_NAME, _mask)
    # It would look for several sequences in the positions, which have no data here.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    # Its mask takes the padding before each sequence from a tensor without data: there is none.
    masking_utils.chunked_causal_mask_function = lambda size, _: chunked_causal_mask_function(size, _no_padding())  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = packed
        masking_utils.chunked_causal_mask_function = chunked_causal_mask_function
        for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            del type(registry)._global_mapping[PROBE_NAME]


def _mask(*, mask_function: Callable, local_size: int | None = None, **rest: object) -> Band | Chunks | Callable:
    """Replaces the mask tensor of transformers by its rule, found by sampling the mask at the edges of windows."""
    edges = {n * (local_size or LENGTH) + step for n in range(4) for step in (-1, 0, 1)}
    # With data, also if the caller builds models on the meta device.
    places = torch.tensor(sorted(edge for edge in edges if edge >= 0), device="cpu")
    grid = places[0], places[0], places[:, None], places[None]
    shown = mask_function(*grid).expand(len(places), len(places))
    if torch.equal(shown, causal_mask_function(*grid)):
        return Band(None)
    if local_size and torch.equal(shown, sliding_window_causal_mask_function(local_size)(*grid)):
        return Band(local_size)
    if local_size and torch.equal(shown, chunked_causal_mask_function(local_size, _no_padding())(*grid)):
        return Chunks(local_size)
    return mask_function


def _no_padding() -> Tensor:
    return torch.zeros(1, dtype=torch.long, device="cpu")
