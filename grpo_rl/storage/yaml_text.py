"""Reads YAML, whose errors are of one kind."""

from __future__ import annotations

import traceback
from typing import Any

import yaml

MOST_VALUES = 1_000_000
"""Values of a text with its aliases written out: nine lines of ten aliases each are a thousand million."""


def read_yaml(text: str) -> Any:
    """What a YAML text holds; None for an empty one.

    Raises:
        ValueError: it is no YAML, a value does not fit its tag, holds itself, or is too large or nested too deeply.

    >>> read_yaml("a: [1, 2.5]")
    {'a': [1, 2.5]}
    >>> read_yaml("a: !!bool x")
    Traceback (most recent call last):
    ValueError: line 1, column 4: the value is no bool
    >>> read_yaml("a: &a [*a]")
    Traceback (most recent call last):
    ValueError: a value holds itself, is nested too deeply, or its aliases stand for a million values
    """
    try:
        value = yaml.safe_load(text)
        ends = _size(value, {}) < MOST_VALUES
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        ends = False
    except (ValueError, OverflowError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(misfit(error)) from error
    if not ends:
        raise ValueError("a value holds itself, is nested too deeply, or its aliases stand for a million values")
    return value


def misfit(error: BaseException) -> str | None:
    """The place of a value that does not fit its tag, if PyYAML raised the error while making it: it raises any kind.

    The value, which may be a secret, is not told.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    made = [frame.f_locals["node"] for frame in frames if frame.f_code.co_name == "construct_object"]
    if not made:
        return None
    mark, kind = made[-1].start_mark, made[-1].tag.rpartition(":")[2]
    return f"line {mark.line + 1}, column {mark.column + 1}: the value is no {kind}"


def _size(value: Any, known: dict[int, int]) -> int:
    """The number of values inside; of one that holds itself, too many."""
    if not isinstance(value, dict | list | tuple | set):
        return 1
    if id(value) not in known:
        known[id(value)] = MOST_VALUES  # while it is counted
        known[id(value)] = 1 + sum(_size(v, known) for v in (value.values() if isinstance(value, dict) else value))
    return known[id(value)]
