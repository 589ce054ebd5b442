"""Agents as programs and as functions: each plays one session in a process of its own, which may be killed."""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from typing_extensions import override

from grpo_rl.agents.client import Client, call_named
from grpo_rl.agents.requests import finite
from grpo_rl.by_name import object_by_name, one_line
from grpo_rl.envs.guards.guard import in_thread
from grpo_rl.envs.guards.isolation import IsolatedCalls, ending, kill_group
from grpo_rl.envs.guards.parent import ending_with_parent
from grpo_rl.loopback import LOOPBACK
from grpo_rl.storage.masking import may_be_secret

LAST_BYTES = 2000
"""Bytes at the end of a program's stderr that are kept for error messages."""
STDIN, STDERR = 0, 2


class AgentError(Exception):
    """An agent failed, in a way that the message describes; a late one raises TimeoutError instead."""


class Agent(Protocol):
    """A program or a function that plays sessions, many at a time."""

    async def play(self, client: Client, row: Mapping[str, Any]) -> object:
        """The result of one session: a reward as a number, a final response as a text, or None.

        Raises:
            AgentError: it failed, or was killed.
            TimeoutError: it was late, and was killed.
        """

    def for_now(self) -> contextlib.AbstractContextManager[None]:
        """Within it, sessions may be more than usual; idle processes beyond those that there were end with it."""

    def close(self) -> None:
        """Kills what still runs."""


def environment(passed: Sequence[str] = ()) -> dict[str, str]:
    """The variables that agents inherit: those ``passed``, and this process's without those that may be secret.

    Clients go to the endpoint past the proxies of the variables, which must not read calls and the session's key.

    Raises:
        ValueError: one that is passed is not set.
    """
    if missing := [name for name in passed if name not in os.environ]:
        raise ValueError(f"env.pass_environment names {missing[0]}, which is not set; export it, or leave it out")
    kept = {name: value for name, value in os.environ.items() if name in passed or not may_be_secret(name, value)}
    hosts = kept.get("no_proxy") or kept.get("NO_PROXY") or ""
    hosts = hosts if hosts == "*" or LOOPBACK in hosts.split(",") else f"{hosts},{LOOPBACK}".strip(",")
    return {**kept, "no_proxy": hosts, "NO_PROXY": hosts}


