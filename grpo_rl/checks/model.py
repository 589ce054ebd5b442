"""Checks of a model without its weights: whether it is scored exactly, its tokenizer, context and size on the disk."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from transformers import PreTrainedModel

from grpo_rl.assembly.run import needed_room
from grpo_rl.checks.check import Case, Finding, caught, unfit
from grpo_rl.checks.folder import folder_of, place_of
from grpo_rl.checks.template import template_findings
from grpo_rl.planner.scenario import config_source
from grpo_rl.policies.generation import end_ids, generation_config
from grpo_rl.policies.hub import load_tokenizer, resolve_model, weight_files
from grpo_rl.policies.loading import check_model, check_written, skeleton
from grpo_rl.policies.mixers import mixers
from grpo_rl.policies.supported import supported_calls
from grpo_rl.settings.derived import adapters, total_steps


def model(case: Case) -> Iterator[Finding]:
    """The findings on the run's model without its weights, except memory."""
    source = source_of(case)
    yield Finding("OK", "model", source)
    with unfit("config"):  # a tokenizer asks for the config, too
        model = skeleton(source)
        generation_config(source)
    yield from caught("gate", lambda: _gate(case, source, model))
    yield from caught("tokenizer", lambda: _tokenizer(case, source, model))
    positions, length = getattr(model.config, "max_position_embeddings", None), case.read.inference_model.max_model_len
    if isinstance(positions, int) and length > positions:
        text = f"prompt and response may have {length:,} tokens, and the model was made for {positions:,}; set "
        yield Finding("FIX", "context", f"{text}inference_model.max_model_len={positions}")


def disk(case: Case) -> Iterator[Finding]:
    """The free space against what the run will write."""
    settings, source, folder = case.read, Path(source_of(case)), folder_of(case)
    files = weight_files(source) if source.is_dir() else []
    size = sum(path.stat().st_size for path in files) or 2 * sum(p.numel() for p in skeleton(str(source)).parameters())
    room = needed_room(settings, size)
    if not settings.train.keep_checkpoints and settings.train.checkpoint_frequency:  # all of them are kept
        room = replace(room, checkpoints=1 + total_steps(settings) // settings.train.checkpoint_frequency)
    free, lacking = shutil.disk_usage(place_of(folder)).free, room.lacking(folder)
    text = f"{free / 2**30:,.1f} GiB are free at {place_of(folder)}, and {room.described(lacking)}"
    if free < lacking:
        raise ValueError(f"{text}; free some space, set hydra.run.dir, or keep fewer (train.keep_checkpoints)")
    yield Finding("OK", "disk", text)


def source_of(case: Case) -> str:
    """The model's folder; where no weights are read also its name on the hub.

    Raises:
        ValueError: it is not there, or can't be fetched.
    """
    return _source(case.read.model.name, case.quick)


@cache
def _source(name: str, quick: bool) -> str:
    return config_source(name) if quick else str(resolve_model(name))


def _gate(case: Case, source: str, model: PreTrainedModel) -> Iterator[Finding]:
    check_model(source, adapters(case.read), case.read.policy.router_replay)
    yield Finding("OK", "gate", layer_summary(model))


def _tokenizer(case: Case, source: str, model: PreTrainedModel) -> Iterator[Finding]:
    with unfit("tokenizer", f"; {source} needs the files that its tokenizer's save_pretrained() writes"):
        tokenizer = load_tokenizer(source, case.read.model.chat_template)
    with unfit("written files"):
        ignored = check_written(source, tokenizer)
    if ignored:
        text = f"transformers ignores {', '.join(ignored)} in generation_config.json; a trained model will have none"
        yield Finding("note", "written files", text)
    embedded = model.get_input_embeddings().weight.shape[0]
    with unfit("chat template"):
        yield from template_findings(tokenizer, end_ids(source), embedded)


def layer_summary(model: PreTrainedModel) -> str:
    """The supported layers of a model, by how they mix tokens."""
    kinds: Counter[str] = Counter()
    for call in supported_calls(model):
        kind = f"attention in windows of {call.any_window} tokens" if call.any_window else "full attention"
        kind += " with sinks" * (call.keywords.get("s_aux") is not None)
        kinds[kind + " with soft caps" * (call.keywords.get("softcap") is not None)] += 1
    kinds.update(type(mixer).__name__ for _, _, mixer in mixers(model))
    experts = "; mixture of experts" if model._can_set_experts_implementation() else ""
    return f"scored exactly: {', '.join(f'{count} x {kind}' for kind, count in kinds.items())}{experts}"
