"""An object of the user's own code, found by ``package.module:name``: a task, a reward or loss function, a logger."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any

_OURS = os.path.dirname(__file__) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def is_name(text: object) -> bool:
    """Tells whether a setting's value names an object of a module, rather than one of the choices.

    >>> is_name("my_tasks:Rhyme"), is_name("gsm8k"), is_name(":Rhyme"), is_name("C:/rows.jsonl")
    (True, False, False, False)
    """
    module, _, name = str(text).partition(":")
    return bool(module and name) and all(part.isidentifier() for part in [*module.split("."), *name.split(".")])


def short_name(task: str) -> str:
    """The name of a task in metrics and in keys such as ``path.NAME``: its own, or that of its class.

    >>> short_name("gsm8k"), short_name("my_tasks:Rhyme")
    ('gsm8k', 'Rhyme')
    """
    return task.rpartition(":")[2]


def object_by_name(name: str, key: str, is_wanted: Callable[[Any], bool] = inspect.isfunction) -> Any:
    """The object that ``package.module:name`` names, in an installed package, on PYTHONPATH or in the current folder.

    The current folder stays on ``sys.path``, after all else, so that processes started later find the module too.

    Args:
        name: the module, a colon, and the object's name in it.
        key: the setting that named it, for messages.
        is_wanted: tells which of the module's objects a message suggests where there is none of this name.

    Raises:
        ValueError: there is no such module or object, or the module can't be imported; in one line.

    >>> object_by_name("json:dumps", "env.reward")([1])
    '[1]'
    """
    module_name, colon, object_name = name.partition(":")
    if not (module_name and colon and object_name):
        raise ValueError(f"{key}={name} is no package.module:name")
    if not is_name(name):
        raise ValueError(f"{key}={name} is no package.module:name: names are joined by dots, without .py or folders")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # last: a file of the user's named like a library must not replace it everywhere
        importlib.invalidate_caches()
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{key}={name}: there is no module {error.name}, neither in {folder} nor among what is installed; "
                "run in its folder, or put its folder into PYTHONPATH"
            ) from error
        raise ValueError(f"{key}={name}: {module_name} needs the module {error.name}; install it") from error
    except Exception as error:
        raise ValueError(f"{key}={name}: importing {module_name} failed: {one_line(error)}") from error
    try:
        for attribute in object_name.split("."):
            found = getattr(found, attribute)
    except AttributeError as error:
        raise ValueError(f"{key}={name}: {_what_there_is(module_name, object_name, is_wanted)}") from error
    return found


def one_line(error: BaseException) -> str:
    """An error of the user's code in one line, with his file and line.

    >>> try:
    ...     {}["gold"]
    ... except KeyError as error:
    ...     one_line(error)
    "KeyError: 'gold' (..., line 2)"
    """
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
    at = getattr(error, "raised_at", None) or raised_at(error)
    return f"{text} ({at})" if at else text


def raised_at(error: BaseException) -> str:
    """The file and line of the user's code that raised an error; empty where it was none of his."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [f"{file}, line {line}" for file, line in frames if not file.startswith((_OURS, "<frozen", *_LIBRARIES))]
    return own[-1] if own else ""


def _what_there_is(module_name: str, object_name: str, is_wanted: Callable[[Any], bool]) -> str:
    module = sys.modules[module_name]
    there = [key for key, value in vars(module).items() if is_wanted(value) and not key.startswith("_")]
    own = [key for key in there if getattr(getattr(module, key), "__module__", None) == module_name] or there
    close = difflib.get_close_matches(object_name, own, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    where = getattr(module, "__file__", None) or "built in"
    return f"{module_name} ({where}) has no {object_name}, only {', '.join(own) or 'nothing of its kind'}{hint}"
