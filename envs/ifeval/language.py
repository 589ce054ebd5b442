"""The language of a text: langdetect's verdict, the same on every call, thread and machine, and three times as fast.

Source: https://github.com/Mimino666/langdetect, which the reference scorer uses, and whose tables and normalisation are
used here. It takes for the features of a text the one, two and three characters that end on each of its characters; in
seven trials it draws features until one language has a probability near 1; and it adds the trials up.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from langdetect.detector import Detector
from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
from langdetect.utils.ngram import NGram

SEED = 0
"""The seed of its draws; unseeded, langdetect judges the same short text now so, now so."""
TRIALS = 7
MAX_CHARACTERS = 10_000


@lru_cache(maxsize=32)  # the strict and the loose verdict ask about the same text
def detect_language(text: str) -> str | None:
    """The code of the text's language, of :func:`languages`; None where the text has nothing to tell it by.

    ``unknown`` is a text that no language fits.

    >>> detect_language("Guten Morgen, wie geht es Ihnen heute?"), detect_language("1 + 1 = 2")
    ('de', None)
    """
    features = _features(text)
    if not features:
        return None
    chances = _chances(features)
    first = int(chances.argmax())
    return languages()[first] if chances[first] > Detector.PROB_THRESHOLD else Detector.UNKNOWN_LANG


@cache
def languages() -> tuple[str, ...]:
    """The ISO 639-1 codes that langdetect knows, in order; Chinese is ``zh-cn`` and ``zh-tw``.

    >>> len(languages()), languages()[:4]
    (55, ('af', 'ar', 'bg', 'bn'))
    """
    return tuple(sorted(path.name for path in Path(PROFILES_DIRECTORY).iterdir() if not path.name.startswith(".")))


def _chances(features: Sequence[np.ndarray]) -> np.ndarray:
    """The probability of each language, up to trials that can't change which one comes first."""
    rng = random.Random(SEED)
    chances = np.zeros(len(languages()))
    for trials_left in reversed(range(TRIALS)):
        smoothing = (Detector.ALPHA_DEFAULT + rng.gauss(0.0, 1.0) * Detector.ALPHA_WIDTH) / Detector.BASE_FREQ
        trial = np.full(len(languages()), 1.0 / len(languages()))
        for step in range(Detector.ITERATION_LIMIT + 1):
            trial *= smoothing + rng.choice(features)
            if step % 5 == 0:
                trial /= sum(trial.tolist())  # not numpy's sum, which adds in another order
                if trial.max() > Detector.CONV_THRESHOLD:
                    break
        chances += trial / TRIALS
        second, first = np.sort(chances)[-2:]
        if first - second > trials_left / TRIALS + 1e-9:
            break
    return chances


def _features(text: str) -> list[np.ndarray]:
    """The share that each feature of the text has in each language, in the text's order."""
    for address in (Detector.URL_RE, Detector.MAIL_RE):
        text = address.sub(" ", text)
    text = NGram.normalize_vi(text)[:MAX_CHARACTERS]
    counts = Counter(text)
    latin = sum(count for character, count in counts.items() if "A" <= character <= "z")
    other = sum(count for character, count in counts.items() if character >= "\u0300")
    if latin * 2 < other:
        text = re.sub("[A-z]", "", text)
    *words, last = text.translate(_NORMAL).split(" ")
    return [feature for word in [*(f" {word} " for word in words if word), f" {last}"] for feature in _of_word(word)]


def _of_word(word: str) -> tuple[np.ndarray, ...]:
    # Long ones, as in scripts without spaces, hardly come again, and would fill the memory.
    return _of_short_word(word) if len(word) < 32 else _of_short_word.__wrapped__(word)


@lru_cache(maxsize=1 << 14)
def _of_short_word(word: str) -> tuple[np.ndarray, ...]:
    """The features that end on each character after the first, which is a space. A capital after a capital has none."""
    known = _shares()
    features = []
    for end in range(2, len(word) + 1):
        if word[end - 1].isupper() and word[end - 2].isupper():
            continue
        for size in range(1, min(end, NGram.N_GRAM) + 1):
            share = known.get(word[end - size : end])
            if share is not None:
                features.append(share)
    return tuple(features)


@cache
def _shares() -> dict[str, np.ndarray]:
    """Feature -> its share in each language."""
    factory = DetectorFactory()
    # In order: langdetect itself loads the profiles as the file system lists them, and adds probabilities up likewise.
    factory.load_json_profile([(Path(PROFILES_DIRECTORY) / code).read_text(encoding="utf-8") for code in languages()])
    # A space alone is none.
    return {feature: np.array(share) for feature, share in factory.word_lang_prob_map.items() if feature != " "}


class _Normal(dict[int, str]):
    """Code of a character -> what langdetect takes it for, found when first asked for."""

    def __missing__(self, code: int) -> str:
        self[code] = normal = NGram.normalize(chr(code))
        return normal


_NORMAL = _Normal()
