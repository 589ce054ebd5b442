"""Child: a process that is killed with all that it has started; IsolatedCalls: a function called in such processes.

A worker is a fresh interpreter that imports the function's module and nothing else. The processes of multiprocessing,
which pebble's and concurrent.futures' pools are made of, run the main script again instead: `python sota/grpo.py` would
import torch and vLLM into every worker, and again after every kill. A worker has a pipe of its own, so that its death
identifies the failed call, and holds no lock of another.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

from grpo_rl.by_name import one_line, raised_at
from grpo_rl.envs.guards.parent import end_with_parent

START_TIMEOUT_S = 120.0
"""Seconds that a worker may take to import its function; not a part of any call's deadline."""

SPENT = 0.9
"""The part of a scorer's time that its calls may take: what follows needs some of it."""
_MAX_WORKERS = 8
_POLL_S = 0.2  # between two looks at whether a worker still lives
_WORKER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from grpo_rl.envs.guards import isolation; "
    "isolation.serve(int(sys.argv[2]), int(sys.argv[3]))"
)


class Child:
    """A process of `subprocess.Popen` that leads a group: Ctrl-C spares it, and a kill takes its children too."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._lock, self._killed = threading.Lock(), False
        self.process = subprocess.Popen(command, start_new_session=True, **options)

    def ends(self, until: float) -> bool:
        """True if the process ends before ``until``, by the monotonic clock."""
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> int:
        """Kills the group, and returns the exit code of the process; any thread may call it, and again."""
        with self._lock:
            if not self._killed:  # a second time, the group's number may be another's
                kill_group(self.process.pid)
            self._killed = True
        return self.process.wait()


def kill_group(leader: int) -> None:
    """Kills a process that leads a group of its own, with all that it has started there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def ending(code: int) -> str:
    """The end of a process in words.

    >>> ending(-9), ending(3)
    ('SIGKILL', 'exit code 3')
    """
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class WorkerDied(RuntimeError):
    """The process of a call ended before the call did, by ``end``: a signal's name, or an exit code."""

    def __init__(self, message: str, end: str = "") -> None:
        super().__init__(message)
        self.end = end


class IsolatedCalls(contextlib.AbstractContextManager["IsolatedCalls"]):
    """Calls ``function`` in worker processes; a call that hangs or crashes costs that call and its worker only.

    Workers are started by the first calls, used again by later ones, and killed by :meth:`close`, with this object, or
    with the process, however it ends. Any thread may call, and several at the same time.

    Args:
        function: what is called. It goes to the workers by pickle, which names its module: it can't come from the main
            script, where workers would not find it.
        workers: processes at most; None takes one a CPU, up to 8.
        memory_gib: memory that a worker may take beyond that of its imports (Linux; elsewhere there is no limit).
            A call that asks for more gets a MemoryError. None sets no limit.
        again: a call whose worker died is made a second time: the worker may have been killed before it.
        environment: variables of the workers; None: those of this process.
        output: file that the workers' stdout and stderr go to; None: this process's.

    Raises:
        ValueError: the function can't be sent to another process.

    The second call would take hours, the last is wrong:

    >>> import operator
    >>> with IsolatedCalls(operator.pow, workers=1, deadline_s=0.5) as calls:
    ...     calls.map([(2, 10), (10, 10**10), (3, 2), ("a", 2)])
    [1024, TimeoutError('no result within 0.5 s'), 9, TypeError("unsupported operand ...")]
    """

    def __init__(
        self,
        function: Callable[..., Any],
        workers: int | None = None,
        deadline_s: float = 5.0,
        memory_gib: float | None = 4.0,
        again: bool = True,
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
    ) -> None:
        cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        self.workers = min(cpus, _MAX_WORKERS) if workers is None else workers
        self.deadline_s, self._again = deadline_s, again
        self._options = {"env": environment, "stdout": output, "stderr": output}
        self._set_up = _pickled(function, memory_gib)
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="isolated-calls")
        self._own = threading.local()  # each thread has a worker of its own
        self._live: set[_Worker] = set()
        self.closed = False
        """True once :meth:`close` was called."""
        self._process_id = os.getpid()
        self._finalizer = weakref.finalize(self, _kill_all, self._live, self._process_id)

    def start(self) -> None:
        """Starts a worker, if none lives, so that its imports are no part of a caller's own deadline."""
        if not self._live:
            self._threads.submit(self._own_worker).result()

    def submit(self, arguments: tuple) -> Future[Any]:
        """The result of one call, as :meth:`map` gives it, when it is there."""
        return self._threads.submit(self._result, arguments, self.deadline_s)

    def map(
        self,
        arguments: Sequence[tuple],
        deadline_s: float | None = None,
        budget_s: float = math.inf,
        on_result: Callable[[Future[Any]], object] | None = None,
    ) -> list[Any]:
        """The result of each call, in the order of ``arguments``, one tuple a call.

        Args:
            deadline_s: seconds of each of these calls, where it is not the usual one.
            budget_s: seconds of all calls together; each that has no result by then gives a TimeoutError in its place.
            on_result: gets each call's future as soon as it has its result, from any thread.

        In the place of a call that failed stands the exception: what it raised, a TimeoutError where it took longer
        than its deadline, or :class:`WorkerDied`.

        Raises:
            RuntimeError: the workers can't import the function, this object is closed, or it was made before a fork.
        """
        if os.getpid() != self._process_id:
            raise RuntimeError("the workers belong to the process that this one was forked from; make others here")
        deadline_s, until = deadline_s or self.deadline_s, time.monotonic() + budget_s
        futures = [self._threads.submit(self._result, one, deadline_s, until) for one in arguments]
        if on_result:
            for future in futures:
                future.add_done_callback(on_result)
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def close(self, now: bool = False) -> None:
        """Kills the workers, when the calls under way have ended, or now; those that wait are not made."""
        self.closed = True
        if now:
            _kill_all(self._live, self._process_id)
        self._threads.shutdown(cancel_futures=True)
        self._finalizer()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _result(self, arguments: tuple, deadline_s: float, until: float = math.inf) -> Any:
        """The result of a call, made by this thread's worker, and where that dies by another one."""
        message, died = pickle.dumps(arguments), None
        for _ in range(2 if self._again else 1):
            if self.closed:
                raise RuntimeError("closed while calls were under way")
            if time.monotonic() >= until:
                return TimeoutError("no time was left for it")
            worker = self._own_worker()
            try:
                return worker.reply(message, min(deadline_s, max(0.0, until - time.monotonic())))
            except TimeoutError as error:
                self._end(worker)
                return error
            except WorkerDied as error:
                # It may have died before the call, killed by a machine short of memory: the call gets another.
                self._end(worker)
                died = error
        return died

    def _own_worker(self) -> _Worker:
        worker = getattr(self._own, "worker", None)
        if worker is None:
            worker = self._own.worker = _Worker(**self._options)
            self._live.add(worker)
            try:
                if self.closed:  # close may have looked for workers to kill before this one was there
                    raise RuntimeError("closed while it was started")
                problem = worker.reply(self._set_up, START_TIMEOUT_S)
            except (TimeoutError, RuntimeError) as error:
                problem = error
            if problem:
                self._end(worker)
                raise RuntimeError(f"a worker process can't be started: {problem}")
        return worker

    def _end(self, worker: _Worker) -> None:
        """Ends this thread's worker, and closes its pipe, which other threads, such as that of `close`, leave alone.

        Two threads that close one pipe close its file twice, and the second time it may be another's.
        """
        self._own.worker = None
        self._live.discard(worker)
        worker.child.kill()
        worker.pipe.close()


