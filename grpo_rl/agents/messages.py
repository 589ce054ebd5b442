"""Messages as OpenAI's clients write them: compared with earlier messages, and rendered for chat templates."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from grpo_rl.by_name import one_line
from grpo_rl.envs.chat import decode_responses

Message = dict[str, Any]
"""A message of OpenAI's chat format."""
SILENT = ("refusal", "annotations", "audio", "function_call")
"""Keys that clients echo back and no chat template reads."""


class ToolParser(Protocol):
    """Finds a model's calls of tools in its text, in the model's own format."""

    def parse(self, text: str) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """The text without the calls, and the calls as OpenAI's ``tool_calls``; without calls, the text as it is.

        Args:
            text: with special tokens, some formats being made of them, and without the one that ended it.
        """


MakeParser = Callable[[PreTrainedTokenizerBase, Sequence[Any]], ToolParser]
"""Makes the parser of the calls of these tools."""


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
    """The message in one form: content as one text, arguments of tool calls as compact JSON.

    Raises:
        ValueError: it is not a message.

    >>> for_template({"role": "developer", "content": [{"type": "text", "text": "Be brief."}], "refusal": None})
    {'role': 'system', 'content': 'Be brief.'}
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message is {message!r:.80}; it must be an object with a role and a content")
    given = {key: value for key, value in message.items() if value not in (None, "", []) and key not in SILENT}
    plain = {"role": "system" if message["role"] == "developer" else message["role"]}
    plain |= {"content": text_of(given.pop("content", None))} | {k: v for k, v in given.items() if k != "role"}
    if "tool_calls" in given:
        if not isinstance(given["tool_calls"], list):
            raise ValueError(f"tool_calls is {given['tool_calls']!r:.80}; it must be a list")
        plain["tool_calls"] = [_call(call) for call in given["tool_calls"]]
    return plain


def _call(call: Any) -> Message:
    try:
        function = call["function"]
        arguments = function["arguments"]
        name, own_id = function["name"], call.get("id")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a tool call is {call!r:.80}; it must have a function with a name and arguments") from error
    with contextlib.suppress(ValueError, RecursionError):  # a model's own mistake stays as it is
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
        arguments = json.dumps(read, ensure_ascii=False)
    return {"id": own_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def digests(messages: Sequence[Message], tools: Sequence[Any]) -> list[bytes]:
    """Digests of the tools and the first n messages, which are as :func:`for_template` makes them, for each n from 0.

    Ids of calls count as the numbers of the calls, as some clients number them anew and the policy never wrote them; of
    the policy's own messages, only text and calls count, since clients add keys of theirs.
    """
    digest = hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode())
    found, numbers = [digest.digest()], {}
    for message in messages:
        counted = dict(message)
        if message["role"] == "assistant":
            counted = {key: message[key] for key in ("role", "content", "name") if key in message}
        if "tool_calls" in message:
            counted["tool_calls"] = [call["function"] for call in message["tool_calls"]]
            numbers |= {str(call["id"]): len(numbers) + at for at, call in enumerate(message["tool_calls"])}
        if "tool_call_id" in message:
            counted["tool_call_id"] = numbers.get(str(message["tool_call_id"]), message["tool_call_id"])
        digest.update(json.dumps(counted, sort_keys=True).encode() + b"\n")
        found.append(digest.digest())
    return found


def response_message(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop: Sequence[str], parser: ToolParser | None, number: int
) -> tuple[Message, str | None]:
    """The message of the policy that these ids are, its text up to a stop string and its calls of tools; and a problem.

    Args:
        parser: finds the calls; None: the text is all there is. Where it fails the text is all there is, too, and the
            problem says why.
        number: of the response in its session; ids of calls are made of it.
    """
    text = decode_responses(tokenizer, [list(ids)])[0]
    text = text[: min((at for string in stop if (at := text.find(string)) >= 0), default=None)]
    message: Message = {"role": "assistant", "content": text}
    if parser is None:
        return message, None
    try:
        content, calls = parser.parse(text)
        if not calls:
            return message, None
        # Nine letters and digits, as Mistral's templates ask for.
        own = [{**call, "id": f"c{number % 10**5:05}{at % 10**3:03}"} for at, call in enumerate(calls)]
        called = {"role": "assistant", "content": content or None, "tool_calls": own}
        for_template(called)
        json.dumps(called)
    except Exception as error:  # untrusted text in the user's code: what it can't read is text
        return message, f"the parser of env.tool_parser failed: {one_line(error)}"
    return called, None
