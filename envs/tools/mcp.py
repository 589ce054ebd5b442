"""MCP servers as tools of any task: one process for each server, which all conversations share, restarted when it dies.

A server is a command, which talks over its own stdin and stdout, or a URL of this machine. Conversations call it at the
same time, and what it keeps in memory they share.
"""

import asyncio
import atexit
import copy
import ipaddress
import math
import shlex
import shutil
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from grpo_rl.envs.guards.parent import ending_with_parent
from grpo_rl.envs.task import Messages, Task, plays_turns
from grpo_rl.envs.tools.functions import Dropped, FunctionTask, Limits, run_calls
from grpo_rl.envs.tools.mcp_connection import Connection
from grpo_rl.envs.tools.schemas import tool_schemas
from grpo_rl.storage.masking import LEAST, MASK, masked, may_be_secret

START_S = 60.0
"""Seconds that a server may take until it has listed its tools."""
ANSWER_S = 2.0
"""Seconds in which a server that was late has to name its tools again, or it is restarted."""
END_S = 10.0
"""Seconds in which a server's process has to be gone, once it is ended."""
SPARE_S = 0.5
"""Seconds before a call's deadline at which its failure is reported, so that it comes in time."""
KEYS = {"command", "env", "url", "timeout_s", "on_failure"}
ON_FAILURE = ("tell", "drop")


class Server:
    """One MCP server. Its methods may be called from any thread.

    Args:
        given: an entry of ``env.mcp``: a command, a URL, or a mapping with one of both, ``timeout_s`` of a call, and
            ``on_failure``: ``tell`` the policy of a server that died or hangs, or ``drop`` the conversation.
            A command's ``env`` has variables for it alone, such as keys.

    Raises:
        ValueError: the entry makes no sense, or its URL is not on this machine.
    """

    def __init__(self, given: str | Mapping[str, Any]) -> None:
        self.name, self.target, self.timeout_s, self.drops, self._secrets = _read(given)
        self.starts = 0
        """The number of times that it was started."""
        self.deadline_s = self.timeout_s + ANSWER_S + END_S
        """Seconds after which a call has a result, or the server has failed to show that it lives and is ended."""
        self._loop = asyncio.new_event_loop()
        # Reentrant, as an environment that is garbage closes its servers in whichever thread that is noticed.
        self._lock = threading.RLock()
        self._current: Connection | None = None
        self._stderr, self._closed = bytearray(), False
        self._thread = threading.Thread(target=self._run, name=f"MCP {self.name}", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of its tools.

        Raises:
            ValueError: it can't be started, or lists no tools in time.
        """
        try:
            tools = self._wait(_all_tools(self._connected().client), START_S)
        # A foreign process: whatever goes wrong before the first call is a wrong setting.
        except Exception as error:
            self.close()
            stderr = self._stderr.decode(errors="replace").strip()
            why = f"stderr: …{stderr}" if stderr else "start it by hand to see why"
            why = self._shown(f"{_words(error)}; {why}")
            raise ValueError(f"env.mcp: {self.name} listed no tools: {why}") from error
        return [{"name": t.name, "description": t.description or "", "parameters": t.input_schema} for t in tools]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of a tool's result; an error of the tool itself is a result.

        Raises:
            Dropped: the server died or hangs, and ``on_failure`` is ``drop``.
            RuntimeError: it did, and the policy reads the error.
        """
        refused, until = Dropped if self.drops else RuntimeError, time.monotonic() + self.deadline_s - SPARE_S
        # A foreign process: it may not start, die in the middle, hang, or send what is no message.
        try:
            connection = self._connected(until)
        except Exception as error:
            raise refused(f"the MCP server {self.name} did not start: {self._shown(_words(error))}") from error
        seconds = min(self.timeout_s, until - time.monotonic())
        if seconds <= 0:  # no one would read the result
            raise refused(f"the MCP server {self.name} started too late for the call")
        try:
            result = self._wait(connection.client.call_tool(name, arguments), seconds)
        except Exception as error:
            late = isinstance(error, TimeoutError)
            why = f"gave no result within {seconds:g} s" if late else f"failed: {self._shown(_words(error))}"
            # A start that took most of the time leaves too little of it to tell a slow tool from a server that hangs.
            if not (late and until - time.monotonic() < ANSWER_S) and not self._answers(connection):
                why += ", and is connected to again" if isinstance(self.target, str) else ", and is restarted"
                self._end(connection, min(END_S, until - time.monotonic()))
            raise refused(f"the MCP server {self.name} {why}") from error
        parts = [getattr(part, "text", f"[{part.type}]") for part in result.content]
        return self._shown(("Error: " if result.is_error else "") + "\n".join(parts))

    def close(self, wait: bool = True) -> None:
        """Ends the server's process and its thread for good, and waits for it or not: later calls are refused."""
        with self._lock:
            if not self._closed:
                self._closed = True
                asyncio.run_coroutine_threadsafe(self._shut(), self._loop)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(END_S)

    def _shown(self, text: str) -> str:
        """A text of the server's without secrets: some servers repeat the keys that they were given."""
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return text

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()
        # Not before: a program that exits meanwhile has to wait for the process.
        atexit.unregister(self.close)

    async def _shut(self) -> None:
        """Ends the connection, then calls that still wait, then the loop."""
        if self._current is not None:
            self._current.stop()
            until = self._loop.time() + END_S
            while not self._current.ended.is_set() and self._loop.time() < until:
                await asyncio.sleep(0.01)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)
        self._loop.stop()

    def _connected(self, until: float = math.inf) -> Connection:
        """The connection that there is, or a new one; it is waited for outside the lock, which closing needs."""
        with self._lock:
            self._check_open()
            if self._current is None or self._current.task.done():
                self.starts += 1
                self._current = Connection(self.target, self._loop, self._stderr)
            connection = self._current
        given_up, waited_s = connection.begun + START_S, until - time.monotonic()
        try:
            connection.started.result(max(min(waited_s, given_up - time.monotonic()), 0.0))
        except Exception as error:
            if not connection.started.done() and until < given_up:
                raise TimeoutError(f"it needs longer than {waited_s:.1f} s") from error
            self._end(connection, min(END_S, until - time.monotonic()))
            raise
        return connection

    def _end(self, connection: Connection, seconds: float = END_S) -> None:
        """Ends this connection: a call that failed late must not end the one that was started after it."""
        with self._lock:
            if self._closed:
                return  # which ends it as well
            if self._current is connection:
                self._current = None
            connection.stop()
        connection.ended.wait(max(seconds, 0.0))

    def _answers(self, connection: Connection) -> bool:
        try:
            self._wait(connection.client.list_tools(), ANSWER_S)
        except Exception:  # as in call
            return False
        return True

    def _wait(self, work: Coroutine[Any, Any, Any], seconds: float) -> Any:
        with self._lock:
            if self._closed:
                work.close()
            self._check_open()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("it is closed")


