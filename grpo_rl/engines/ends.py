"""The ends of responses, the same in every engine: end-of-sequence ids of a model, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

_BAD_PREFIX = "Invalid prefix encountered"
"""Beginning of the message of tokenizers' error where bytes that are no UTF-8 have broken a stream."""


def text_decoder(model: str | Path) -> Tokenizer:
    """The decoder of a model folder's ids, as stop strings need one.

    Raises:
        ValueError: the folder has no fast tokenizer.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    if not tokenizer.is_fast:
        raise ValueError(f"sampling.stop looks for text, and {model} has no fast tokenizer; use an end-of-sequence id")
    return tokenizer.backend_tokenizer


class StopString:
    """Finds the token of a response that completes a stop string, as vLLM's detokenizer does.

    Text is decoded a token at a time behind the prompt, special tokens too.
    """

    def __init__(self, decoder: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._decoder, self._stop, self._text = decoder, stop, ""
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=False)

    def completed_by(self, token: int) -> bool:
        """True if a stop string is in the text, with the response's next token."""
        self._text += self._step(token) or ""
        return any(stop in self._text for stop in self._stop)

    def _step(self, token: int) -> str | None:
        try:
            return self._stream.step(self._decoder, token)
        except Exception as error:  # the library has no narrower one
            if not str(error).startswith(_BAD_PREFIX):
                raise
            self._stream = DecodeStream(skip_special_tokens=False)
            return self._stream.step(self._decoder, token)
