"""Canaries: what a run of code out of a text would touch, and a hook of the interpreter that names the attempt."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fuzz_inputs import CANARY

VALUE = "value-of-the-canary-7c1f"
FORBIDDEN = (
    "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "pickle.find_class", "code.", "urllib.", "ftplib.",
    "webbrowser.", "signal.", "sqlite3.", "tempfile.",
)  # fmt: skip
"""Beginnings of the interpreter's audit events that reading a text has no use for."""
NAMED = (CANARY, "etc/passwd")
"""Parts of the names of files that inputs name: to open one, even to read it, is to obey the input."""
OF_DECLARATIONS = ("/typing.py", "/dataclasses.py", "/collections/__init__.py", "/sympy/polys/monomials.py")
"""Modules that execute code generated for annotations, dataclasses and polynomials; none of it comes from an input."""
OF_TEMPLATES = ("/jinja2/environment.py", "/jinja2/debug.py")
"""Modules that execute templates as compiled for the sandbox; whatever leaves it makes another event."""
OF_A_NUMBER = frozenset(("Integer", "Float", "sympy"))
"""The names in the code that sympy makes of the digits of a number, which is all that it is given of an answer."""
HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "ctypes.cdata", "ctypes.get_errno", "socket.gethostname")

_armed = False
_seen: list[str] = []
_hooked = False


def _hook(event: str, arguments: tuple) -> None:
    if not _armed:
        return
    if event == "open":
        path, mode, flags = arguments
        writes = mode and set(str(mode)) & set("wxa+")
        writes = writes or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))
        if writes or any(name in str(path) for name in NAMED):
            _seen.append(f"open {path!r} {mode}")
    elif event == "exec":
        code, caller = arguments[0], sys._getframe(1).f_code.co_filename
        # A module's own code, imported late, has a file.
        own = Path(code.co_filename).is_absolute() or caller.endswith((*OF_DECLARATIONS, *OF_TEMPLATES))
        number = caller.endswith("sympy/parsing/sympy_parser.py") and set(code.co_names) <= OF_A_NUMBER
        if not own and not number:
            _seen.append(f"exec {code.co_names} in {caller}")
    elif event == "code.__new__" and sys._getframe(1).f_code.co_filename.endswith(OF_TEMPLATES):
        return  # jinja names the template's line in a traceback
    elif event.startswith(FORBIDDEN) and event not in HARMLESS:
        _seen.append(f"{event} {arguments!r:.200}")


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Yields the list of what the code inside did that reading a text has no use for."""
    global _armed, _hooked
    if not _hooked:
        sys.addaudithook(_hook)  # there is no way to take it away
        _hooked = True
    _seen.clear()
    _armed = True
    try:
        yield _seen
    finally:
        _armed = False


def plant() -> None:
    """Puts the canary into the environment, for this process and its workers."""
    os.environ[CANARY] = VALUE


def touched(folder: Path) -> list[str]:
    """Harm that the canaries show: a file in the working folder, or another value in the environment."""
    found = [str(path) for path in (folder / CANARY, Path(CANARY)) if path.exists()]
    return found + ([] if os.environ.get(CANARY) == VALUE else ["the environment variable"])
