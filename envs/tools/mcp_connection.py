"""Connection: one connection to an MCP server, on an event loop in another thread; with a command, one process."""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from typing import Any

LAST_BYTES = 2000
"""Bytes at the end of a server's stderr that are kept for error messages."""


class Connection:
    """One connection to a server: to a URL, or by the parameters of a command as the client of MCP takes them."""

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop, stderr_tail: bytearray) -> None:
        self.started: Future[Any] = Future()
        self.begun = time.monotonic()
        self._target, self._loop, self._stderr = target, loop, stderr_tail
        self._stop, self.ended = asyncio.Event(), threading.Event()
        self.task = asyncio.run_coroutine_threadsafe(self._hold(), loop)

    @property
    def client(self) -> Any:
        """The client, once it is started."""
        return self.started.result(0)

    def stop(self) -> None:
        """Ends it, also while it starts; :attr:`ended` is set once the process is gone."""
        if self.started.done():
            self._loop.call_soon_threadsafe(self._stop.set)
        else:
            self.task.cancel()

    async def _hold(self) -> None:
        """Holds the connection open: it has to be closed by the coroutine that opened it."""
        from mcp import Client

        # Each line of a server that is no message would be logged with a traceback, as it is.
        logging.getLogger("mcp").setLevel(logging.CRITICAL + 1)
        is_url = isinstance(self._target, str)
        try:
            async with Client(_direct(self._target) if is_url else _process(self._target, self._stderr)) as client:
                self.started.set_result(client)
                await self._stop.wait()
        except BaseException as error:
            if self.started.done():
                raise
            cause = error if isinstance(error, Exception) else RuntimeError("it was closed while it started")
            self.started.set_exception(cause)
        finally:
            self.ended.set()


@contextlib.asynccontextmanager
async def _direct(url: str) -> AsyncGenerator[Any]:
    """The transport to a URL past the proxies that the environment names, which must not read calls of this machine."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    timeout = httpx2.Timeout(30.0, read=300.0)  # seconds, as in the SDK's own client
    async with (
        httpx2.AsyncClient(trust_env=False, timeout=timeout) as http,
        streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams


@contextlib.asynccontextmanager
async def _process(target: Any, stderr_tail: bytearray) -> AsyncGenerator[Any]:
    """The transport to a process; the end of its stderr is kept, not printed: it may hold escape sequences."""
    from mcp.client.stdio import stdio_client

    reading, writing = os.pipe()

    def read_stderr() -> None:
        with open(reading, "rb", buffering=0) as pipe:
            while piece := pipe.read(1 << 16):
                stderr_tail.extend(piece)
                del stderr_tail[:-LAST_BYTES]

    reader = threading.Thread(target=read_stderr, daemon=True)
    reader.start()
    try:
        with open(writing, "w") as stderr:
            async with stdio_client(target, stderr) as streams:
                yield streams
    finally:
        reader.join(0.5)  # what has left the process's group may hold the pipe for ever
