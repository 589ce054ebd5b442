"""Conversations, and their ids: a prompt from its beginning, and a reply behind what was sampled."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import lru_cache
from itertools import groupby
from typing import Any, cast

from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_rl.envs.tables import is_message
from grpo_rl.envs.task import Messages, Reward, Task
from grpo_rl.envs.tools.schemas import shows_tools, tool_schemas, with_arguments, with_tools_in_text

_STAND_IN = "stand-in"
_TAG = re.compile(r"</?[a-z_]+>")
_THOUGHT = "<think>\nthought\n</think>\n\n"
_REWRITES = (
    "the tokenizer's chat template changes earlier turns when later ones come, or leaves them out, so ids that were "
    "sampled could not be kept, or it leaves out the reply; use a template that only appends"
)


@dataclass(frozen=True, eq=False)
class Dialog:
    """One conversation at one moment; what follows makes another.

    Args:
        messages: the prompt's, then the policy's and the task's.
        row: of the data, which the conversation is about; ``where`` names it in messages.
        max_turns: most turns of the policy.
        verdict: the reward, or the failure in its place, once the conversation was scored.
        prompt_messages: number of the prompt's messages; all of them where none is given.
    """

    messages: Messages
    row: dict = field(default_factory=dict)
    where: str = ""
    max_turns: int = 1
    turns: int = 0
    over: bool = False
    verdict: Any = None
    prompt_messages: int = -1

    def __post_init__(self) -> None:
        if self.prompt_messages < 0:
            object.__setattr__(self, "prompt_messages", len(self.messages))

    @property
    def text(self) -> str:
        """The conversation after the prompt: the policy's turns, and the replies between them."""
        return "\n\n".join(map(_written, self.messages[self.prompt_messages :]))

    def said(self, text: str, calls: Sequence[dict[str, Any]] = ()) -> Dialog:
        """The conversation with another turn of the policy.

        Args:
            calls: ``tool_calls`` in OpenAI's form. An id of the parser's own is replaced by the call's number, in the
                form that every chat template takes: parsers draw theirs, and a resumed run would read other ones.
        """
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            before = sum(len(said.get("tool_calls", ())) for said in self.messages)
            message["tool_calls"] = [{**call, "id": f"call{before + i:05d}"} for i, call in enumerate(calls)]
        return replace(self, messages=[*self.messages, message], turns=self.turns + 1)

    def heard(self, reply: Messages) -> Dialog:
        """The conversation with the task's reply."""
        return replace(self, messages=[*self.messages, *reply])

    def ended(self, verdict: Any) -> Dialog:
        """The conversation once it is over and was scored.

        Where it may have several turns, its reward gets the measures ``turns``, ``replies`` and ``error_replies``,
        unless the task has measures of these names.
        """
        if isinstance(verdict, Reward) and self.max_turns > 1:
            said = self.messages[self.prompt_messages :]
            replies = [message["content"] for message in said if message["role"] != "assistant"]
            errors = sum(reply.startswith("Error") for reply in replies)
            counts = {"turns": self.turns, "replies": len(replies), "error_replies": errors}
            verdict = replace(verdict, measures=counts | verdict.measures)
        return replace(self, over=True, verdict=verdict)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of the policy's last turn."""
        said = next((message for message in reversed(self.messages) if message["role"] == "assistant"), {})
        return said.get("tool_calls", [])

    def reply_of(self, task: Task) -> Messages | None:
        """The task's reply; None where the conversation is over.

        Raises:
            TypeError: it replies with something else than messages.
        """
        reply: Any = task.reply(self.row, list(self.messages))
        if reply is None or (isinstance(reply, list) and reply and all(map(is_message, reply))):
            return reply
        raise TypeError(f"reply returned {reply!r:.80}; it must be None, or messages with a role and a content")


def _written(message: Mapping[str, Any]) -> str:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return "\n".join([message["content"], *(f"{f['name']}({f['arguments']})" for f in functions)]).strip("\n")


def decode_responses(tokenizer: PreTrainedTokenizerBase, responses: Sequence[Tensor | Sequence[int]]) -> list[str]:
    """The text of each response that is judged: all that was sampled but the end of the turn, and padding behind it.

    Tokenizer, chat template and model (`grpo_rl.policies.generation.load_tokenizer`) say what ends a turn.
    """
    ends = {getattr(tokenizer, name, None) for name in ("eos_token_id", "pad_token_id")}
    ends |= {*getattr(tokenizer, "response_ends", ()), *_template_end(tokenizer, tokenizer.chat_template)}
    # Tensors go in as they are: of a list, transformers would look at the type of every token.
    said = [_without_end(ids, ends) for ids in responses]
    return tokenizer.batch_decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _without_end(ids: Tensor | Sequence[int], ends: Collection[int | None]) -> Tensor | Sequence[int]:
    length = len(ids)
    while length and int(ids[length - 1]) in ends:
        length -= 1
    return ids[:length]


