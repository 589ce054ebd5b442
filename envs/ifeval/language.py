"""The language of a text by langdetect, its sentences and words in capitals by NLTK, as in the reference scorer.

The verdicts are the same on every call, thread and machine. Source: https://github.com/Mimino666/langdetect.
"""

from __future__ import annotations

import contextlib
import io
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from langdetect import LangDetectException
from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

from grpo_rl.storage.cache import cache_folder

if TYPE_CHECKING:
    from nltk.tokenize.punkt import PunktTokenizer


@lru_cache(maxsize=32)  # the strict and the loose verdict ask about the same text
def detect_language(text: str) -> str | None:
    """The code of the text's language, ``unknown`` where none fits; None where the text has nothing to tell it by.

    >>> detect_language("Guten Morgen, wie geht es Ihnen heute?"), detect_language("1 + 1 = 2")
    ('de', None)
    """
    detector = detectors().create()
    detector.seed = 0  # unseeded, its result for a short text varies
    detector.append(text)
    try:
        return detector.detect()
    except LangDetectException:
        return None


@cache
def detectors() -> DetectorFactory:
    """Makes detectors; ``langlist`` has the ISO 639-1 codes that they know; Chinese is ``zh-cn`` and ``zh-tw``."""
    factory = DetectorFactory()
    # In order: langdetect itself loads the profiles as the file system lists them, and adds probabilities up likewise.
    profiles = sorted(Path(PROFILES_DIRECTORY).glob("[!.]*"))
    factory.load_json_profile([profile.read_text(encoding="utf-8") for profile in profiles])
    return factory


@lru_cache(maxsize=32)
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

    folder, data = cache_folder() / "nltk_data", "tokenizers/punkt_tab"
    nltk.data.path.append(str(folder))
    with contextlib.suppress(LookupError, OSError):  # it is in no folder, or a file of it lacks
        return PunktTokenizer("english")
    try:
        (folder / data).parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".fetched-") as fetched:  # all of the data or nothing
            nltk.download("punkt_tab", fetched, quiet=True, raise_on_error=True, print_error_to=io.StringIO())
            with contextlib.suppress(OSError):  # another process may be faster
                Path(fetched, data).rename(folder / data)
        return PunktTokenizer("english")
    except (LookupError, OSError, ValueError, SyntaxError) as error:  # a network may answer anything
        raise ValueError(
            f"IFEval counts sentences with NLTK's punkt_tab, which can't be had ({error!s:.200}). Where there is a "
            "network, run `python -m nltk.downloader punkt_tab`, copy ~/nltk_data here and name it in $NLTK_DATA"
        ) from error
