"""The field's words: names and texts of the package, tasks, scripts and settings keep to them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SAY = {
    r"rewarded.alike": "zero variance",
    r"(?<![a-z])refill": "resample; dynamic sampling",
    r"\bannotate": "add_log_probs",
    r"\bledger": "staleness manager",
    r"\bhaving\(": "with_overrides",
    r"\bberths?\b": "engine slot",
    r"\bnewcomer": "new engine",
    r"\bafloat\b": "ready",
    r"\bblame": "cause",
}


def strange_words(text: str) -> list[str]:
    """The line, the word and what to say instead, of each word that the field does not use."""
    return [
        f"{number}: {found.group()!r}; say {instead}"
        for number, line in enumerate(text.splitlines(), 1)
        for word, instead in SAY.items()
        for found in re.finditer(word, line, re.IGNORECASE)
    ]


@pytest.mark.parametrize("folder", ["grpo_rl", "envs", "sota", "config", "benchmarks"])
def test_the_words_are_those_of_the_field(folder):
    files = [path for kind in ("*.py", "*.yaml") for path in (ROOT / folder).rglob(kind)]
    assert files
    told = {str(path.relative_to(ROOT)): words for path in files if (words := strange_words(path.read_text()))}
    assert not told


def test_a_strange_word_is_told_with_its_line():
    assert strange_words("fine\nThe ledger\ntrain.max_resamples") == ["2: 'ledger'; say staleness manager"]
