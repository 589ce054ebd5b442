"""Command lines that put a Python interpreter into bubblewrap, with the standard library and nothing else."""

import functools
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

_HOME = "/python"
_UNPRIVILEGED = "65534"


@dataclass(frozen=True)
class Jail:
    """A way to start Python.

    Args:
        words: the command, up to the interpreter.
        python: the interpreter, where it is inside.
        changes_user: the process begins as root and has to give that up; the kernel counts no threads of root's.
    """

    words: tuple[str, ...]
    python: str
    changes_user: bool = False

    def command(self) -> list[str]:
        """The command that starts the interpreter."""
        return [*self.words, *(["--"] if self.words else ()), self.python]

    def user(self) -> int:
        """The user to become, one of its own for each process, as the kernel counts threads by user; 0: the same."""
        return random.SystemRandom().randrange(10**9, 2 * 10**9) if self.changes_user else 0


def no_jail() -> Jail:
    """Python as it is."""
    return Jail((), _interpreter())


def jails() -> list[Jail]:
    """Ways to start Python in bubblewrap, the best first; none where its command is missing."""
    command = shutil.which("bwrap")
    if not command or sys.platform != "linux":
        return []
    words = [command, "--die-with-parent", "--new-session", "--chdir", "/", "--cap-drop", "ALL"]
    words += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    # Folders that it makes by itself only their owner may enter, who is another one when the program runs.
    for folder in sorted({str(parent) for _, inside in _files() for parent in Path(inside).parents} - {"/"}):
        words += ["--perms", "0755", "--dir", folder]
    for source, inside in _files():
        words += ["--ro-bind", source, inside]
    for hidden in _hidden():
        words += ["--tmpfs", hidden, "--remount-ro", hidden]
    words += ["--dev-bind", "/dev/null", "/dev/null", "--remount-ro", "/"]
    python = f"{_HOME}/bin/python3"
    mapped = Jail((*words, "--unshare-user", "--uid", _UNPRIVILEGED, "--gid", _UNPRIVILEGED), python)
    if os.getuid():
        return [mapped]
    return [Jail((*words, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"), python, changes_user=True), mapped]


ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}
"""All variables of the process; without a fixed seed the order of a set would change from run to run."""


def _interpreter() -> str:
    return os.path.realpath(sys.executable)


@functools.cache
def _files() -> tuple[tuple[str, str], ...]:
    library = Path(sysconfig.get_path("stdlib"))
    inside = f"{_HOME}/{os.path.relpath(library, sys.base_prefix)}"
    files = {_interpreter(): f"{_HOME}/bin/python3", str(library): inside}
    modules = [path for path in sorted((library / "lib-dynload").glob("*.so")) if "tkinter" not in path.name]
    listed = subprocess.run(["ldd", _interpreter(), *map(str, modules)], capture_output=True, text=True).stdout
    for path in sorted(set(re.findall(r"(?:=> |^\s+)(/\S+)", listed, re.MULTILINE))):
        files[os.path.realpath(path)] = path
        if (threads := Path(path).with_name("libgcc_s.so.1")).exists():  # loaded where a thread ends
            files[os.path.realpath(threads)] = str(threads)
    return tuple(files.items())


def _hidden() -> list[str]:
    """Folders inside the standard library that hold other packages, this one perhaps."""
    inside = dict(_files())[sysconfig.get_path("stdlib")]
    library = Path(sysconfig.get_path("stdlib"))
    return [f"{inside}/{name}" for name in ("site-packages", "dist-packages") if (library / name).is_dir()]
