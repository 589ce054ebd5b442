"""The text of a response, cut into the pieces of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


class TokenPieces:
    """Cuts the text of a response into the pieces of its tokens.

    Pieces of tokens that are not special, one after the other, are the decoded response. A character that several
    tokens make up is the piece of the last of them. A special token's piece is its name.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = {token: added[token].content for token in added if added[token].special}

    def __call__(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """The piece of each token, and whether it is special."""
        plain = [token for token in ids if token not in self._special]
        pieces = iter(self._pieces(plain))
        return [(self._special[token], True) if token in self._special else (next(pieces), False) for token in ids]

    def _pieces(self, ids: list[int]) -> list[str]:
        if not self._tokenizer.is_fast:
            return [self._decode([token]) for token in ids]
        stream = DecodeStream(skip_special_tokens=True)
        try:
            pieces = [stream.step(self._tokenizer.backend_tokenizer, token) or "" for token in ids]
        except Exception:  # bytes that are no character; the library has no narrower one
            return [self._decode([token]) for token in ids]
        # The stream keeps bytes at the end that are no character.
        return pieces and [*pieces[:-1], pieces[-1] + self._decode(ids)[sum(map(len, pieces)) :]]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