@lru_cache(maxsize=8)
def _template_end(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> set[int]:
    """The id that ends the policy's turn, if the chat template writes a token of its own there, and no text."""
    if not chat_template:
        return set()
    try:
        ids = tokenizer(turn_end(tokenizer), add_special_tokens=False)["input_ids"]
    except ValueError:  # such a template is refused where several turns need it
        return set()
    return {*ids[:1]} & tokenizer.added_tokens_decoder.keys()


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, conversations: list[Messages], tools: Sequence[Any] = (), over: bool = False
) -> list[list[int]]:
    """Ids of each conversation, up to where the policy speaks. Without a chat template: its messages' contents.

    Args:
        tools: functions or JSON schemas, shown by the chat template; where it shows none, by a system message, with
            calls in the format of Hermes and Qwen.
        over: the policy has spoken last.

    Raises:
        ValueError: the chat template refuses the messages, or a function's types or docstring make no schema.
    """
    conversations, given = shown_messages(tokenizer, conversations, tools)
    if not tokenizer.chat_template:
        texts = ["".join(f"{message['content']}\n\n" for message in messages) for messages in conversations]
        return tokenizer(texts)["input_ids"]
    given |= {"add_generation_prompt": not over, "tokenize": True, "return_dict": False}
    return cast("list[list[int]]", templated(tokenizer, conversations, **given))


def encode_rows(
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    rows: Sequence[dict],
    places: Sequence[str] = (),
    replies: Sequence[Messages] = (),
) -> list[list[int]]:
    """Ids of each row's prompt with the tools that it shows; with the policy's replies, to their ends.

    Raises:
        ValueError: see :func:`encode_prompts`; names the row's place, if ``places`` has it.
    """
    conversations = [task.prompt(row) for row in rows]
    if replies:
        conversations = [[*asked, *reply] for asked, reply in zip(conversations, replies, strict=True)]
    tools, ids = [list(task.tools_of(row)) for row in rows], []
    for own, neighbours in groupby(range(len(rows)), key=tools.__getitem__):
        members = list(neighbours)
        try:
            ids += encode_prompts(tokenizer, [conversations[at] for at in members], own, bool(replies))
        except ValueError:
            for at in members if places else ():
                try:
                    encode_prompts(tokenizer, [conversations[at]], own, bool(replies))
                except ValueError as error:
                    raise ValueError(f"{places[at]}: {error}") from error
            raise
    return ids


def shown_messages(
    tokenizer: PreTrainedTokenizerBase, conversations: list[Messages], tools: Sequence[Any]
) -> tuple[list[Messages], dict[str, Any]]:
    """The conversations as the chat template can show them, and what it is given beside them."""
    schemas, template = tool_schemas(tools), str(tokenizer.chat_template)
    if schemas:  # a server that they come from may have described them
        schemas = _without(_controls(tokenizer), schemas)
    if not shows_tools(tokenizer) and (schemas or "tool_calls" not in template):
        conversations, schemas = [with_tools_in_text(messages, schemas) for messages in conversations], []
    return conversations, {"tools": schemas} if schemas else {}


