"""Which models are scored rightly with shared prompts; any other is refused by its name before it computes anything."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedModel

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Those whose frequencies are fixed. Others follow the longest sequence at hand: a neighbour's length would count."""
LOGIT_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""Names under which models multiply or divide their logits."""


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Nothing, for a model whose scores with shared prompts are those of separate sequences.

    Raises:
        ValueError: the first reason why they would not be.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    >>> refuse_unsupported(LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope)))
    Traceback (most recent call last):
    ValueError: LlamaForCausalLM cannot be trained here: rope_type dynamic makes positions depend on other sequences ...
    """
    for reason in _reasons(model):
        raise ValueError(f"{type(model).__name__} cannot be trained here: {reason}")


def _reasons(model: PreTrainedModel) -> Iterator[str]:
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        yield "it has an encoder; take a decoder-only model"
    if other := set(getattr(config, "layer_types", None) or LAYER_TYPES) - LAYER_TYPES:
        yield f"it has layers of type {', '.join(sorted(other))}; supported are {', '.join(sorted(LAYER_TYPES))}"
    if model._is_stateful:
        yield "it has a recurrent state, which an answer cannot take over from its prompt"
    if looking_ahead := {type(m).__name__ for m in model.modules() if not getattr(m, "is_causal", True)}:
        yield f"its {', '.join(sorted(looking_ahead))} is not causal"
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    if other := {p.get("rope_type", "default") for p in by_layer_type} - ROPE_TYPES:
        yield (
            f"rope_type {', '.join(sorted(other))} makes positions depend on other sequences of the batch; "
            f"supported are {', '.join(sorted(ROPE_TYPES))}"
        )
    if model.training and getattr(config, "attention_dropout", None):
        yield f"attention_dropout is {config.attention_dropout}; set it to 0"
    for name in LOGIT_FACTORS:
        if getattr(config, name, None) not in (None, 1):
            yield f"it scales its logits ({name} is {getattr(config, name)})"
    head = model.get_output_embeddings()
    known = (model.base_model, head)
    others = ((name, child) for name, child in model.named_children() if not any(child is one for one in known))
    if between := [name for name, child in others if next(child.parameters(), None) is not None]:
        yield f"its {', '.join(between)} would be left out; logits must be the head's product with the hidden states"
