"""The language that a text is in: langdetect, made the same on every call, thread and machine, and faster."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
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
    detector = _FastDetector(_factory())
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


class _FastDetector(Detector):
    """langdetect's detector, with the same results: it goes by words and arrays, not by characters and lists.

    A feature is the one, two or three characters that end on a character, in a text whose words are parted by one
    space; a capital after a capital has none. Probabilities are added up in langdetect's order, to the same last bit.
    """

    def append(self, text: str) -> None:
        for address in (self.URL_RE, self.MAIL_RE):
            text = address.sub(" ", text)
        self.text = NGram.normalize_vi(text)[: self.max_text_length]

    def cleaning_text(self) -> None:
        counts = Counter(self.text)
        latin = sum(count for character, count in counts.items() if "A" <= character <= "z")
        other = sum(count for character, count in counts.items() if character >= "\u0300")
        if latin * 2 < other:
            self.text = re.sub("[A-z]", "", self.text)

    def _extract_ngrams(self) -> list[str]:
        *words, last = self.text.translate(_NORMAL).split(" ")
        features = [feature for word in words if word for feature in _features(f" {word} ")]
        return features + list(_features(f" {last}"))

    def _init_probability(self) -> np.ndarray:
        return np.full(len(self.langlist), 1.0 / len(self.langlist))

    def _update_lang_prob(self, prob: np.ndarray, word: str, alpha: float) -> None:
        prob *= alpha / self.BASE_FREQ + self.word_lang_prob_map[word]

    def _normalize_prob(self, prob: np.ndarray) -> float:
        prob /= sum(prob.tolist())  # not numpy's sum, which adds in another order
        return prob.max()


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
    factory.word_lang_prob_map = {feature: np.array(shares) for feature, shares in factory.word_lang_prob_map.items()}
    return factory
