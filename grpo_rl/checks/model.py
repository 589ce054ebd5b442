"""Checks of a model without its weights: whether it is scored exactly, tokenizer, chat template, context, disk."""

import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_rl.assembly.run import needed_room
from grpo_rl.checks.check import Case, Finding, caught, unfit
from grpo_rl.checks.folder import folder_of, place_of
from grpo_rl.envs.chat import decode_responses, encode_prompts, encode_reply, templated
from grpo_rl.envs.task import Messages
from grpo_rl.planner.scenario import config_source
from grpo_rl.policies.generation import end_ids, generation_config, load_tokenizer
from grpo_rl.policies.hub import resolve_model, weight_files
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
    """The model's folder; where no weights are read also its name on the hub."""
    return _source(case.read.model.name, case.quick)


@cache
def _source(name: str, quick: bool) -> str:
    return config_source(name) if quick else str(resolve_model(name))


def _gate(case: Case, source: str, model: PreTrainedModel) -> Iterator[Finding]:
    check_model(source, adapters(case.read), case.read.policy.router_replay)
    yield Finding("OK", "gate", layer_summary(model))


def _tokenizer(case: Case, source: str, model: PreTrainedModel) -> Iterator[Finding]:
    with unfit("tokenizer", f"; {source} needs the files that its tokenizer's save_pretrained() writes"):
        tokenizer = load_tokenizer(source, case.read.model)
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


REPLY = "The sum is 5."
THOUGHT = f"<think>\n2 and 3 are 5.\n</think>\n\n{REPLY}"
TEXTS = (
    "2 + 3 = 5\n\n#### 5",
    "<think>2 and 3</think><answer>5</answer>",
    "So \\frac{1}{2} , or 0.5 .",
    "  if x:\n\treturn 'é'",
    "naïve – 你好 🙂",
)
"""Texts that rewards read: numbers, tags, LaTeX, code, characters of several bytes."""
APPENDING = "a template that only appends (model.chat_template) keeps them"


def template_findings(tokenizer: PreTrainedTokenizerBase, ends: Collection[int], embedded: int) -> Iterator[Finding]:
    """The findings on a tokenizer, without its model.

    Args:
        ends: ids that end a response, see `grpo_rl.policies.generation.end_ids`.
        embedded: ids that the model has an embedding for.
    """
    added, ids = set(tokenizer.added_tokens_decoder), set(tokenizer.get_vocab().values())
    if not ids or max(ids - added, default=0) >= embedded:
        text = (f"it has ids up to {max(ids)}" if ids else "it is empty") + f", and the model embeds {embedded}"
        yield Finding("FIX", "tokenizer", f"{text}: they are not of the same model; fetch both again")
        return
    if beyond := sorted(token for token in ids & added if token >= embedded):
        text = f"{tokenizer.decode(beyond[:1])} ({beyond[0]})" + " and others" * (len(beyond) > 1)
        yield Finding("note", "tokenizer", f"the model embeds {embedded} ids, not {text}: no prompt may hold that")
    else:
        yield Finding("OK", "tokenizer", f"{max(ids) + 1} of the model's {embedded} ids")
    if tokenizer.chat_template:
        yield _roles(tokenizer)
    else:
        text = "none: prompts are the messages' texts, as for a base model; model.chat_template=... gives one"
        yield Finding("note", "chat template", text)
    yield _end_of_turn(tokenizer, ends)
    if tokenizer.chat_template:
        yield _turns(tokenizer)
    texts = decode_responses(tokenizer, [_ids(tokenizer, text) for text in TEXTS])
    if changed := [(given, got) for given, got in zip(TEXTS, texts, strict=True) if given != got]:
        text = f"rewards read {changed[0][1]!r} where {changed[0][0]!r} was written"
        yield Finding("note", "text of ids", text)
    else:
        yield Finding("OK", "text of ids", "decoded as it was written; ids are never made from it again")


