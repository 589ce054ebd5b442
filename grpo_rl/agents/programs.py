"""Agents as programs and as functions: each plays one session in a process of its own, which may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from grpo_rl.by_name import object_by_name
from grpo_rl.envs.guards.guard import in_thread
from grpo_rl.envs.guards.isolation import IsolatedCalls

LAST_BYTES = 2000
"""Bytes of a program's messages that are kept for people: the last ones."""


@dataclass(frozen=True)
class Client:
    """Settings of an OpenAI client, for one session.

    Args:
        base_url: of the endpoint, up to and with ``/v1``.
        api_key: names the session.
        model: the served model's name.
    """

    base_url: str
    api_key: str
    model: str


class AgentError(Exception):
    """An agent failed; the message says how. A TimeoutError says that it was late instead."""


class Agent(Protocol):
    """A program or a function that plays sessions, many at a time."""

    async def play(self, client: Client, row: Mapping[str, Any]) -> object:
        """The result of one session: a reward as a number, a final response as a text, or None.

        Raises:
            AgentError: it failed, or was killed.
            TimeoutError: it was late, and was killed.
        """
        ...

    def close(self) -> None:
        """Kills what still runs."""
        ...


class Program:
    """A program, started for each session.

    It finds the endpoint where OpenAI's own client looks for it, in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, the
    model's name in ``OPENAI_MODEL``, and the row as JSON in its standard input. Its processes end with the session.

    Args:
        command: the program and its arguments, split as a shell does; no shell runs it.
        deadline_s: seconds of one session.

    Raises:
        ValueError: there is no such program.
    """

    def __init__(self, command: str, deadline_s: float) -> None:
        self._words, self._deadline_s = shlex.split(command), deadline_s
        if not self._words or not shutil.which(self._words[0]):
            raise ValueError(f"env.command={command!r}: there is no program {' '.join(self._words[:1])!r}")

    async def play(self, client: Client, row: Mapping[str, Any]) -> None:
        """See :meth:`Agent.play`."""
        own = {"OPENAI_BASE_URL": client.base_url, "OPENAI_API_KEY": client.api_key, "OPENAI_MODEL": client.model}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **own},
                start_new_session=True,  # a group of its own: what it starts is killed with it
            )
        except OSError as error:
            raise AgentError(f"{self._words[0]} can't be started: {error}") from error
        told = bytearray()
        listening = asyncio.ensure_future(_listen(process, told))
        telling = asyncio.ensure_future(_tell(process, json.dumps(row, default=str).encode()))
        try:
            async with asyncio.timeout(self._deadline_s):
                code = await process.wait()
        except TimeoutError:
            raise TimeoutError(f"it was not done within {self._deadline_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            telling.cancel()
            await asyncio.wait({listening}, timeout=1.0)
            listening.cancel()
        if code:
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            said = told.decode(errors="replace").strip()
            raise AgentError(f"it ended with {end}" + (f": …{said}" if said else ""))

    def close(self) -> None:
        """Does nothing: a program ends with its session."""


async def _tell(process: asyncio.subprocess.Process, row: bytes) -> None:
    assert process.stdin
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a program need not read its row
        process.stdin.write(row)
        await process.stdin.drain()
    process.stdin.close()


async def _listen(process: asyncio.subprocess.Process, told: bytearray) -> None:
    assert process.stderr
    while part := await process.stderr.read(1 << 16):
        told += part
        del told[:-LAST_BYTES]


class Function:
    """A function ``play(client, row)``, called in processes of their own, which are used again.

    Args:
        name: ``package.module:function``.
        at_once: sessions at the same time, each in its process.
        deadline_s: seconds of one session.

    Raises:
        ValueError: there is no such function.
    """

    def __init__(self, name: str, at_once: int, deadline_s: float) -> None:
        object_by_name(name, "env.agent")
        self._name = name
        # Without a second try: the session would hold the calls of both.
        self._calls = IsolatedCalls(_Named(name), workers=at_once, deadline_s=deadline_s, memory_gib=None, again=False)

    async def play(self, client: Client, row: Mapping[str, Any]) -> object:
        """See :meth:`Agent.play`."""
        loop = asyncio.get_running_loop()
        played: asyncio.Future[Any] = loop.create_future()

        def call() -> None:
            try:
                (result,) = self._calls.map([(asdict(client), dict(row))])
            except Exception as error:  # the workers can't be started, or are closed
                result = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(lambda: played.done() or played.set_result(result))

        in_thread(call)
        result = await played
        if isinstance(result, TimeoutError):
            raise result
        if isinstance(result, Exception):
            raise AgentError(f"{type(result).__name__}: {result}") from result
        if result is not None and (isinstance(result, bool) or not isinstance(result, (int, float, str))):
            raise AgentError(f"{self._name} returned {result!r:.80}; it must be a number, a text or None")
        return result

    def close(self) -> None:
        """See :meth:`Agent.close`."""
        self._calls.close(now=True)


@dataclass(frozen=True)
class _Named:
    """The function, found where it is called."""

    name: str

    def __call__(self, client: dict[str, str], row: dict[str, Any]) -> object:
        return object_by_name(self.name, "env.agent")(Client(**client), row)