class _Worker:
    """One process, and the pipe to it; ``options`` are those of `subprocess.Popen`."""

    def __init__(self, **options: Any) -> None:
        self.pipe, theirs = Pipe()
        search_path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        with theirs:
            handle = theirs.fileno()
            command = [sys.executable, "-c", _WORKER, search_path, str(handle), str(os.getpid())]
            self.child = Child(command, pass_fds=[handle], stdin=subprocess.DEVNULL, **options)

    def reply(self, message: bytes, deadline_s: float) -> Any:
        """The result of the call that the message asks for, or the exception that it raised, as an object."""
        until = time.monotonic() + deadline_s
        try:
            self.pipe.send_bytes(message)
            while not self.pipe.poll(min(_POLL_S, max(0.0, until - time.monotonic()))):
                # A child that it has started may hold its end of the pipe open.
                if self.child.process.poll() is not None and not self.pipe.poll():
                    raise EOFError
                if time.monotonic() >= until:
                    raise TimeoutError(f"no result within {deadline_s:.3g} s")
            received = self.pipe.recv_bytes()
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            end = ending(self.child.kill())
            raise WorkerDied(f"the process of the call died, of {end}", end) from error
        try:
            return pickle.loads(received)
        except Exception as error:
            return error


def serve(handle: int, parent: int) -> None:
    """A worker's life: it imports the function, then makes calls until its pipe is closed."""
    end_with_parent()
    if os.getppid() != parent:
        return
    with Connection(handle) as pipe:
        try:
            function, memory_gib = pickle.loads(pipe.recv_bytes())
            _limit_memory(memory_gib)
        except Exception as error:
            pipe.send_bytes(pickle.dumps(one_line(error)))
            return
        pipe.send_bytes(pickle.dumps(None))
        with contextlib.suppress(EOFError):
            while True:
                pipe.send_bytes(_outcome(function, pipe.recv_bytes()))


def _outcome(function: Callable[..., Any], message: bytes) -> bytes:
    try:
        return pickle.dumps(function(*pickle.loads(message)))
    except Exception as error:
        try:
            error.raised_at = raised_at(error)  # pyrefly: ignore[missing-attribute]
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # an exception with arguments of its own may be written but not read
            return pickled
        except Exception:
            return pickle.dumps(RuntimeError(one_line(error)))


def _limit_memory(gib: float | None) -> None:
    if gib is None or sys.platform != "linux":
        return
    import resource  # not everywhere

    with open("/proc/self/statm") as numbers:
        mapped = int(numbers.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _pickled(function: Callable[..., Any], memory_gib: float | None) -> bytes:
    remedy = "define it at the top of a module that can be imported"
    if getattr(function, "__module__", None) == "__main__":
        raise ValueError(f"{function!r} is in the main script, where worker processes can't find it; {remedy}")
    try:
        return pickle.dumps((function, memory_gib))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{function!r} can't be sent to a worker process ({error}); {remedy}") from error


def _kill_all(workers: set[_Worker], process_id: int) -> None:
    # A fork's copy of this list names processes that are not its own.
    for worker in list(workers) if os.getpid() == process_id else ():
        worker.child.kill()