def _roles(tokenizer: PreTrainedTokenizerBase) -> Finding:
    question: Messages = [{"role": "user", "content": "2 + 3?"}]
    encode_prompts(tokenizer, [question])
    notes, override = [], ""
    try:
        encode_prompts(tokenizer, [[{"role": "system", "content": "Add."}, *question]])
    except ValueError:
        override = "env.system_prompt=null"
        notes.append(f"no system role: {override}")
    try:
        templated(tokenizer, [*question, {"role": "assistant", "content": "a call"}, {"role": "tool", "content": "5"}])
    except ValueError:
        notes.append("no tool role: in tasks with tools env.tool_role=user")
    if notes:
        return Finding("note", "chat template", "; ".join(notes), override)
    return Finding("OK", "chat template", "there, with system and tool roles")


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> Finding:
    about, shown = "end of turn", ", ".join(map(str, sorted(ends)))
    if not ends:
        end = f" ({tokenizer.eos_token} is {tokenizer.eos_token_id})" if tokenizer.eos_token else ""
        remedy = f"set it in the model's generation_config.json{end}"
        return Finding("FIX", about, f"no eos_token_id: no response would end; {remedy}")
    tail = _tail(tokenizer)
    if not tail:
        return Finding("note", about, f"the template writes none after a response; generation stops at {shown}")
    if found := [token for token in tail if token in ends]:
        return Finding("OK", about, f"{tokenizer.decode(found[:1])} ({found[0]}), where generation stops")
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    end = next((token for token in tail if token in special), tail[0])
    text = f"the model writes {tokenizer.decode([end])!r} ({end}) at the end of a response, and generation stops at "
    text += f"{shown} alone: responses would run on to sampling.max_new_tokens; add {end} to eos_token_id in the "
    return Finding("FIX", about, f"{text}model's generation_config.json")


def _tail(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end a response, as the model was trained."""
    if not tokenizer.chat_template:
        return _ids(tokenizer, str(tokenizer.eos_token)) if tokenizer.eos_token else []
    text = templated(tokenizer, _conversation(REPLY)[:2], tokenize=False)
    return _ids(tokenizer, text.rpartition(REPLY)[2] if REPLY in text else "")


def _turns(tokenizer: PreTrainedTokenizerBase) -> Finding:
    about = "several turns"
    try:
        encode_reply(tokenizer, [{"role": "user", "content": "3 + 4?"}])
        changed, thoughts = _first_change(tokenizer, _conversation(REPLY)), _conversation(THOUGHT)
        hidden = _first_change(tokenizer, thoughts) or THOUGHT not in templated(tokenizer, thoughts, tokenize=False)
    except ValueError as error:
        return Finding("note", about, str(error))
    if changed:
        return Finding("note", about, f"message {changed} changes the ids of those before it; {APPENDING}")
    if hidden:
        text = "the template strips <think>…</think> from earlier responses: in tasks of several turns the policy sees "
        text += "what it thought before, as sampled ids are kept, and a chat server would not show it; "
        return Finding("note", about, f"{text}{APPENDING} there")
    return Finding("OK", about, "ids of earlier messages stay as they are")


def _conversation(reply: str) -> Messages:
    questions = ({"role": "user", "content": question} for question in ("2 + 3?", "3 + 2?", "1 + 4?"))
    return [message for question in questions for message in (question, {"role": "assistant", "content": reply})]


def _first_change(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> int | None:
    """The first message, from 1, with which the ids of those before it change; None: there is none."""
    turns = [messages[: n + 1] for n in range(len(messages))]
    ids = [list(templated(tokenizer, turn, tokenize=True, return_dict=False)) for turn in turns]
    return next((n + 1 for n in range(1, len(ids)) if ids[n][: len(ids[n - 1])] != ids[n - 1]), None)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return cast("list[int]", tokenizer(text, add_special_tokens=False)["input_ids"])
