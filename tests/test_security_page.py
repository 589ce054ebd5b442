"""The page on security names, for each promise, a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def missing(text: str) -> list[str]:
    """Tests that a text names and that are not there."""
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text))
    return [
        f"{file}::{test}"
        for file, test in sorted(named)
        if not (ROOT / file).exists() or f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]


def test_every_promise_names_a_test_that_exists():
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert missing(page) == [] and page.count("`tests/") >= 15
    assert missing("`tests/test_security_page.py::test_nothing`") == ["tests/test_security_page.py::test_nothing"]
