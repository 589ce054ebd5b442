"""The checks of a judge's settings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""Names of environment variables."""


def check_texts(url: Any, model: Any, rubric: Any, variable: Any) -> None:
    """Refuses an endpoint or a rubric that is none, and a key where none belongs; the key is not repeated."""
    for name, value in {"url": url, "model": model, "rubric": rubric}.items():
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{name} is {value!r}; it must be a text")
    parts = urlsplit(url)
    if "?" in url or "#" in url:  # not repeated: some endpoints take keys there
        raise ValueError("url has a query or fragment; give the endpoint's address alone, and its key by auth_variable")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url={url} is no http:// or https:// address, such as http://localhost:8000/v1")
    if parts.username or parts.password:
        raise ValueError("url has a user or password; give the endpoint's key by auth_variable")
    if variable is not None and not (isinstance(variable, str) and VARIABLE.fullmatch(variable)):
        # Not repeated: it may be the key itself.
        raise ValueError("auth_variable is no name of an environment variable, such as OPENAI_API_KEY")


def check_numbers(finite: Mapping[str, Any], positive: Mapping[str, Any]) -> None:
    """Refuses what is no finite number, and of ``positive`` what is not above 0."""
    for name, value in {**finite, **positive}.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or (name not in finite and value <= 0) or (name.endswith("price") and value < 0):
            raise ValueError(f"{name} is {value!r}; it must be a finite number" + " above 0" * (name not in finite))


def check_counts(needed: Mapping[str, Any], budgets: Mapping[str, Any]) -> None:
    """Refuses what is no whole number, and a budget of 0."""
    for name, value in {**needed, **{name: most for name, most in budgets.items() if most is not None}}.items():
        least = 0 if name == "retries" else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is {value!r}; it must be a whole number, {least} or more")


def check_truths(given: Mapping[str, Any]) -> None:
    """Refuses what is neither true nor false."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be true or false")
