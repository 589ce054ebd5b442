"""Sentences and words in capitals, counted as NLTK splits a text."""

from __future__ import annotations

import io
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

if TYPE_CHECKING:
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktTokenizer

PUNKT = "punkt_tab"
"""NLTK's data for sentence splitting; its code comes without."""


@lru_cache(maxsize=256)  # several instructions, and the strict and the loose verdict, ask about the same text
def count_sentences(text: str) -> int:
    """The number of sentences, by NLTK's Punkt for English.

    Raises:
        ValueError: see :func:`require_punkt`.
    """
    return sum(1 for _ in _punkt().span_tokenize(text))


@lru_cache(maxsize=256)
def count_capital_words(text: str) -> int:
    """The number of words without a small letter and with a capital one, hyphenated ones counting once.

    Raises:
        ValueError: see :func:`require_punkt`.
    """
    # By sentences, as a word's last point and its "n't" are split off at the end of a sentence only.
    tokens = (token for sentence in _punkt().tokenize(text) for token in _words().tokenize(sentence))
    return sum(token.isupper() for token in tokens)


def require_punkt() -> None:
    """Returns once NLTK's English sentence data is loaded; fetches it where it is on none of NLTK's paths.

    There is no substitute for it: sentences split otherwise would be other sentences.

    Raises:
        ValueError: it is not there, and can't be fetched.
    """
    _punkt()


@cache
def _punkt() -> PunktTokenizer:
    # Imported here: NLTK takes a second, which rows that count no sentences need not pay.
    import nltk
    from nltk.tokenize.punkt import PunktTokenizer

    try:
        return PunktTokenizer("english")
    except LookupError:
        pass
    folder = Path(nltk.downloader.Downloader().default_download_dir())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{PUNKT}.lock"):  # NLTK unpacks in place, which other processes must not see
            nltk.download(PUNKT, folder, quiet=True, raise_on_error=True, print_error_to=io.StringIO())
        return PunktTokenizer("english")
    except (OSError, ValueError, LookupError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"counting sentences and capital words needs NLTK's {PUNKT}, which is on none of {nltk.data.path} and could "
            f"not be downloaded ({reason}); where there is a network, run `python -m nltk.downloader {PUNKT}`, then copy "
            f"~/nltk_data here and name it in $NLTK_DATA; or leave out the rows with number_sentences or "
            "capital_word_frequency"
        ) from error


@cache
def _words() -> NLTKWordTokenizer:
    from nltk.tokenize import NLTKWordTokenizer

    return NLTKWordTokenizer()
