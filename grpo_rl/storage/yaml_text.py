"""Reads YAML, whose errors are of one kind."""

from __future__ import annotations

import traceback
from typing import Any

import yaml
from yaml.reader import ReaderError

MOST_VALUES, DEEPEST = 1_000_000, 100
"""Values of a text with its aliases written out (nine lines of ten aliases stand for 1e9), and levels of nesting."""


def read_yaml(text: str) -> Any:
    """Reads a YAML text; an empty one holds None.

    Raises:
        ValueError: it is no YAML, a value does not fit its tag or holds itself, or there are too many or too deep ones.

    >>> read_yaml("a: [1, 2.5]")
    {'a': [1, 2.5]}
    >>> read_yaml("a: !!bool x")
    Traceback (most recent call last):
    ValueError: line 1, column 4: the value is no bool
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
        raise ValueError(fault(error) or f"it is no YAML ({type(error).__name__})") from error
    if size > MOST_VALUES or depth > DEEPEST:
        raise ValueError("it holds more than a million values, with its aliases written out, or more than 100 levels")
    return value


def fault(error: BaseException) -> str | None:
    """The place of what is wrong in a YAML text, and the reason; None for an error that is none of PyYAML's.

    The value is not told where it does not fit its tag, for which PyYAML raises nearly any kind: it may be a secret.
    """
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark or error.context_mark):
        reason = " ".join(filter(None, (error.problem, error.context)))
    elif isinstance(error, ReaderError):
        return f"character {error.position + 1}: {error.reason}"
    else:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        made = [frame.f_locals["node"] for frame in frames if frame.f_code.co_name == "construct_object"]
        if not made:
            return None
        mark, reason = made[-1].start_mark, f"the value is no {made[-1].tag.rpartition(':')[2]}"
    return f"line {mark.line + 1}, column {mark.column + 1}: {reason}"


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
