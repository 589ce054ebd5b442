"""Reads YAML, whose errors are of one kind."""

from __future__ import annotations

from typing import Any

import yaml


def read_yaml(text: str) -> Any:
    """What a YAML text holds; None for an empty one.

    Raises:
        ValueError: it is no YAML, a value does not fit its tag, or it is nested too deeply for Python.

    >>> read_yaml("a: [1, 2.5]")
    {'a': [1, 2.5]}
    >>> read_yaml("a: !!bool x")
    Traceback (most recent call last):
    ValueError: a value does not fit its tag: KeyError('x')
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (LookupError, AttributeError, TypeError) as error:  # of PyYAML's own constructors
        raise ValueError(f"a value does not fit its tag: {error!r}") from error
