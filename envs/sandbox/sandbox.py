"""Sandbox: runs untrusted programs where they can read nothing, reach no one, and take no more than they may."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import platform
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from grpo_rl.envs.guards.isolation import Child
from grpo_rl.envs.sandbox.jails import ENVIRONMENT, Jail, jails, no_jail

DENIED: Mapping[str, tuple[int | None, int | None]] = {
    # no further process, and no other program
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    # no look into other processes, and no signal to them
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    # no network; io_uring would make the calls that are denied here
    "socket": (41, 198), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # no other view of the files
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # no memory that the limit of the address space does not count
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219),
    # parts of the kernel that have let programs out before
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "personality": (135, 92),
    "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
}  # fmt: skip
"""Names of system calls, with their numbers on x86-64 and ARM64; None: there is no such call."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""Each machine's column in :data:`DENIED`, its name in the kernel, and the number of its ``clone``."""
_CLONE3, _CLONE_THREAD, _X32 = 435, 0x10000, 0x40000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_KILL, _FAIL, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000

Kind = Literal["bubblewrap", "i_accept_no_sandbox"]
UNPROTECTED = "i_accept_no_sandbox"
_INSIDE = Path(__file__).with_name("inside.py")
_CPU_SPENT = [code for number in (signal.SIGXCPU, signal.SIGKILL) for code in (-number, 128 + number)]
"""Exit codes of a program that took its CPU seconds, and of a jail around it; the kernel kills what ignores the first
signal."""
_END_S = 1.0
"""Seconds in which a program ends after its tests."""
_START_S = 5.0
"""Seconds on top of a program's own that its interpreter may take to start, on a machine that is busy."""


@dataclass(frozen=True)
class Limits:
    """The limits of one program.

    Args:
        memory_mib: address space.
        cpu_s: CPU seconds, rounded up.
        wall_s: seconds until it is killed, besides its start, which has 5; None: three times ``cpu_s``.
        output_kib: output, and the size of any file.
        threads, open_files: at the same time.
    """

    memory_mib: int = 1024
    cpu_s: float = 5.0
    wall_s: float | None = None
    output_kib: int = 1024
    threads: int = 32
    open_files: int = 64

    @property
    def until_killed_s(self) -> float:
        """Seconds that a program may take by the clock, its start among them."""
        return _START_S + (3 * self.cpu_s if self.wall_s is None else self.wall_s)

    def resources(self) -> dict[str, tuple[int, int]]:
        """The limits of the kernel, soft and hard, by their names in `resource`."""
        cpu_s = max(1, math.ceil(self.cpu_s))
        same = {
            "RLIMIT_AS": self.memory_mib * 2**20,
            "RLIMIT_FSIZE": self.output_kib * 1024,
            "RLIMIT_NPROC": self.threads,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }
        # At the soft limit the signal shows why; a program that ignores it has a second more.
        return {"RLIMIT_CPU": (cpu_s, cpu_s + 1), **{name: (value, value) for name, value in same.items()}}


@dataclass(frozen=True)
class Outcome:
    """The end of a program.

    Args:
        stderr: the end of what it wrote there.
        exit_code: 0 for a program that ended by itself; below 0 or above 128: a signal.
        timed_out: it took more seconds than it may.
    """

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool


class BrokenTests(Exception):
    """Tests that any program fails."""