async def _all_tools(client: Any) -> list[Any]:
    listed = await client.list_tools()
    tools = list(listed.tools)
    while listed.next_cursor:
        listed = await client.list_tools(cursor=listed.next_cursor)
        tools += listed.tools
    return tools


def _words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _read(given: str | Mapping[str, Any]) -> tuple[str, Any, float, bool, list[str]]:
    """The name, the target as the client takes it, the seconds of a call, whether failures drop conversations, and the
    secrets that the server is given."""
    if isinstance(given, str):
        given = {"url" if given.lower().startswith(("http://", "https://")) else "command": given}
    if not isinstance(given, Mapping) or not given.keys() <= KEYS or ("command" in given) == ("url" in given):
        raise ValueError("env.mcp: an entry is a command, a URL, or a mapping of one of both; see docs/tools.md")
    timeout_s, on_failure = given.get("timeout_s", 10.0), given.get("on_failure", "tell")
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf or on_failure not in ON_FAILURE:
        raise ValueError(f"env.mcp: timeout_s={timeout_s}, on_failure={on_failure}; give seconds, and tell or drop")
    try:
        from mcp import StdioServerParameters
    except ImportError as error:
        raise ValueError("env.mcp needs the client of MCP: pip install 'grpo-rl[mcp]'") from error
    name = given["url"] if "url" in given else given["command"]
    variables = given.get("env") or {}
    # What they hold is not repeated: it may be secret.
    texts = isinstance(variables, Mapping) and all(isinstance(text, str) for text in (name, *variables.values()))
    if not texts or ("url" in given and variables):
        raise ValueError("env.mcp: command and url are texts; env has texts by name, of a command alone")
    if "url" in given:
        return _own_address(name), name, float(timeout_s), on_failure == "drop", []
    try:
        words = shlex.split(name)
    except ValueError as error:
        raise ValueError(f"env.mcp: the command {name.split()[0]} … can't be read: {error}") from error
    if not words or not shutil.which(words[0], path=variables.get("PATH")):
        raise ValueError(f"env.mcp: there is no program {' '.join(words[:1])}")
    program, *arguments = ending_with_parent(words, with_group=True)
    target = StdioServerParameters(command=program, args=arguments, env=dict(variables))
    secrets = [value for variable, value in variables.items() if may_be_secret(variable, value)]
    for word, shown in zip(words, masked(words), strict=True):
        if shown != word and shown.endswith(MASK):  # an option's value, by itself or behind its name
            secrets.append(word[len(shown) - len(MASK) :])
    return words[0], target, float(timeout_s), on_failure == "drop", [text for text in secrets if len(text) >= LEAST]


