"""An object of the user's own code, found by ``package.module:name``: a task, a reward or loss function, a logger."""

import difflib
import functools
import importlib
import os
import sys
import sysconfig
import traceback
from typing import Any

_OURS = os.path.dirname(__file__) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def is_name(text: object) -> bool:
    """True if a setting's value names an object of a module, rather than one of the choices.

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


def object_by_name(name: str, key: str) -> Any:
    """The object that ``package.module:name`` names, in an installed package, on PYTHONPATH or in the current folder.

    The current folder stays on ``sys.path``, after all else, so that processes started later find the module too.

    Args:
        name: the module, a colon, and the object's name in it.
        key: the setting that named it, for messages.

    Raises:
        ValueError: there is no such module or object, or the module can't be imported; in one line.

    >>> object_by_name("json:dumps", "env.reward")([1])
    '[1]'
    """
    if not is_name(name):
        raise ValueError(f"{key}={name} is no package.module:name: names are joined by dots, without .py or folders")
    module_name, _, object_name = name.partition(":")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # last: a file of the user's named like a library must not replace it everywhere
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        hint = f"; modules are looked for in {folder}, in PYTHONPATH and among what is installed"
        hint *= isinstance(error, ModuleNotFoundError)
        raise ValueError(f"{key}={name}: importing {module_name} failed: {one_line(error)}{hint}") from error
    try:
        return functools.reduce(getattr, object_name.split("."), module)
    except AttributeError as error:
        close = difflib.get_close_matches(object_name, vars(module), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        where = getattr(module, "__file__", None) or "built in"
        raise ValueError(f"{key}={name}: {module_name} ({where}) has no {object_name}{hint}") from error


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