class Program(Agent):
    """A program, started for each session.

    It finds the endpoint where OpenAI's own client looks for it, in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, the
    model's name in ``OPENAI_MODEL``, and the row as JSON in its standard input. Its group of processes is killed at the
    session's end; the program itself also where this process is killed (Linux).

    Args:
        command: the program and its arguments, split as a shell does; no shell runs it.
        deadline_s: seconds of one session.
        passed: see :func:`environment`.

    Raises:
        ValueError: there is no such program, the command's quotes don't match, or a variable that is passed is not set.
    """

    def __init__(self, command: str, deadline_s: float, passed: Sequence[str] = ()) -> None:
        self._environment = environment(passed)
        try:
            self._words, self._deadline_s = shlex.split(command), deadline_s
        except ValueError as error:
            raise ValueError(f"env.command={command!r} can't be split into words: {error}") from error
        if not self._words or not shutil.which(self._words[0]):
            raise ValueError(f"env.command={command!r}: there is no program {' '.join(self._words[:1])!r}")

    @override
    async def play(self, client: Client, row: Mapping[str, Any]) -> None:
        row_json = json.dumps(row, default=str).encode()
        own = {"OPENAI_BASE_URL": client.base_url, "OPENAI_API_KEY": client.api_key, "OPENAI_MODEL": client.model}
        loop = asyncio.get_running_loop()
        try:
            process, watch = await loop.subprocess_exec(
                _ProgramWatch,
                *ending_with_parent(self._words),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env={**self._environment, **own},
                start_new_session=True,  # a group of its own: what it starts is killed with it
            )
        except OSError as error:
            raise AgentError(f"{self._words[0]} can't be started: {error}") from error
        stdin = process.get_pipe_transport(STDIN)
        assert isinstance(stdin, asyncio.WriteTransport)
        try:
            stdin.write(row_json)  # which a program need not read
            stdin.close()
            # Not asyncio's Process.wait(), which also waits for the pipes: what it has started may hold them open.
            done, _ = await asyncio.wait({watch.exited}, timeout=self._deadline_s)
        finally:
            kill_group(process.get_pid())
            # What was written before the end may still be on its way.
            await asyncio.wait({watch.exited, watch.pipes_closed}, timeout=1.0)
            if stdin.get_write_buffer_size():
                stdin.abort()
            process.close()
        if not done:
            raise TimeoutError(f"it was not done within {self._deadline_s:g} s")
        if code := process.get_returncode():
            stderr = watch.stderr_tail.decode(errors="replace").strip()
            raise AgentError(f"it ended with {ending(code)}" + (f": …{stderr}" if stderr else ""))

    @override
    def for_now(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # a program ends with its session

    @override
    def close(self) -> None: ...


class _ProgramWatch(asyncio.SubprocessProtocol):
    """Watches a program: keeps the end of its stderr, and notes its exit and the closing of its pipes."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.stderr_tail = bytearray()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.pipes_closed: asyncio.Future[None] = loop.create_future()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.stderr_tail += data
        del self.stderr_tail[:-LAST_BYTES]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == STDERR and not self.pipes_closed.done():
            self.pipes_closed.set_result(None)

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)


class Function(Agent):
    """A function ``play(client, row)``, called in processes of their own, which are used again.

    Args:
        name: ``package.module:function``.
        deadline_s: seconds of one session.
        passed: see :func:`environment`.

    Raises:
        ValueError: there is no such function, or a variable that is passed is not set.
    """

    def __init__(self, name: str, deadline_s: float, passed: Sequence[str] = ()) -> None:
        self._environment = environment(passed)
        object_by_name(name, "env.agent")
        self._name, self._deadline_s, self._closed = name, deadline_s, False
        self._idle: list[IsolatedCalls] = []
        self._busy: set[IsolatedCalls] = set()

    @override
    async def play(self, client: Client, row: Mapping[str, Any]) -> object:
        worker = self._worker()
        try:
            result = await asyncio.wrap_future(worker.submit((self._name, asdict(client), dict(row))))
        except asyncio.CancelledError:  # no one waits for the session: its function must not go on
            in_thread(lambda: worker.close(now=True))
            raise
        except Exception as error:  # the worker can't be started, or is closed
            raise AgentError(one_line(error)) from error
        else:
            self._idle.append(worker)
        finally:
            self._busy.discard(worker)
        if isinstance(result, TimeoutError):
            raise result
        if isinstance(result, Exception):
            raise AgentError(one_line(result)) from result
        if result is not None and not isinstance(result, str) and finite(result) is None:
            kind = type(result).__name__
            raise AgentError(f"{self._name} returned a {kind}; it must be a finite number, a text or None")
        return result

    @override
    @contextlib.contextmanager
    def for_now(self) -> Iterator[None]:
        before = len(self._idle) + len(self._busy)
        try:
            yield
        finally:
            with contextlib.suppress(IndexError):  # sessions of training may take the last ones meanwhile
                while len(self._idle) + len(self._busy) > before:
                    self._idle.pop().close(now=True)

    @override
    def close(self) -> None:
        self._closed = True
        for worker in [*self._idle, *self._busy]:
            worker.close(now=True)

    def _worker(self) -> IsolatedCalls:
        """One process, by itself, so that it can be killed without the others."""
        if self._closed:
            raise AgentError("the run is over")
        # Without a second try: the session would hold the calls of both.
        settings: dict[str, Any] = {"deadline_s": self._deadline_s, "memory_gib": None, "again": False}
        settings["environment"] = self._environment
        try:
            worker = self._idle.pop()  # training and evaluation, each with a thread, may play at the same time
        except IndexError:
            worker = IsolatedCalls(call_named, workers=1, **settings)
        self._busy.add(worker)
        return worker
