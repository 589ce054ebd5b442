"""Sentences and words in capitals, counted as NLTK splits a text."""

from __future__ import annotations

import io
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from grpo_rl.storage.cache import cache_folder

if TYPE_CHECKING:
    from nltk.tokenize.punkt import PunktTokenizer

DATA = Path("tokenizers", "punkt_tab")


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
    """NLTK's splitter of English sentences; its data is downloaded where it is in none of NLTK's folders.

    Raises:
        ValueError: it is not there, and can't be downloaded. Sentences split otherwise would be other sentences.
    """
    # Imported here: NLTK takes a second, which rows that count no sentences need not pay.
    import nltk
    from nltk.tokenize.punkt import PunktTokenizer

    folder, reason = cache_folder() / "nltk_data", ""
    if str(folder) not in nltk.data.path:
        nltk.data.path.append(str(folder))
    try:
        return PunktTokenizer("english")
    except (LookupError, OSError):
        try:
            _download(folder)
        except (OSError, ValueError, SyntaxError) as error:  # a network may answer anything
            reason = " ".join(str(error).split())[:200]
    try:
        return PunktTokenizer("english")
    except (LookupError, OSError) as error:  # it is in no folder, or a file of it lacks
        raise ValueError(
            "counting sentences and capital words, as IFEval does, needs NLTK's punkt_tab, which is in none of NLTK's "
            f"folders and could not be downloaded ({reason}). Where there is a network, run "
            "`python -m nltk.downloader punkt_tab`, copy ~/nltk_data here and name it in $NLTK_DATA; or leave out the "
            "rows with number_sentences or capital_word_frequency"
        ) from error


def _download(folder: Path) -> None:
    """Downloads the data, all of it or nothing."""
    import nltk

    (folder / DATA).parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".fetched-") as temporary:
        quiet = {"quiet": True, "print_error_to": io.StringIO()}
        nltk.download(DATA.name, download_dir=temporary, raise_on_error=True, **quiet)
        Path(temporary, DATA).rename(folder / DATA)  # fails where another process was faster