def _own_address(url: str) -> str:
    """The address of a URL of this machine, without user, path and query, which may be secret."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        own = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        own = False
    if not own:
        raise ValueError(f"env.mcp: {host} is not on this machine; only 127.0.0.1, ::1 and localhost are asked")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class _WithServers(Task):
    _plain: type[Task]
    _of: Mapping[str, Server]

    def without_rows(self) -> Task:
        other = copy.copy(self)
        other.__class__, other.tools = self._plain, ()
        return other.without_rows()

    def reply(self, row: dict, messages: Messages) -> Messages | None:
        calls = messages[-1].get("tool_calls", [])
        asked = any(call["function"]["name"] in self._of for call in calls)
        if not calls or (not asked and self._plain.reply is not Task.reply):
            return self._plain.reply(self, row, messages)

        def run(name: str, arguments: dict[str, Any]) -> Any:
            if name in self._of:
                return self._of[name].call(name, arguments)
            if (call := getattr(self, "call", None)) is not None:
                return call(row, name, arguments)
            raise NotImplementedError(f"{type(self).__name__} has no method call, which would run {name}")

        def seconds(name: str) -> float:
            return self._of[name].deadline_s if name in self._of else limits.seconds

        limits = self.limits if isinstance(self, FunctionTask) else Limits()
        return run_calls(calls, tool_schemas(self.tools), run, limits, seconds)


def with_mcp(
    task: Task,
    entries: Sequence[str | Mapping[str, Any]],
    reply_s: float = float("inf"),
    opened: list[Server] | None = None,
) -> Task:
    """The task with the tools of MCP servers next to its own; the task itself where there are none.

    Args:
        reply_s: seconds that a reply to a message may take, ``env.score_timeout_s``.
        opened: is given the servers, for :func:`close_servers`; without it they end with the program.

    Raises:
        ValueError: an entry makes no sense, a server can't be started, or a call may take longer than a reply.
    """
    if not entries:
        return task
    other, of, schemas, servers = copy.copy(task), {}, [], list[Server]()
    try:
        for entry in entries:
            servers.append(server := Server(entry))
            if server.deadline_s > reply_s:
                takes = f"a call of {server.name} may take {server.deadline_s:g} s with its server's end"
                raise ValueError(f"env.mcp: {takes}, but a reply {reply_s:g}; set timeout_s or env.score_timeout_s")
        for server in servers:
            found = server.schemas()
            schemas += found
            of |= {schema["name"]: server for schema in found}
        other.tools = (*task.tools, *schemas)
        tool_schemas(other.tools)
    except BaseException:
        for server in servers:
            server.close()
        raise
    other.__class__ = type(type(task).__name__, (_WithServers, type(task)), {"_plain": type(task), "_of": of})
    assert plays_turns(other)
    if opened is not None:
        opened += servers
    return other


def close_servers(servers: Sequence[Server], wait: bool = True) -> None:
    """Ends the servers, all at the same time; see :meth:`Server.close`."""
    for server in servers:
        server.close(wait=False)
    for server in servers if wait else ():
        server.close()
