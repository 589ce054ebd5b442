"""Reads YAML, whose errors are of one kind."""

from __future__ import annotations

import json
from typing import Any

import yaml


def read_yaml(text: str) -> Any:
    """What a YAML text holds; None for an empty one.

    Raises:
        ValueError: it is no YAML, a value does not fit its tag, holds itself, or is nested too deeply for Python.

    >>> read_yaml("a: [1, 2.5]")
    {'a': [1, 2.5]}
    >>> read_yaml("a: !!bool x")
    Traceback (most recent call last):
    ValueError: a value does not fit its tag: KeyError('x')
    >>> read_yaml("a: &a [*a]")
    Traceback (most recent call last):
    ValueError: a value is nested too deeply, or holds itself
    """
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("a value is nested too deeply, or holds itself") from error
    except (ValueError, OverflowError, LookupError, AttributeError, TypeError) as error:  # of PyYAML's constructors
        raise ValueError(f"a value does not fit its tag: {error!r}") from error
    try:
        json.dumps(value, default=str, skipkeys=True)
    except (ValueError, RecursionError):
        raise ValueError("a value is nested too deeply, or holds itself") from None
    return value