class Sandbox:
    r"""A sandbox runs programs, each in one of its own: Python's standard library is all that they see.

    A program has no network, no process but its own, no writable file, no ``/proc``, and none of the variables, files
    and handles of this process. Limits of the kernel bound its memory, time, threads and output.

    Args:
        kind: ``bubblewrap``; ``i_accept_no_sandbox`` leaves only the limits, but that of threads, and the seccomp
            filter: programs can read, change and delete every file that this process can, and forge their verdicts.

    Raises:
        ValueError: there is no bubblewrap here, or it does not keep a probe from what it should.

    >>> Sandbox("i_accept_no_sandbox").run("print(int(input()) ** 2)", "12").stdout
    '144\n'
    """

    def __init__(self, kind: Kind = "bubblewrap", limits: Limits = Limits()) -> None:
        self.limits = limits
        self._jail = no_jail() if kind == UNPROTECTED else _checked_jail()

    def run(self, program: str, stdin: str = "", within_s: float = math.inf) -> Outcome:
        """The end of a program that is run as a script with this input, and killed after ``within_s`` at the latest."""
        with contextlib.ExitStack() as files:
            return self._start(files, "run", program, stdin=_file(files, stdin)).ended(self._until(within_s))

    def test(
        self,
        program: str,
        tests: Sequence[str],
        setup: str = "",
        names: Sequence[str] = (),
        entry_point: str | None = None,
        within_s: float = math.inf,
        only: bool = False,
    ) -> tuple[list[bool], Outcome]:
        """Tells which tests a program passes, and how the process of the tests ended.

        The tests run in a sandbox of their own, in which the program is not: its functions are called through pipes,
        with plain values (numbers, texts, lists, dicts, sets), and its objects equal nothing. So a program can neither
        read the tests nor end, change or imitate them.

        Args:
            tests: Python code; a test is passed if it ends without an exception.
            names: names that are the program's though Python has them, such as ``sum``.
            entry_point: name of the function that the tests call ``candidate``.
            within_s: seconds after which both processes are killed, whatever their limits are.
            only: no other names are the program's; otherwise all that neither the tests nor Python have are.

        Raises:
            BrokenTests: the tests fail before the program is asked for anything, as they would for any program.
        """
        content = dict[str, Any](setup=setup, tests=list(tests), names=list(names), entry_point=entry_point, only=only)
        with contextlib.ExitStack() as files:
            verdicts = _file(files)
            with contextlib.ExitStack() as ends:  # closed before the wait, or neither would notice the other's end
                calls, write_calls, results, write_results = *os.pipe(), *os.pipe()
                for handle in (calls, write_calls, results, write_results):
                    ends.callback(os.close, handle)
                serving = self._start(files, "serve", program, [calls, write_results])
                testing = self._start(files, "test", json.dumps(content), [results, write_calls, verdicts.fileno()])
            try:
                outcome = testing.ended(self._until(within_s))
                # Its pipes are closed, and it ends by itself, if it has not: only then does its exit code tell why.
                serving.ended(time.monotonic() + _END_S)
            finally:
                serving.child.kill()
            outcome = replace(outcome, timed_out=outcome.timed_out or serving.cpu_spent)
            verdicts.seek(0)
            passed = set(verdicts.read(2**16).split())
            if b"broken" in passed:
                raise BrokenTests(f"the tests fail for any program: {outcome.stderr.strip()[-500:]}")
            return [str(index).encode() in passed for index in range(len(tests))], outcome

    def _until(self, within_s: float) -> float:
        return time.monotonic() + min(within_s, self.limits.until_killed_s)

    def _start(
        self,
        files: contextlib.ExitStack,
        what: str,
        text: str,
        handles: Sequence[int] = (),
        stdin: IO[bytes] | int = subprocess.DEVNULL,
    ) -> _Process:
        source, stdout, stderr = _file(files, text), _file(files), _file(files)
        resources = self.limits.resources()
        if not self._jail.words:  # the kernel would count what else the user runs
            del resources["RLIMIT_NPROC"]
        settings = {"user": self._jail.user(), "resources": resources, "filter": _filter()}
        words = [*self._jail.command(), *("-s", "-S", "-P", "-B"), "-c", _INSIDE.read_text()]
        child = Child(
            [*words, json.dumps([what, source.fileno(), list(handles), settings])],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[source.fileno(), *handles],
            env=ENVIRONMENT,
            cwd="/",
        )
        return _Process(child, stdout, stderr, self.limits.output_kib * 1024)


@dataclass
class _Process:
    """A process that was started, and the files that it writes to, of which ``most`` bytes are read."""

    child: Child
    stdout: IO[bytes]
    stderr: IO[bytes]
    most: int
    cpu_spent: bool = False
    """True if a signal of the limit of CPU time ended the process: SIGXCPU, or SIGKILL, which the kernel also sends
    where memory is short."""

    def ended(self, until: float) -> Outcome:
        """The end of the process, which is killed if it is still running at ``until``, by the monotonic clock."""
        late = not self.child.ends(until)
        code = self.child.kill()
        self.cpu_spent = not late and code in _CPU_SPENT
        return Outcome(self._text(self.stdout), self._text(self.stderr)[-2000:], code, late or self.cpu_spent)

    def _text(self, file: IO[bytes]) -> str:
        file.seek(0)
        return file.read(self.most).decode(errors="replace")


