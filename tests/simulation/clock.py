"""The clock and the threads of a simulated process: one thread, virtual time, nothing that a seed does not decide.

The thread that trains waits by running the event loop of the engines until what it waits for has happened, or until its
deadline. So code that is written for two threads runs in one, and always in the same order.
"""

import asyncio
import concurrent.futures
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

from simulation.virtual_time import VirtualLoop

T = TypeVar("T")
STARTED_AT = 1.7e9
"""The wall clock's time, in seconds since 1970, at the beginning of a simulation."""


class Killed(BaseException):
    """The simulated process was killed; nothing catches this but the simulation."""


class Loop(VirtualLoop):
    """An event loop in virtual time from ``begun_s`` on, which calls ``after_turn`` after each of its turns."""

    def __init__(self, begun_s: float, after_turn: Callable[[], None]) -> None:
        super().__init__()
        self._jumping.now, self._after_turn = begun_s, after_turn
        self.errors: list[BaseException] = []
        self.set_exception_handler(self._on_error)

    def _on_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # An error of a task that nobody waits for shows when the task is collected, at another time in each process.
        if "handle" in context:
            self.errors.append(context["exception"])

    def _run_once(self) -> None:
        super()._run_once()  # pyrefly: ignore[missing-attribute]
        if self.errors:
            raise self.errors[0]
        self._after_turn()


class Process:
    """A simulated process; in the place of a :class:`grpo_rl.engines.loop_thread.LoopThread`, too.

    Args:
        begun_s: virtual seconds since the simulation's beginning.
        after_turn: called after each turn of the event loop, that is whenever something has happened.
        on_kill: called at the moment of a kill, before anything else can run.
    """

    def __init__(self, begun_s: float, after_turn: Callable[[], None], on_kill: Callable[[], None]) -> None:
        self.wall_jump_s = 0.0
        """Seconds that the wall clock was set forward; the monotonic one never is."""
        self.killed = False
        self._asked, self._on_kill = False, on_kill
        self.events = Loop(begun_s, after_turn)
        self._change = asyncio.Event()

    def now(self) -> float:
        """Virtual seconds since the simulation's beginning."""
        return self.events.time()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.events)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            self.check()
        except Killed:
            coroutine.close()
            raise
        call = self.start(coroutine)
        self.wait({call})
        return call.result()

    def wait(
        self, calls: Iterable[Future[Any]], timeout: float | None = None, return_when: str = ALL_COMPLETED
    ) -> tuple[set[Future[Any]], set[Future[Any]]]:
        """The calls that are done, and the others; :func:`concurrent.futures.wait` in virtual time."""
        calls = set(calls)
        needed = min(1, len(calls)) if return_when == FIRST_COMPLETED else len(calls)

        def enough() -> bool:
            return self._asked or sum(call.done() for call in calls) >= needed

        async def wait() -> None:
            while not enough():
                self._change.clear()
                await self._change.wait()

        async def wait_until() -> None:
            with suppress(TimeoutError):
                await asyncio.wait_for(wait(), timeout)

        self.check()
        for call in calls:
            call.add_done_callback(lambda _: self._change.set())
        if not enough():
            self.events.run_until_complete(wait_until())
        self.check()
        done = {call for call in calls if call.done()}
        return done, calls - done

    def sleep(self, seconds: float) -> None:
        """Lets virtual time pass while the thread that trains is busy."""
        self.wait({Future()}, seconds)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls a function once so many virtual seconds have passed."""
        self.events.call_later(seconds, call)

    def ask_to_kill(self) -> None:
        """Kills the process where it stands now; called from its event loop."""
        self._asked = True
        self._change.set()

    def kill(self) -> None:
        """Kills the process; called from the thread that trains."""
        if not self.killed:
            self._on_kill()
            self.killed = True
        raise Killed

    def check(self) -> None:
        """Lets nothing happen any more once the process was killed."""
        if self._asked or self.killed:
            self.kill()

    def close(self) -> None:
        """Ends everything that is under way; does nothing where the process runs on."""

    def end(self) -> None:
        """Ends the process, and what is left on its event loop."""
        self.killed = True
        self.events.errors.clear()  # raised already, and would be again before the loop is closed
        tasks = sorted(asyncio.all_tasks(self.events), key=lambda task: (len(task.get_name()), task.get_name()))
        for task in tasks:
            task._log_destroy_pending = False  # pyrefly: ignore[missing-attribute]
            task.cancel()
        if tasks:  # what does not end by this dies with the loop
            self.events.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self.events.close()


class Executor:
    """Stands for the thread that scores: a piece of work is done after the virtual seconds that it takes.

    Args:
        seconds: draws how long the next piece takes.
    """

    def __init__(self, process: Process, seconds: Callable[[], float]) -> None:
        self._process, self._seconds = process, seconds
        self._free_at, self._closed = 0.0, False

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        call: Future[Any] = Future()

        def do() -> None:
            if self._closed or not call.set_running_or_notify_cancel():
                return
            try:
                call.set_result(work(*args))
            except Exception as error:
                call.set_exception(error)

        self._free_at = max(self._free_at, self._process.now()) + self._seconds()
        self._process.call_later(self._free_at - self._process.now(), do)
        return call

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        self._closed = True


@contextmanager
def lived_by(process: Process) -> Iterator[None]:
    """Has this process's code read the clocks of a simulated one, and wait in its time."""
    clocks = {
        "time": lambda: STARTED_AT + process.now() + process.wall_jump_s,
        "monotonic": process.now,
        "perf_counter": process.now,
        "sleep": process.sleep,
    }
    with ExitStack() as stack:
        for name, clock in clocks.items():
            stack.enter_context(mock.patch.object(time, name, clock))
        for module in _waiting(len(sys.modules)):
            stack.enter_context(mock.patch.object(module, "wait", process.wait))
        yield


@cache
def _waiting(_: int) -> list[ModuleType]:
    """The modules of the package, among so many that are loaded, that import `concurrent.futures.wait`."""
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("grpo_rl.")]
    return [module for module in ours if getattr(module, "wait", None) is concurrent.futures.wait]
