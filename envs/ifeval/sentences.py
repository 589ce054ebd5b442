"""Sentences and words in capitals, counted as NLTK splits a text."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nltk.tokenize.punkt import PunktTokenizer


@lru_cache(maxsize=32)  # several instructions, and the strict and the loose verdict, ask about the same text
def count_sentences(text: str) -> int:
    """The number of sentences, by NLTK's Punkt for English."""
    return sum(1 for _ in punkt().span_tokenize(text))


@lru_cache(maxsize=32)
def count_capital_words(text: str) -> int:
    """The number of words without a small letter and with a capital one, hyphenated ones counting once."""
    from nltk.tokenize import NLTKWordTokenizer

    words = NLTKWordTokenizer()
    # By sentences, as a word's last point and its "n't" are split off at the end of a sentence only.
    return sum(word.isupper() for sentence in punkt().tokenize(text) for word in words.tokenize(sentence))


@cache
def punkt() -> PunktTokenizer:
    """NLTK's splitter of English sentences; its data is fetched where it is on none of NLTK's paths.

    Raises:
        ValueError: it is not there, and can't be fetched. Sentences split otherwise would be other sentences.
    """
    # Imported here: NLTK takes a second, which rows that count no sentences need not pay.
    from nltk.tokenize.punkt import PunktTokenizer

    from grpo_rl.envs.ifeval.punkt import fetch_punkt  # at the top, `python -m` would find it imported already

    fetch_punkt()
    return PunktTokenizer("english")
