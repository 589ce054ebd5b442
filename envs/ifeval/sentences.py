"""Sentences and words in capitals, counted as NLTK splits a text."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktTokenizer


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
    from nltk.tokenize.punkt import PunktTokenizer

    from grpo_rl.envs.ifeval.punkt import fetch_punkt  # at the top, `python -m` would find it imported already

    fetch_punkt()
    return PunktTokenizer("english")


@cache
def _words() -> NLTKWordTokenizer:
    from nltk.tokenize import NLTKWordTokenizer

    return NLTKWordTokenizer()
