"""Messages as OpenAI's clients write them: compared with what was said before, and written for chat templates."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from grpo_rl.envs.chat import decode_responses, encode_prompts, templated

Message = dict[str, Any]
"""A message of OpenAI's chat format."""
SILENT = ("refusal", "annotations", "audio", "function_call")
"""Keys that clients send back with what they were given, and that no template reads."""


class ToolParser(Protocol):
    """Finds a model's calls of tools in its text, in the model's own format."""

    def parse(self, text: str) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """The text beside the calls, and the calls as OpenAI's ``tool_calls``; without calls, the text as it is.

        Args:
            text: with special tokens, some formats being made of them, and without the one that ended it.
        """
        ...


def text_of(content: Any) -> str:
    """The text of a message's content, which is a text, a list of text parts, or null.

    Raises:
        ValueError: it is something else, such as a picture.

    >>> text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), text_of(None)
    ('ab', '')
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ValueError(f"content is {content!r:.80}; it must be a text, text parts or null")


def for_template(message: Any) -> Message:
    """The message as chat templates read it: content as one text, arguments of tool calls as objects.

    Raises:
        ValueError: it is no message.

    >>> for_template({"role": "developer", "content": [{"type": "text", "text": "Be brief."}], "refusal": None})
    {'role': 'system', 'content': 'Be brief.'}
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message is {message!r:.80}; it must be an object with a role and a content")
    given = {key: value for key, value in message.items() if value not in (None, "", []) and key not in SILENT}
    plain = {"role": "system" if message["role"] == "developer" else message["role"]}
    plain |= {"content": text_of(given.pop("content", None))} | {k: v for k, v in given.items() if k != "role"}
    if "tool_calls" in given:
        plain["tool_calls"] = [_call(call) for call in given["tool_calls"]]
    return plain


def _call(call: Any) -> Message:
    try:
        function = call["function"]
        arguments = function["arguments"]
        name, own_id = function["name"], call.get("id")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a tool call is {call!r:.80}; it must have a function with a name and arguments") from error
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # a model's own mistake, which it is shown as it wrote it
            arguments = json.loads(arguments)
    return {"id": own_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def digests(messages: Sequence[Message], tools: Sequence[Any]) -> list[bytes]:
    """For each number of messages from 0 on, a digest of the tools and so many messages.

    The ids of an assistant's own tool calls do not count: some clients number them anew, and the policy never wrote
    them.

    Args:
        messages: as of :func:`for_template`.
    """
    digest = hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode())
    found = [digest.digest()]
    for message in messages:
        counted = message
        if "tool_calls" in message:
            calls = [{key: value for key, value in call.items() if key != "id"} for call in message["tool_calls"]]
            counted = {**message, "tool_calls": calls}
        digest.update(json.dumps(counted, sort_keys=True).encode() + b"\n")
        found.append(digest.digest())
    return found


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
    """Ids of a conversation from its beginning, tools included, up to where the policy speaks.

    Raises:
        ValueError: the chat template refuses the messages, or there is none to write tools with.
    """
    if not tools:
        return encode_prompts(tokenizer, [list(messages)])[0]
    if not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template, which tools need")
    settings: dict[str, Any] = {"tools": list(tools), "tokenize": True, "return_dict": False}
    return templated(tokenizer, list(messages), add_generation_prompt=True, **settings)


def answer(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop: Sequence[str], parser: ToolParser | None, number: int
) -> Message:
    """The message of the policy that these ids are: its text up to a stop string, and its calls of tools.

    Args:
        parser: finds the calls; None: the text is all there is.
        number: of the response in its session; ids of calls are made of it.
    """
    text = decode_responses(tokenizer, [list(ids)])[0]
    message: Message = {"role": "assistant", "content": _before(stop, text)}
    if parser is None:
        return message
    ended = bool(ids) and ids[-1] in tokenizer.all_special_ids
    whole = tokenizer.decode(list(ids[:-1] if ended else ids), clean_up_tokenization_spaces=False)
    content, calls = parser.parse(_before(stop, str(whole)))
    if calls:
        message = {"role": "assistant", "content": content or None}
        # Nine letters and digits, as Mistral's templates ask for.
        message["tool_calls"] = [
            {**call, "id": f"c{number % 10**5:05}{at % 10**3:03}"} for at, call in enumerate(calls)
        ]
    return message


def _before(stop: Sequence[str], text: str) -> str:
    """The text up to the first stop string.

    >>> _before(["#", "c"], "ab#c"), _before([], "ab")
    ('ab', 'ab')
    """
    return text[: min((at for string in stop if (at := text.find(string)) >= 0), default=None)]