def _file(files: contextlib.ExitStack, text: str = "") -> IO[bytes]:
    file = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  the stack closes it
    file.write(text.encode(errors="replace"))
    file.seek(0)
    return file


@functools.cache
def _filter() -> str:
    return filter_of().hex() if sys.platform == "linux" else ""


@functools.cache
def _checked_jail() -> Jail:
    remedy = (
        "Install bubblewrap (apt-get install bubblewrap), and allow user namespaces where you are not root; or, if the "
        f"model's programs may read, change and delete all files that you can, and forge their verdicts, set "
        f"env.sandbox={UNPROTECTED}"
    )
    failures = []
    for jail in jails():
        failure = _failure(jail)
        if failure is None:
            return jail
        failures.append(failure)
    found = "; ".join(failures) or "bwrap not found"
    raise ValueError(f"env.sandbox=bubblewrap: programs can't be run in a sandbox here ({found}). {remedy}")


def _failure(jail: Jail) -> str | None:
    sandbox = Sandbox(UNPROTECTED, Limits(memory_mib=512))
    sandbox._jail = jail
    with tempfile.NamedTemporaryFile() as canary:
        tried = [canary.name, __file__, "/etc/passwd", "/proc/self", "/tmp", "/home"]
        outcome = sandbox.run(_PROBE, json.dumps([tried, sandbox.limits.threads]))
    if outcome.exit_code or not outcome.stdout.endswith("\n"):
        return f"it does not start: {outcome.stderr.strip()[-300:] or f'exit code {outcome.exit_code}'}"
    could = json.loads(outcome.stdout)
    return f"a program could {', '.join(could)}" if could else None


_PROBE = """
import json, os, socket, threading
tried, threads = json.loads(input())
could, python = [], "/python/bin/python3"
def attempt(name, action):
    try:
        action()
    except (OSError, MemoryError, RuntimeError):
        return
    could.append(name)
for path in tried:
    attempt("see " + path, lambda: os.stat(path))
for folder in ("/", "/python", "/python/lib", "/dev", "/tmp"):
    attempt("write to " + folder, lambda: open(folder + "/file", "w"))
attempt("reach the network", socket.socket)
attempt("start a process", os.fork)
attempt("replace itself", lambda: os.execv(python, [python, "-c", "print('[\\\"replace itself\\\"]')"]))
attempt("signal its parent", lambda: os.kill(os.getppid(), 0))
attempt("take 2 GiB", lambda: bytearray(2**31))
hold = threading.Event()
threading.stack_size(65536)  # or the limit of memory would stop them
def start_many():
    for _ in range(2 * threads):
        threading.Thread(target=hold.wait, daemon=True).start()
attempt("start many threads", start_many)
hold.set()
if set(os.environ) - {"LANG", "PYTHONUTF8", "PYTHONHASHSEED", "PWD", "LC_CTYPE"}:
    could.append("see variables " + " ".join(os.environ))
print(json.dumps(could))
"""


def filter_of(machine: str | None = None) -> bytes:
    """The filter of a ``platform.machine``, this one by default, as an array of ``sock_filter``.

    A denied call fails with EPERM. Threads may be started. Other machines than x86-64 and ARM64 are a ValueError.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise ValueError(f"there is no seccomp filter for {machine}, only for {' and '.join(_ARCHITECTURES)}")
    column, architecture, clone = _ARCHITECTURES[machine]
    steps = [
        _step(_LOAD, _ARCHITECTURE), _step(_IF_EQUAL, architecture, 1, 0), _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER), _step(_IF_AT_LEAST, _X32, 0, 1), _step(_RETURN, _KILL),
        # glibc asks for `clone` where there is no `clone3`, whose flags a filter can't see.
        _step(_IF_EQUAL, _CLONE3, 0, 1), _step(_RETURN, _FAIL | errno.ENOSYS),
    ]  # fmt: skip
    for numbers in DENIED.values():
        if (number := numbers[column]) is not None:
            steps += [_step(_IF_EQUAL, number, 0, 1), _step(_RETURN, _FAIL | errno.EPERM)]
    steps += [
        _step(_IF_EQUAL, clone, 0, 3), _step(_LOAD, _FIRST_ARGUMENT), _step(_IF_ANY_BIT, _CLONE_THREAD, 1, 0),
        _step(_RETURN, _FAIL | errno.EPERM), _step(_RETURN, _ALLOW),
    ]  # fmt: skip
    return b"".join(steps)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
