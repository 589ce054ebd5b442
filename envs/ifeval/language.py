"""The language that a text is in: langdetect, made the same on every call, thread and machine."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

from langdetect import LangDetectException
from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

SEED = 0
"""Of the features that langdetect samples from a text; unseeded, it judges short texts now so, now so."""


@lru_cache(maxsize=256)  # several instructions, and the strict and the loose verdict, ask about the same text
def detect_language(text: str) -> str | None:
    """The ISO 639-1 code of the text's language, of :func:`languages`; None where the text has nothing to tell it by.

    >>> detect_language("Guten Morgen, wie geht es Ihnen heute?"), detect_language("1 + 1 = 2")
    ('de', None)
    """
    detector = _factory().create()
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


@cache
def _factory() -> DetectorFactory:
    """A detector factory of our own: langdetect's is filled while other threads may use it, and its seed is global."""
    factory = DetectorFactory()
    factory.seed = SEED
    # In order: langdetect itself loads the profiles as the file system lists them, and adds probabilities up likewise.
    factory.load_json_profile([(Path(PROFILES_DIRECTORY) / code).read_text(encoding="utf-8") for code in languages()])
    return factory
