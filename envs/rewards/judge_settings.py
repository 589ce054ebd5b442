"""The checks of a judge's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""Names of environment variables."""
LEAST = {"max_tokens": 1, "concurrency": 1, "budget_calls": 1, "budget_tokens": 1, "deadline_s": 0.001}
"""The least that settings can be; other numbers can be 0."""


def check_endpoint(url: str, variable: str | None) -> None:
    """Refuses an endpoint that is none, and a key where none belongs; the key is not repeated."""
    parts = urlsplit(url)
    if "?" in url or "#" in url:  # not repeated: some endpoints take keys there
        raise ValueError("url has a query or fragment; give the endpoint's address alone, and its key by auth_variable")
    if parts.username or parts.password:
        raise ValueError("url has a user or password; give the endpoint's key by auth_variable")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url={url} is no http:// or https:// address, such as http://localhost:8000/v1")
    if variable is not None and not VARIABLE.fullmatch(variable):
        # Not repeated: it may be the key itself.
        raise ValueError("auth_variable is no name of an environment variable, such as OPENAI_API_KEY")


def check_numbers(given: Mapping[str, float]) -> None:
    """Refuses numbers that are too small."""
    for name, value in given.items():
        if not LEAST.get(name, 0) <= value < float("inf"):
            raise ValueError(f"{name} is {value}; it must be finite, and {LEAST.get(name, 0)} or more")
