"""Checks of a model: whether it is scored exactly, its tokenizer, its context, its memory, and then its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedModel

from grpo_rl.checks.finding import Finding, caught, unfit
from grpo_rl.checks.memory import memory_findings
from grpo_rl.checks.scores import loaded_findings
from grpo_rl.checks.template import template_findings
from grpo_rl.planner.scenario import config_source
from grpo_rl.policies.generation import end_ids, generation_config
from grpo_rl.policies.hub import load_tokenizer, resolve_model
from grpo_rl.policies.loading import check_model, check_written, skeleton
from grpo_rl.policies.mixers import mixers
from grpo_rl.policies.supported import supported_calls
from grpo_rl.settings.derived import adapters
from grpo_rl.settings.schema import Settings

PREVENTING = ("config", "gate", "tokenizer", "written files", "chat template", "context", "memory")
"""Findings that have to be mended before the weights are worth loading."""


def model_findings(settings: Settings, quick: bool = False) -> Iterator[Finding]:
    """The findings on ``model.name``, in the order in which each makes the next worth looking for.

    Args:
        quick: read no weights.
    """
    source = source_of_name(settings.model.name, quick)
    yield Finding("OK", "model", source)
    prevented = False
    for finding in unloaded_findings(settings, source):
        yield finding
        prevented = prevented or (finding.kind == "FIX" and finding.about in PREVENTING)
    if not quick and not prevented:
        yield from caught("weights", lambda: loaded_findings(settings, Path(source)))


def source_of_name(name: str, quick: bool) -> str:
    """The model's folder; where no weights are read also its name on the hub."""
    return config_source(name) if quick else str(resolve_model(name))


def unloaded_findings(
    settings: Settings, source: str, plans: bool = True, needs_template: bool = False
) -> Iterator[Finding]:
    """The findings on a model whose weights are not read.

    Args:
        source: its folder, or its name on the hub.
        plans: whether memory is planned, too.
        needs_template: whether a model without a chat template is to be mended.
    """
    with unfit("config"):  # a tokenizer asks for the config, too
        model = skeleton(source)
        generation_config(source)
    gate = list(caught("gate", lambda: _gate(settings, source, model)))
    yield from gate
    yield from caught("tokenizer", lambda: _tokenizer(settings, source, model, needs_template))
    yield from _context(settings, model)
    if plans and gate[0].kind == "OK":  # the planner knows models that can be trained alone
        yield from caught("memory", lambda: memory_findings(settings, model))


def _gate(settings: Settings, source: str, model: PreTrainedModel) -> Iterator[Finding]:
    check_model(source, adapters(settings), settings.policy.router_replay)
    yield Finding("OK", "gate", layer_summary(model))


def _tokenizer(settings: Settings, source: str, model: PreTrainedModel, needs_template: bool) -> Iterator[Finding]:
    with unfit("tokenizer", f"; {source} needs the files that its tokenizer's save_pretrained() writes"):
        tokenizer = load_tokenizer(source, settings.model.chat_template)
    with unfit("written files"):
        ignored = check_written(source, tokenizer)
    if ignored:
        text = f"transformers ignores {', '.join(ignored)} in generation_config.json; a trained model will have none"
        yield Finding("note", "written files", text)
    embedded = model.get_input_embeddings().weight.shape[0]
    with unfit("chat template"):
        yield from template_findings(tokenizer, end_ids(source), embedded, needs_template)


def layer_summary(model: PreTrainedModel) -> str:
    """The layers of a model that the gate admits, by how they mix tokens.

    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=2)
    >>> windows = dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    >>> layer_summary(Qwen2ForCausalLM(Qwen2Config(**sizes, **windows)))
    'scored exactly: 1 x full attention, 2 x attention in windows of 5 tokens'
    """
    kinds: Counter[str] = Counter()
    for call in supported_calls(model):
        kind = f"attention in windows of {call.any_window} tokens" if call.any_window else "full attention"
        kind += " with sinks" * (call.keywords.get("s_aux") is not None)
        kinds[kind + " with soft caps" * (call.keywords.get("softcap") is not None)] += 1
    kinds.update(type(mixer).__name__ for _, _, mixer in mixers(model))
    experts = "; mixture of experts" if model._can_set_experts_implementation() else ""
    return f"scored exactly: {', '.join(f'{count} x {kind}' for kind, count in kinds.items())}{experts}"


def _context(settings: Settings, model: PreTrainedModel) -> Iterator[Finding]:
    positions = getattr(model.config, "max_position_embeddings", None)
    length = settings.inference_model.max_model_len
    if isinstance(positions, int) and length > positions:
        yield Finding(
            "FIX",
            "context",
            f"prompt and response may have {length:,} tokens, and the model was made for {positions:,}; set "
            f"inference_model.max_model_len={positions}",
        )
