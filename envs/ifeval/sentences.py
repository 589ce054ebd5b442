"""Sentences and words in capitals, counted as NLTK splits a text."""

from __future__ import annotations

import io
from functools import cache, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktTokenizer

PUNKT = "punkt_tab"
"""NLTK's data for sentence splitting; its code comes without."""


@lru_cache(maxsize=32)  # several instructions, and the strict and the loose verdict, ask about the same text
def count_sentences(text: str) -> int:
    """The number of sentences, by NLTK's Punkt for English.

    Raises:
        ValueError: see :func:`require_punkt`.
    """
    return sum(1 for _ in _punkt().span_tokenize(text))


@lru_cache(maxsize=32)
def count_capital_words(text: str) -> int:
    """The number of words without a small letter and with a capital one, hyphenated ones counting once.

    Raises:
        ValueError: see :func:`require_punkt`.
    """
    # By sentences, as a word's last point and its "n't" are split off at the end of a sentence only.
    return sum(map(_capital_words_of_sentence, _punkt().tokenize(text)))


@lru_cache(maxsize=1024)
def _capital_words_of_sentence(sentence: str) -> int:
    return sum(token.isupper() for token in _words().tokenize(sentence))


def require_punkt() -> None:
    """Returns once NLTK's English sentence data is loaded; fetches it where it is on none of NLTK's paths.

    There is no substitute for it: sentences split otherwise would be other sentences.

    Raises:
        ValueError: it is not there, and can't be fetched.
    """
    _punkt()


@cache
def _punkt() -> PunktTokenizer:
    tokenizer = _loaded()
    # Whether a point ends a sentence is decided on the words beside it alone, which variants of a response, and a
    # group's responses, have in common.
    tokenizer.text_contains_sentbreak = lru_cache(maxsize=4096)(tokenizer.text_contains_sentbreak)
    return tokenizer


def _loaded() -> PunktTokenizer:
    # Imported here: NLTK takes a second, which rows that count no sentences need not pay.
    import nltk
    from nltk.tokenize.punkt import PunktTokenizer

    try:
        return PunktTokenizer("english")
    except LookupError:
        pass
    try:
        nltk.download(PUNKT, quiet=True, raise_on_error=True, print_error_to=io.StringIO())
        return PunktTokenizer("english")
    except (OSError, ValueError, LookupError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"counting sentences and capital words needs NLTK's {PUNKT}, which is in none of {nltk.data.path} and "
            f"could not be downloaded ({reason}). Where there is a network, run `python -m nltk.downloader {PUNKT}`, "
            "copy ~/nltk_data here and name it in $NLTK_DATA; or leave out the rows with number_sentences or "
            "capital_word_frequency"
        ) from error


@cache
def _words() -> NLTKWordTokenizer:
    from nltk.tokenize import NLTKWordTokenizer

    return NLTKWordTokenizer()
