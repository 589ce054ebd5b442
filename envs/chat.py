"""Conversations, and their ids: a prompt from its beginning, and a reply behind what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_rl.envs.task import Messages, Task

_STAND_IN = "stand-in"


@dataclass(eq=False)
class Dialog:
    """One conversation as it grows.

    Args:
        messages: the prompt's, then the policy's and the task's.
        turns: of the policy.
        over: nothing follows.
    """

    messages: Messages
    turns: int = 0
    over: bool = False

    def __post_init__(self) -> None:
        self._prompt_messages = len(self.messages)

    @property
    def text(self) -> str:
        """The conversation after the prompt: the policy's turns, and the replies between them."""
        return "\n\n".join(message["content"] for message in self.messages[self._prompt_messages :])

    def say(self, text: str) -> None:
        """Appends a turn of the policy."""
        self.messages.append({"role": "assistant", "content": text})
        self.turns += 1

    def reply(self, task: Task, row: dict, max_turns: int) -> Messages | None:
        """The task's reply; None where the conversation is over.

        Raises:
            TypeError: it replies with something else than messages.
        """
        reply = task.reply(row, list(self.messages)) if self.turns < max_turns else None
        if reply is not None:
            _check_reply(reply)
        self.over = reply is None
        return reply

    def hear(self, reply: Messages) -> None:
        """Appends what the task replied."""
        self.messages += reply


def _check_reply(reply: Any) -> None:
    whole = isinstance(reply, list) and reply and all(isinstance(message, dict) for message in reply)
    if not whole or not all(isinstance(message.get(key), str) for message in reply for key in ("role", "content")):
        raise TypeError(f"reply returned {reply!r:.80}; it must be None, or messages with a role and a content")


def decode_responses(tokenizer: PreTrainedTokenizerBase, responses: Sequence[Tensor | Sequence[int]]) -> list[str]:
    """The text of each response that is judged: without special tokens, otherwise exactly what was sampled."""
    # Tensors go in as they are: of a list, transformers would look at the type of every token.
    return tokenizer.batch_decode(list(responses), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, conversations: list[Messages]) -> list[list[int]]:
    """Ids of each conversation, up to where the policy speaks. Without a chat template: its messages' contents.

    Raises:
        ValueError: the chat template refuses the messages.
    """
    if not tokenizer.chat_template:
        texts = ["".join(f"{message['content']}\n\n" for message in messages) for messages in conversations]
        return tokenizer(texts)["input_ids"]
    ids = templated(tokenizer, conversations, add_generation_prompt=True, tokenize=True, return_dict=False)
    return cast("list[list[int]]", ids)


def encode_reply(tokenizer: PreTrainedTokenizerBase, reply: Messages, last: int | None = None) -> list[int]:
    """Ids of what follows a finished response up to where the policy speaks again: the end of its turn, the reply.

    Nothing that was sampled is tokenised again: these ids go behind it.

    Args:
        last: the last id that was sampled; where it is the template's end of a turn, that is not written again.

    Raises:
        ValueError: the chat template refuses the messages, or changes earlier turns when later ones come.
    """
    if not tokenizer.chat_template:
        text = "\n\n" + "".join(f"{message['content']}\n\n" for message in reply)
    else:
        # What the template writes around a stand-in conversation.
        before: Messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _STAND_IN}]
        before_reply = templated(tokenizer, before, add_generation_prompt=False, tokenize=False)
        text = templated(tokenizer, [*before, *reply], add_generation_prompt=True, tokenize=False)
        if not text.startswith(before_reply) or _STAND_IN not in before_reply:
            raise ValueError(
                "the tokenizer's chat template changes earlier turns when later ones come, or leaves them out, so ids "
                "that were sampled could not be kept; use a template that only appends"
            )
        text = text[before_reply.rindex(_STAND_IN) + len(_STAND_IN) :]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # The token that ends a turn was sampled; what the template writes after it, a line break say, is still to come.
    return ids[1:] if tokenizer.chat_template and ids[:1] == [last] else ids


def templated(tokenizer: PreTrainedTokenizerBase, messages: Any, **settings: bool) -> Any:
    """The result of ``apply_chat_template``, of one conversation or several.

    Raises:
        ValueError: the chat template refuses the messages.
    """
    try:
        return tokenizer.apply_chat_template(messages, **settings)
    # A foreign template's own: jinja passes on whatever its expressions raise.
    except Exception as error:
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        why = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        roles = sorted({turn["role"] for conversation in conversations for turn in conversation})
        raise ValueError(
            f"the tokenizer's chat template refuses messages with the roles {roles}: {why}; where it knows no system "
            "role, set env.system_prompt=null, and where it knows no tool role, env.tool_role=user"
        ) from error
