"""The language of a text: langdetect's verdict, the same on every call, thread and machine.

Source: https://github.com/Mimino666/langdetect, which the reference scorer uses.
"""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

from langdetect import LangDetectException
from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

SEED = 0
"""The seed of its draws; unseeded, langdetect judges the same short text now so, now so."""


@lru_cache(maxsize=32)  # the strict and the loose verdict ask about the same text
def detect_language(text: str) -> str | None:
    """The code of the text's language, of :func:`languages`; None where the text has nothing to tell it by.

    ``unknown`` is a text that no language fits.

    >>> detect_language("Guten Morgen, wie geht es Ihnen heute?"), detect_language("1 + 1 = 2")
    ('de', None)
    """
    detector = _factory().create()
    detector.seed = SEED
    detector.append(text)
    try:
        return detector.detect()
    except LangDetectException:
        return None


@cache
def languages() -> tuple[str, ...]:
    """The ISO 639-1 codes that langdetect knows, in order; Chinese is ``zh-cn`` and ``zh-tw``.

    >>> len(languages()), languages()[:4]
    (55, ('af', 'ar', 'bg', 'bn'))
    """
    return tuple(sorted(path.name for path in Path(PROFILES_DIRECTORY).iterdir() if not path.name.startswith(".")))


@cache
def _factory() -> DetectorFactory:
    factory = DetectorFactory()
    # In order: langdetect itself loads the profiles as the file system lists them, and adds probabilities up likewise.
    factory.load_json_profile([(Path(PROFILES_DIRECTORY) / code).read_text(encoding="utf-8") for code in languages()])
    return factory
