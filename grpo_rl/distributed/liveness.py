"""The watch over all ranks: a dead or frozen one is named, and the others end instead of waiting for it.

A thread of every rank writes a sign of life into the store that all ranks know, with what the rank is at. Rank zero
reads everyone's, the others read rank zero's. The kernel reports the end of a process on the same machine at once.
Whoever finds a rank lost writes it into the store once, and all others read it there.
"""

from __future__ import annotations

import _thread
import contextlib
import datetime
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

LONGEST_INTERVAL_S = 1.0
FAILED_S = 30.0
"""Seconds that the others have after a rank ended with an error of its own: those with the same error end meanwhile."""
BLOCKED_S = 2.0
"""Seconds that the main thread has to take notice; a thread that does not is inside of an exchange that never ends."""
UNWINDING_S = 20.0
"""Seconds that the main thread then has to close logs and engines; torchrun gives 30."""
UNWINDS = signal.SIGUSR2
"""The signal whose handler unwinds the main thread when a rank is lost; it is simulated, not sent."""
LOST_CODE = 75
"""Exit code of a rank that ends as another is lost: EX_TEMPFAIL of sysexits.h, as the run can go on in a new start."""

LAST_LOST = "grpo_rl/lost"
"""Key of a launcher's store under which ranks record which of them was lost."""


@dataclass(frozen=True)
class Member:
    """A rank's process; ``machine`` is the same for processes that see each other's ids."""

    rank: int
    host: str
    pid: int
    machine: str

    @classmethod
    def here(cls, rank: int) -> Member:
        """This process."""
        try:
            space = os.readlink("/proc/self/ns/pid")
        except OSError:
            space = ""
        return cls(rank, socket.gethostname(), os.getpid(), f"{socket.gethostname()} {space}")

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"


class RankLostError(SystemExit):
    """Ends a rank because another one is lost, as logged on stderr; exit code 75."""

    def __init__(self, message: str = "") -> None:
        super().__init__(LOST_CODE)
        self.message = message