def encode_reply(
    tokenizer: PreTrainedTokenizerBase,
    reply: Messages,
    last: int | None = None,
    calls: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Ids of what follows a finished response up to where the policy speaks again: the end of its turn, the reply.

    Nothing that was sampled is tokenised again: these ids go behind it. No reply can write special tokens.

    Args:
        last: the last id that was sampled; where it is the template's end of a turn, that is not written again.
        calls: ``tool_calls`` of the response, which the results answer.

    Raises:
        ValueError: the chat template refuses the messages, or changes earlier turns when later ones come.
    """
    reply = _without(_marks(tokenizer), reply)
    if not tokenizer.chat_template:
        text = "\n\n" + "".join(f"{message['content']}\n\n" for message in reply)
    else:
        text = _behind_a_turn(tokenizer, reply, calls)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # The token that ends a turn was sampled; what the template writes after it, a line break say, is still to come.
    return ids[1:] if tokenizer.chat_template and ids[:1] == [last] else ids


def check_reply(tokenizer: PreTrainedTokenizerBase, role: str, schemas: Sequence[Mapping[str, Any]] = ()) -> None:
    """Tries :func:`encode_reply` with the result of a call where there are tools, else with a reply of this role."""
    reply, calls = {"role": role, "content": "reply", "tool_call_id": "call00000", "name": "tool"}, []
    if schemas:
        name = schemas[0]["function"]["name"]
        calls = [{"id": "call00000", "type": "function", "function": {"name": name, "arguments": "{}"}}]
        reply |= {"role": "tool", "name": name}
    encode_reply(tokenizer, [reply], calls=calls)


def _behind_a_turn(tokenizer: PreTrainedTokenizerBase, reply: Messages, calls: Sequence[Mapping[str, Any]]) -> str:
    """The text that the template writes behind a turn of the policy when ``reply`` follows it.

    Stand-in turns take the place of what was sampled: one with the calls themselves, since some templates look up which
    result belongs to which call, one with text alone, and one that thinks, since Qwen3's template writes an empty
    thought into the last turn and takes it out again when results follow.
    """
    question = {"role": "user", "content": "question"}
    end = turn_end(tokenizer)
    turns: list[dict[str, Any]] = [{"content": _STAND_IN}, {"content": _THOUGHT + _STAND_IN}]
    if calls:
        turns.insert(0, {"content": _THOUGHT, "tool_calls": list(calls)})
    refused: ValueError | None = None
    for turn in turns:
        before = [question, {"role": "assistant", **turn}]
        try:
            if "tool_calls" in turn:
                said = templated(tokenizer, before, add_generation_prompt=False, tokenize=False)
            else:
                said = _rendered(tokenizer, str(tokenizer.chat_template), turn["content"], date.today())
            text = templated(tokenizer, [*before, *reply], add_generation_prompt=True, tokenize=False)
        except ValueError as error:
            refused = refused or error
            continue
        if text.startswith(said) and said.endswith(end) and _shows(text[len(said) :], reply):
            return end + text[len(said) :]
    raise refused or ValueError(_REWRITES)


def _shows(text: str, reply: Messages) -> bool:
    """True if each message's first word stands in the text: Gemma 4's leaves out results without calls."""
    words = [re.match(r"[A-Za-z0-9]+", message["content"].strip()) for message in reply]
    return all(word is None or word[0] in text for word in words)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that the chat template writes at the end of the policy's turn.

    Raises:
        ValueError: the template refuses a plain conversation, or leaves the policy's turn out.
    """
    said = _rendered(tokenizer, str(tokenizer.chat_template), _STAND_IN, date.today())
    if _STAND_IN not in said:
        raise ValueError(_REWRITES)
    return said[said.rindex(_STAND_IN) + len(_STAND_IN) :]


@lru_cache(maxsize=8)
def _rendered(tokenizer: PreTrainedTokenizerBase, chat_template: str, content: str, day: date) -> str:
    """The chat template's text of a question and a turn of the policy; a template may write the day into it."""
    before: Messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": content}]
    return templated(tokenizer, before, add_generation_prompt=False, tokenize=False)


def harmless(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> Messages:
    """The messages with a space inside each control token that they spell out.

    Otherwise a web page that one quotes could end its turn and speak as the user. Tags such as ``<think>``, of which
    prompts speak, are broken in results of tools alone.
    """
    marks, controls = _marks(tokenizer), _controls(tokenizer)
    return [_without(marks if message["role"] == "tool" else controls, message) for message in messages]


def _marks(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The tokens that a text could spell out, and not mean as words."""
    return [mark for mark in {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()} if mark[:1] in ("<", "[")]


def _controls(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Those of the marks that begin or end a turn or a text, and no tags inside of one."""
    written = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    question, said = {"role": "user", "content": "question"}, {"role": "assistant", "content": _STAND_IN}
    plain = ""
    if tokenizer.chat_template:
        with suppress(ValueError):  # one that takes a single question: it has been asked, or will be
            plain = templated(tokenizer, [question, said, question], tokenize=False)
    return [mark for mark in _marks(tokenizer) if mark in written or mark in plain or not _TAG.fullmatch(mark)]


def _without(marks: Sequence[str], value: Any) -> Any:
    """The same messages or schemas with a space inside each of these marks, wherever it stands in them."""
    if not marks:
        return value
    pattern = re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)))

    def broken(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {broken(key): broken(inner) for key, inner in value.items()}
        return [broken(inner) for inner in value] if isinstance(value, list) else value

    return broken(value)


def templated(tokenizer: PreTrainedTokenizerBase, messages: Any, **settings: Any) -> Any:
    """The result of ``apply_chat_template``, of one conversation or several.

    Raises:
        ValueError: the chat template refuses the messages.
    """
    several = bool(messages) and isinstance(messages[0], list)
    conversations = [with_arguments(turns) for turns in (messages if several else [messages])]
    try:
        return tokenizer.apply_chat_template(conversations if several else conversations[0], **settings)
    # A foreign template's own: jinja passes on whatever its expressions raise.
    except Exception as error:
        why = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        roles = sorted({turn["role"] for conversation in conversations for turn in conversation})
        raise ValueError(
            f"the tokenizer's chat template refuses messages with the roles {roles}: {why}; where it knows no system "
            "role, set env.system_prompt=null, and where it knows no tool role, env.tool_role=user"
        ) from error
