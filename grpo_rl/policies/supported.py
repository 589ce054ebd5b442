"""Refuses models that shared prompts would score incorrectly, before their weights are read."""

from collections.abc import Iterator, Mapping

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_rl.policies.head import logit_scaling
from grpo_rl.policies.mixers import cache_name, mixers
from grpo_rl.policies.packing import LAYOUT
from grpo_rl.policies.probe import AttentionCall, Band, Calls, Chunks, trial_calls, trunk

ATTENDING = frozenset({"full_attention", "sliding_attention", "chunked_attention", "hybrid"})
"""Types of layers with attention, as configs name them."""
WITH_STATE = frozenset({"linear_attention", "conv", "hybrid", "mamba"})
"""Types of layers that carry a state from token to token; some attend as well."""
BY_TOKEN = frozenset({"mlp", "moe"})
"""Types of layers that compute each token by itself."""
LAYER_TYPES = ATTENDING | WITH_STATE | BY_TOKEN
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Types with fixed frequencies; those of others depend on the longest sequence in the batch."""
UNDERSTOOD = frozenset({LAYOUT, "scaling", "dropout", "sliding_window", "softcap", "s_aux"})
"""Keywords that shared-prefix attention reads."""
IGNORED = frozenset({"position_ids", "use_cache"})
"""Keywords that it need not read; any other may matter."""


def masks_to_apply(model: PreTrainedModel) -> dict[str, Band | Chunks]:
    """Windows and chunks, by name of attention module, that transformers passes only as part of the mask.

    >>> from transformers import PhimoeConfig, PhimoeForCausalLM
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> config = PhimoeConfig(**sizes, num_key_value_heads=2, num_local_experts=2, sliding_window=5)
    >>> masks_to_apply(PhimoeForCausalLM(config))
    {'model.layers.0.self_attn': Band(window=5)}
    """
    found = {}
    for call in supported_calls(model):
        mask = call.mask
        if isinstance(mask, Chunks) or (isinstance(mask, Band) and mask.window and not call.window):
            found[call.layer] = mask
    return found


def supported_calls(model: PreTrainedModel) -> list[AttentionCall]:
    """Checks that scores with shared prompts are those of separate sequences, and returns the layers' attention calls.

    Config and modules are read, and a copy without weights is run: ``model`` itself may have no weights.

    Raises:
        ValueError: the scores are others; gives the first reason.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    >>> supported_calls(LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope)))
    Traceback (most recent call last):
    ValueError: LlamaForCausalLM cannot be trained here: rope_type dynamic makes positions depend on other sequences ...
    """
    for reason in _reasons(model):
        raise _refusal(model, reason)
    if not model._can_set_attn_implementation():
        raise _refusal(model, "transformers can't exchange its attention")
    try:
        calls = trial_calls(model, **{LAYOUT: None})
    except ValueError as error:
        raise _refusal(model, str(error)) from error
    for reason in _reasons_in_calls(model, calls):
        raise _refusal(model, reason)
    return calls.attention


def _refusal(model: PreTrainedModel, reason: str) -> ValueError:
    return ValueError(f"{type(model).__name__} cannot be trained here: {reason}")


def not_understood(keywords: Mapping[str, object]) -> list[str]:
    """Keywords of an attention call that shared-prefix attention does not support.

    >>> not_understood({"scaling": 0.5, "use_cache": False, "indexer": 1.0, "head_mask": None})
    ['indexer']
    """
    rest = keywords.keys() - UNDERSTOOD - IGNORED
    return sorted(name for name in rest if keywords[name] is not None and keywords[name] is not False)


def _reasons_in_calls(model: PreTrainedModel, calls: Calls) -> Iterator[str]:
    if not calls.attention and not calls.mixers:
        yield "none of its layers calls transformers' attention function"
    for call in calls.mixers:
        if LAYOUT not in call.layer_keywords:
            yield f"the layer of its {call.kind} gets no keyword arguments, which would say where responses lie"
        if not call.hidden_states_only:
            yield f"its {call.kind} takes or returns more than hidden states"
        elif not call.continues:
            yield f"its {call.kind} does not continue from its prompt's state when it is given several tokens at once"
    for call in calls.attention:
        if LAYOUT not in call.keywords:
            yield f"its {call.kind} gets no keyword arguments, which would say where prompts and responses lie"
        if unknown := not_understood(call.keywords):
            yield f"its {call.kind} uses {', '.join(unknown)}, which shared-prefix attention does not support"
        if not isinstance(call.mask, Band | Chunks):
            yield f"its {call.kind} masks its attention with more than a causal mask, a window or chunks"
        elif isinstance(call.mask, Chunks):
            if call.window:
                yield f"its {call.kind} has a window of {call.window} positions under a mask of chunks"
        elif call.window != call.mask.window and call.window:
            yield (
                f"its {call.kind} has a window of {call.window} positions under a mask of another "
                f"({call.mask.window or 'none'})"
            )
    known = {call.layer for call in calls.attention} | {call.module for call in calls.mixers}
    for name, module in model.named_modules():
        mixes = hasattr(module, "layer_idx") and not isinstance(module, GradientCheckpointingLayer)
        if mixes and name not in known and cache_name(type(module)):
            yield f"its {type(module).__name__} keeps a state that is neither attention's nor a mixer's"
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    for name, layers in model.named_modules():
        if not isinstance(layers, torch.nn.ModuleList):
            continue
        silent = [i for i in range(len(layers)) if not any(c.startswith(f"{name}.{i}.") for c in known)]
        if len(silent) == len(layers):
            continue  # no list of decoder layers
        for i in silent:
            if len(types) != len(layers) or types[i] not in BY_TOKEN:
                yield f"its {name}.{i} neither calls the attention function nor keeps a state in transformers' cache"


def _reasons(model: PreTrainedModel) -> Iterator[str]:
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        yield "it has an encoder; take a decoder-only model"
    if config is not model.config:
        yield f"it is several models in one ({', '.join(model.config.sub_configs)}); take one of text alone"
    if other := set(getattr(config, "layer_types", None) or LAYER_TYPES) - LAYER_TYPES:
        yield f"it has layers of type {', '.join(sorted(other))}; supported are {', '.join(sorted(LAYER_TYPES))}"
    with_state = {module for _, _, module in mixers(model)}
    if model._is_stateful and not with_state:
        yield "it has a recurrent state, which a response cannot take over from its prompt"
    if looking_ahead := {type(m).__name__ for m in model.modules() if not getattr(m, "is_causal", True)}:
        yield f"its {', '.join(sorted(looking_ahead))} is not causal"
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    if other := {p.get("rope_type", "default") for p in by_layer_type} - ROPE_TYPES:
        yield (
            f"rope_type {', '.join(sorted(other))} makes positions depend on other sequences of the batch; "
            f"supported are {', '.join(sorted(ROPE_TYPES))}"
        )
    known = {child for mixer in with_state for child in mixer.children()}
    convolutions = {m for m in trunk(model).modules() if isinstance(m, torch.nn.Conv1d)}
    if mixing := {type(m).__name__ for m in convolutions - known}:
        yield f"its {', '.join(sorted(mixing))} mixes neighbouring tokens, of whatever sequence they are"
    if getattr(config, "output_router_logits", False):
        yield (
            "output_router_logits adds the routers' auxiliary loss, which is no part of the loss here; set it to "
            "false in the model's config.json to train without it"
        )
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        yield f"its head is a {type(head).__name__}; logits must be the product of one matrix with the hidden states"
    used = (trunk(model), head)
    others = ((name, child) for name, child in model.named_children() if not any(child is one for one in used))
    if between := [name for name, child in others if next(child.parameters(), None) is not None]:
        yield f"its {', '.join(between)} would be left out; logits must be the head's product with the hidden states"
    try:
        logit_scaling(model)
    except ValueError as error:
        yield str(error)