class Stopped(SystemExit):
    """Ends all ranks in order, as they agreed: the run was asked to stop, and can go on later.

    The exit code is 1, as the run is not finished; under a torchrun that would start it again at once, it is 0.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
            if os.environ.get("RANK", "0") == "0":
                print(message, file=sys.stderr, flush=True)
            self.code = 0


def exit_message(error: BaseException | None) -> str:
    """The message to the others on the error that ends a rank; empty where all of them end in order."""
    orderly = isinstance(error, (Stopped, RankLostError)) or (isinstance(error, SystemExit) and error.code in (None, 0))
    return "" if error is None or orderly else f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


class Watch:
    """The watch over all ranks, in a thread of each, from its making until :meth:`leave`.

    Args:
        store: a connection of its own to a store that all ranks know.
        name: prefix of its keys, another one for every start.
        members: all ranks.
        deadline_s: a rank that gives no sign of life for this long is lost.
        ends_on_sigterm: whether SIGTERM unwinds this process, which otherwise dies of it.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        members: list[Member],
        rank: int,
        deadline_s: float,
        ends_on_sigterm: bool = False,
    ) -> None:
        self.store, self.name, self.rank = store, name, rank
        self.doing: Callable[[], str] = lambda: "its start"
        """The phase that this rank is at, as ``phase train of step 5``."""
        self.advice = ""
        """The remedy that is printed when the run has ended."""
        self._members, self._deadline_s = members, deadline_s
        self._interval_s = min(LONGEST_INTERVAL_S, deadline_s / 10)
        store.set_timeout(datetime.timedelta(seconds=max(1.0, deadline_s / 4)))
        self._exchange, self._count, self._entered, self._beat, self._phase = "", 0, 0.0, 0, ""
        self._exit_message: str | None = None
        self._since, now = time.time(), time.monotonic()
        self._reached = self._looked = now
        self._last_beats = {member.rank: (0, now) for member in members}
        self._failed_at: dict[int, float] = {}
        self._left, self._lost, self._unwinding = threading.Event(), threading.Event(), threading.Event()
        self.message = ""
        self._process, self._handled = os.getpid(), list[signal.Signals]()
        self._handle(UNWINDS, self._on_lost)
        if ends_on_sigterm:
            self._handle(signal.SIGTERM, self._on_sigterm)
        self._write_beat()
        self._thread = threading.Thread(target=self._run, name="watch over ranks", daemon=True)

    def start(self) -> None:
        """Begins to watch; every rank has given its first sign of life."""
        self._thread.start()

    # What the rank's own thread calls.

    @contextlib.contextmanager
    def exchange(self, name: str) -> Iterator[None]:
        """A context for an exchange with all ranks; one inside of another is part of it.

        Raises:
            RankLostError: the exchange failed, as a rank is lost.
        """
        if self._exchange:
            yield
            return
        if self._lost.is_set():
            self._unwinding.set()
            raise RankLostError(self.message)
        self._count, self._entered, self._exchange = self._count + 1, time.time(), name
        try:
            yield
        except RuntimeError as error:
            self.explain(error)
            raise
        finally:
            self._exchange = ""

    def explain(self, error: BaseException) -> None:
        """Returns if an error is this rank's own.

        Raises:
            RankLostError: it is that of an exchange; names the rank that caused it.
        """
        names_exchange = any(name in str(error) for name in ("gloo", "NCCL", "ProcessGroup"))
        if not isinstance(error, dist.DistError) and not (isinstance(error, RuntimeError) and names_exchange):
            return
        self._unwinding.set()
        if not self._lost.wait(2 * self._interval_s + 1):
            with contextlib.suppress(RuntimeError):  # the store may be gone, too
                self._claim(*self._cause(error))
            if not self._lost.wait(2 * self._interval_s + 1):
                self.message = f"rank {self.rank} can't reach the others ({first_line(error)})"
                _write_line(f"error: {self.message}")
        raise RankLostError(self.message) from None

    def leave(self, error: BaseException | None = None) -> None:
        """Ends the watch, and notifies the others whether this rank ends in order; may raise as :meth:`explain`."""
        if self._left.is_set():
            return
        try:
            if error is not None:
                self.explain(error)
        finally:
            self._exit_message = exit_message(error)
            with contextlib.suppress(RuntimeError):
                self._write_beat()
            self._left.set()
            self._unwinding.set()
            for number in self._handled:
                with contextlib.suppress(ValueError):  # not the main thread
                    signal.signal(number, signal.SIG_DFL)
            if not self._lost.is_set():  # otherwise the thread sees to it that the process ends
                self._thread.join(5.0)

    def lost_in(self, name: str) -> str:
        """The rank that was lost in an earlier watch of this name, and how; empty where none was found lost."""
        key = f"{name}/lost"
        return json.loads(self.store.get(key))[1] if self.store.check([key]) else ""

    # The thread.

    def _run(self) -> None:
        poll, of, ended = select.poll(), {}, list[Member]()
        for member in self._members if hasattr(os, "pidfd_open") else ():
            if member.rank != self.rank and member.machine == self._members[self.rank].machine:
                try:
                    of[descriptor := os.pidfd_open(member.pid)] = member
                    poll.register(descriptor, select.POLLIN)
                except ProcessLookupError:
                    ended.append(member)
                except OSError:  # a kernel without them: a missing heartbeat shows it as well, only later
                    break
        try:
            while not self._left.is_set():
                for descriptor, _ in poll.poll(self._interval_s * 1000):
                    poll.unregister(descriptor)
                    ended.append(of[descriptor])
                if not self._left.is_set() and (lost := self._look(ended)) is not None:
                    self._end(*lost)
        finally:
            for descriptor in of:
                os.close(descriptor)

    def _write_beat(self) -> None:
        if (doing := self.doing()) != self._phase:
            self._phase, self._since = doing, time.time()
        self._beat += 1
        status = {
            "beat": self._beat, "doing": self._phase, "since": self._since, "exchange": self._exchange,
            "entered": self._entered, "count": self._count, "exit_message": self._exit_message,
        }  # fmt: skip
        self.store.set(self._key(self.rank), json.dumps(status))

    def _key(self, rank: int | str) -> str:
        return f"{self.name}/{rank}"

    def _look(self, ended: list[Member]) -> tuple[int, str] | None:
        """The lost rank and the message about it; None if none is lost."""
        now = time.monotonic()
        if now - self._looked > self._deadline_s / 2:  # this process was stopped itself: the others get their time anew
            self._last_beats = {rank: (beat, now) for rank, (beat, _) in self._last_beats.items()}
            self._reached = now
        self._looked = now
        try:
            if not self._left.is_set():
                self._write_beat()
            found = self._find(ended, now)
            self._reached = time.monotonic()
            return found
        except RuntimeError as error:
            silent_s = time.monotonic() - self._reached
            if silent_s <= self._deadline_s:
                time.sleep(self._interval_s)  # where the connection is refused, this comes at once
                return None
            return -1, f"the store of all ranks has not answered for {silent_s:.0f} s ({first_line(error)})"

    def _find(self, ended: list[Member], now: float) -> tuple[int, str] | None:
        if self.store.check([self._key("lost")]):
            return json.loads(self.store.get(self._key("lost")))
        watched = self._members[1:] if self.rank == 0 else self._members[:1]
        statuses = self._statuses({member.rank for member in [*ended, *watched]})
        if any(statuses[member.rank]["exit_message"] is None for member in ended):
            time.sleep(0.1)  # its exit message may be on its way
            statuses = self._statuses(statuses)
        for member in list(ended):
            if statuses[member.rank]["exit_message"] is None:
                return self._claim(member.rank, f"{member} died {_at(statuses[member.rank])}")
            ended.remove(member)
        for member in watched:
            status = statuses[member.rank]
            if status["exit_message"] == "":
                continue
            if status["exit_message"]:
                if now - self._failed_at.setdefault(member.rank, now) > FAILED_S:
                    return self._claim(member.rank, f"{member} ended with {status['exit_message']}, {_at(status)}")
            elif status["beat"] != self._last_beats[member.rank][0]:
                self._last_beats[member.rank] = status["beat"], now
            elif now - self._last_beats[member.rank][1] > self._deadline_s:
                silent = f"has given no sign of life for {self._deadline_s:g} s (train_model.deadline_s)"
                return self._claim(member.rank, f"{member} {silent}: frozen, or its machine is gone; {_at(status)}")
        return None

    def _statuses(self, ranks: Collection[int]) -> dict[int, dict[str, Any]]:
        found = self.store.multi_get([self._key(rank) for rank in ranks])
        return dict(zip(ranks, map(json.loads, found), strict=True))

    def _cause(self, error: BaseException) -> tuple[int, str]:
        """The rank for which an exchange failed: one that is silent since, or that the others waited for."""
        everyone = [member.rank for member in self._members]
        before = self._statuses(everyone)
        time.sleep(3 * self._interval_s)
        statuses = self._statuses(everyone)
        for member in self._members:
            status = statuses[member.rank]
            is_silent = status["beat"] == before[member.rank]["beat"] and status["exit_message"] is None
            if is_silent and member.rank != self.rank:
                return member.rank, f"{member} is gone, and its connections with it; it was {_at(status)}"
        behind = [member for member in self._members if statuses[member.rank]["count"] < self._count]
        if not behind:
            return -1, f"ranks can't reach each other ({first_line(error)}), {_at(statuses[self.rank])}"
        last = min(behind, key=lambda member: statuses[member.rank]["count"])
        status = statuses[last.rank]
        if status["exit_message"]:
            return last.rank, f"{last} ended with {status['exit_message']}, {_at(status)}"
        where = f"to the exchange `{self._exchange}`, in which others have waited since {_clock(self._entered)}"
        return last.rank, f"{last} did not come {where}; it is {_at(status)}"

    def _claim(self, rank: int, text: str) -> tuple[int, str]:
        """Declares a rank lost, for all ranks; the first declaration counts."""
        lost = json.loads(self.store.compare_set(self._key("lost"), "", json.dumps([rank, text])))
        self.store.set(LAST_LOST, lost[1])
        return lost

    # The end.

    def _end(self, lost: int, text: str) -> None:
        """Logs which rank is lost, once on each machine, and ends the process."""
        own = self._members[self.rank].machine
        speakers = [member.rank for member in self._members if member.machine == own and member.rank != lost]
        self.message = text
        if self.rank == lost:
            text = f"the other ranks have given this one up: {text}"
        if self.rank == lost or speakers[0] == self.rank:
            advice = f" {self.advice}" if self.advice else ""
            _write_line(f"error: {text}. The others end, with exit code {LOST_CODE}.{advice}")
        self._lost.set()
        if not self._unwinding.wait(1.0) and UNWINDS in self._handled:  # an exchange that fails is explained by itself
            _thread.interrupt_main(UNWINDS)
        if self._unwinding.wait(BLOCKED_S):
            time.sleep(UNWINDING_S)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(LOST_CODE)

    def _handle(self, number: signal.Signals, handler: Callable[..., None]) -> None:
        """Has the main thread handle a signal that nothing handles yet, until :meth:`leave`."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, handler)
            self._handled.append(number)

    def _on_lost(self, *_: object) -> None:
        if self._lost.is_set() and not self._unwinding.is_set():
            self._unwinding.set()
            raise RankLostError(self.message)

    def _on_sigterm(self, number: int, _: object) -> None:
        if os.getpid() != self._process:  # a forked process ends as it would by default
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._unwinding.set()
        raise SystemExit(128 + number)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _at(status: Mapping[str, Any]) -> str:
    """The phase of a rank at its last heartbeat, in words."""
    exchange = f", in the exchange `{status['exchange']}` since {_clock(status['entered'])}"
    return f"in {status['doing']} since {_clock(status['since'])}{exchange if status['exchange'] else ''}"


def _write_line(text: str) -> None:
    os.write(2, f"{' '.join(text.split())}\n".encode())  # in one piece, as other ranks write there, too
