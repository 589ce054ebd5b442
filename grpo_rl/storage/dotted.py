"""Settings by their dotted names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested mapping by dotted name; lists and empty mappings are values.

    >>> flat({"a": {"b": 1, "rewards": {}}, "c": [2], "resume": None})
    {'a.b': 1, 'a.rewards': {}, 'c': [2], 'resume': None}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found
