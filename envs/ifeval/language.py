"""The language that a text is in: langdetect, made the same on every call, thread and machine, and faster."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

from langdetect import LangDetectException
from langdetect.detector import Detector
from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
from langdetect.utils.ngram import NGram

SEED = 0
"""Of the features that langdetect samples from a text; unseeded, it judges short texts now so, now so."""


@lru_cache(maxsize=256)  # the strict and the loose verdict ask about the same text
def detect_language(text: str) -> str | None:
    """The ISO 639-1 code of the text's language, of :func:`languages`; None where the text has nothing to tell it by.

    >>> detect_language("Guten Morgen, wie geht es Ihnen heute?"), detect_language("1 + 1 = 2")
    ('de', None)
    """
    detector = _WordwiseDetector(_factory())
    detector.append(text)
    try:
        return detector.detect()
    except LangDetectException:
        return None


@cache
def languages() -> tuple[str, ...]:
    """The codes that langdetect knows, in order.

    >>> len(languages()), languages()[:4]
    (55, ('af', 'ar', 'bg', 'bn'))
    """
    return tuple(sorted(path.name for path in Path(PROFILES_DIRECTORY).iterdir() if not path.name.startswith(".")))


class _WordwiseDetector(Detector):
    """langdetect's detector, with the same features in the same order, found once per word and not once per character.

    Of every character langdetect takes the one, two and three characters that end on it, in a text whose words are
    parted by one space; a capital after a capital it leaves out.
    """

    def append(self, text: str) -> None:
        for address in (self.URL_RE, self.MAIL_RE):
            text = address.sub(" ", text)
        self.text = NGram.normalize_vi(text)[: self.max_text_length]

    def _extract_ngrams(self) -> list[str]:
        *words, last = self.text.translate(_NORMAL).split(" ")
        features = [feature for word in words if word for feature in _features(f" {word} ")]
        return features + list(_features(f" {last}"))


@lru_cache(maxsize=1 << 14)
def _features(word: str) -> tuple[str, ...]:
    """The features that end on each character of ``word`` after its first, the space before it."""
    known = _factory().word_lang_prob_map
    return tuple(
        word[end - size : end]
        for end in range(2, len(word) + 1)
        if not (word[end - 1].isupper() and word[end - 2].isupper())
        for size in range(1, min(end, NGram.N_GRAM) + 1)
        if word[end - size : end] != " " and word[end - size : end] in known
    )


class _Normal(dict[int, str]):
    """Code of a character -> what langdetect takes it for, found when first asked for."""

    def __missing__(self, code: int) -> str:
        self[code] = normal = NGram.normalize(chr(code))
        return normal


_NORMAL = _Normal()


@cache
def _factory() -> DetectorFactory:
    """A detector factory of our own: langdetect's is filled while other threads may use it, and its seed is global."""
    factory = DetectorFactory()
    factory.seed = SEED
    # In order: langdetect itself loads the profiles as the file system lists them, and adds probabilities up likewise.
    factory.load_json_profile([(Path(PROFILES_DIRECTORY) / code).read_text(encoding="utf-8") for code in languages()])
    return factory
