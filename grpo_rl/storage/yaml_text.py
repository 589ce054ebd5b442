"""YAML texts, whose errors are of one kind, and values by their dotted names."""

from collections.abc import Mapping
from typing import Any

import yaml

MOST_VALUES, DEEPEST = 1_000_000, 100
"""Values of a text with its aliases written out (nine lines of ten aliases stand for 1e9), and levels of nesting."""


def read_yaml(text: str) -> Any:
    """Reads a YAML text; an empty one holds None.

    Raises:
        ValueError: it is no YAML, a value does not fit its tag or holds itself, or there are too many or too deep ones.

    >>> read_yaml("a: &a [*a]")
    Traceback (most recent call last):
    ValueError: it holds more than a million values, with its aliases written out, or more than 100 levels
    """
    try:
        value = yaml.safe_load(text)
        size, depth = _measured(value, {})
    except RecursionError:
        value, size, depth = None, 0, DEEPEST + 1
    except (yaml.YAMLError, ValueError, OverflowError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(_fault(error)) from error
    if size > MOST_VALUES or depth > DEEPEST:
        raise ValueError("it holds more than a million values, with its aliases written out, or more than 100 levels")
    return value


def _fault(error: Exception) -> str:
    """The place in a YAML text and the reason; without the value, which may be a secret."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark or error.context_mark):
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"
    return f"it is no YAML ({type(error).__name__})"


def _measured(value: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """The number of values, with aliases written out, and of levels; of what holds itself, too many."""
    if not isinstance(value, dict | list | tuple | set):
        return 1, 0
    if id(value) not in known:
        known[id(value)] = MOST_VALUES, DEEPEST  # while it is measured
        inner = value.values() if isinstance(value, dict) else value
        sizes, depths = zip((0, 0), *(_measured(each, known) for each in inner), strict=True)
        known[id(value)] = 1 + sum(sizes), 1 + max(depths)
    return known[id(value)]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested mapping by dotted name; lists and empty mappings are values.

    >>> flat({"a": {"b": 1, "rewards": {}}, "c": [2], "resume": None})
    {'a.b': 1, 'a.rewards': {}, 'c': [2], 'resume': None}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found
