"""ChatServer: OpenAI's chat endpoint over sessions, on loopback by default."""

import asyncio
import json
import logging
import resource
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from aiohttp import web
from transformers import PreTrainedTokenizerBase

from grpo_rl.agents.recorder import Response, Session
from grpo_rl.agents.requests import ChatRequest, RequestError, finite, read_json, read_request
from grpo_rl.engines.base import Sampling
from grpo_rl.loopback import LOOPBACK, names_this_machine

T = TypeVar("T")
LEAST_BODY_BYTES, MAX_BODY_BYTES, TOKEN_BYTES = 1 << 20, 16 << 20, 16
"""A request may have so many bytes for each token of the context, within these limits: a longer text would be tokenised
for seconds, only to be refused."""
READ_S = 15.0
"""Seconds in which a client has to send a head, and then the body; an idle connection is closed after as many."""
MOST_CONNECTIONS, MOST_OF_SESSION = 2048, 64
"""Connections that are open at the same time, of all clients and of one session's."""
OPEN_FILES = 1 << 14
"""Files that the process may have open once an endpoint listens, where its hard limit allows it."""
CLOSE_S = 1.0
"""Seconds that calls under way have to end when the server is closed."""
KEEP_ALIVE_S = 10.0
"""Seconds between two comments of a stream whose response is not there yet: clients give up on a silent one."""


class ChatServer:
    """Answers the calls of all sessions, each named by the key that its agent sends as bearer token.

    - ``POST /v1/chat/completions``: streams (comments, then the response in one piece), tools, several choices, seeds,
      stop strings, log-probabilities.
    - ``GET /v1/models``: the one that is served.
    - ``POST /v1/reward`` with ``{"reward": 0.5}``: the session's reward; the last one counts.

    Args:
        model: its name for clients.
        tokenizer: of the policy.
        sampling: what requests leave open, see :func:`~grpo_rl.agents.requests.read_request`.
        is_trained: the run's own distribution holds, whatever requests ask for.
        max_model_len: most tokens of a prompt and its response; a request may have :data:`TOKEN_BYTES` for each.
        stranger: makes the session of a key that none was opened for; None: such calls are refused.
        takes_rewards: agents send the rewards of their sessions; otherwise they are refused.
    """

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        is_trained: bool = True,
        max_model_len: int = 1 << 20,
        stranger: Callable[[str], Session | None] | None = None,
        takes_rewards: bool = True,
    ) -> None:
        self.model, self._tokenizer, self._sampling, self._is_trained = model, tokenizer, sampling, is_trained
        self._stranger, self._takes_rewards = stranger, takes_rewards
        self._sessions: dict[str, Session] = {}
        self.notes: dict[str, None] = {}
        """Fields of requests that were ignored or replaced, in words, each once; the first hundred."""
        self.problems: dict[str, str] = {}
        """Misuses of the endpoint that cost agents calls, each kind once."""
        self._connections: WeakKeyDictionary[Session, set[web.RequestHandler]] = WeakKeyDictionary()
        self._begun = int(time.time())
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self._most_connections = MOST_CONNECTIONS
        self.url = ""
        """The base URL for clients, once the server has started; it ends on ``/v1``."""
        most = min(max(TOKEN_BYTES * max_model_len, LEAST_BODY_BYTES), MAX_BODY_BYTES)
        self._app = web.Application(middlewares=[_in_openais_form], client_max_size=most)
        router = self._app.router
        router.add_post("/v1/chat/completions", self._chat)
        router.add_get("/v1/models", self._models)
        router.add_get("/v1/models/{name:.+}", self._models)
        router.add_post("/v1/reward", self._reward)

    async def start(self, host: str = LOOPBACK, port: int = 0) -> None:
        """Listens; port 0 takes a free one.

        Raises:
            ValueError: the port is taken.
        """
        # A client that is gone ends its call: no one would read the response. aiohttp logs each line that is no HTTP
        # with a traceback, which an agent could write without end.
        silent = logging.Logger("the agents' endpoint", logging.CRITICAL + 1)
        self._runner = web.AppRunner(
            self._app,
            access_log=None,
            logger=silent,
            handler_cancellation=True,
            shutdown_timeout=CLOSE_S,
            keepalive_timeout=READ_S,
            lingering_time=CLOSE_S,
        )
        await self._runner.setup()
        self._most_connections = min(MOST_CONNECTIONS, _more_open_files() // 2)  # the rest is the run's own
        try:
            self._listening = await asyncio.get_running_loop().create_server(self._connection, host, port)
        except OSError as error:
            await self.close()
            text = f"port {port} can't be used ({error.strerror}); take another, or 0 for a free one"
            raise ValueError(text) from error
        self.url = f"http://{host}:{self._listening.sockets[0].getsockname()[1]}/v1"

    def _connection(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection, which is closed at once where too many are open."""
        server = self._runner.server if self._runner else None
        if server and len(server.connections) < self._most_connections:
            return server()
        most = f"agents have opened more than {self._most_connections} connections"
        self.problems["connections"] = f"{most}: further ones close"
        return _Closed()

    async def close(self) -> None:
        """Ends the calls under way and stops listening."""
        if self._listening:
            self._listening.close()
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    def open(self, session: Session) -> str:
        """The key of a session, whose calls are taken until :meth:`end`."""
        key = f"session-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def end(self, key: str) -> None:
        """Ends a session: its key opens nothing any more."""
        self._sessions.pop(key).ended = True

    def _session(self, request: web.Request) -> Session:
        if self._stranger and not names_this_machine(request.host):  # any key opens a session
            raise RequestError("this model is served on this machine alone", None, "invalid_host", 403)
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key if scheme.lower() == "bearer" else ""
        session = self._sessions.get(key) or (self._stranger(key) if key and self._stranger else None)
        if session is None:
            text = "no session has this key: none was opened, or it has ended"
            raise RequestError(text, None, "invalid_api_key", 401)
        assert self._runner and self._runner.server
        connections = self._connections.setdefault(session, set())
        connections.intersection_update(self._runner.server.connections)
        connections.add(request.protocol)
        if len(connections) > MOST_OF_SESSION:
            connections.discard(request.protocol)
            most = f"an agent has opened more than {MOST_OF_SESSION} connections"
            self.problems["of a session"] = f"{most}, and is refused more"
            text = f"this session has {MOST_OF_SESSION} connections open; close some, or use them again"
            raise RequestError(text, None, "rate_limit_exceeded", 429)
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": self.model, "object": "model", "created": self._begun, "owned_by": "grpo_rl"}
        if (name := request.match_info.get("name")) is None:
            return web.json_response({"object": "list", "data": [model]})
        if name != self.model:
            text = f"the model {name:.80} does not exist; {self.model} does"
            raise RequestError(text, "model", "model_not_found", 404)
        return web.json_response(model)

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await _read(request, read_json)
        reward = body.get("reward") if isinstance(body, dict) else None
        number = finite(reward)
        if number is None:
            raise RequestError(f"reward is {reward!r:.80}; it must be a finite number", "reward")
        if not self._takes_rewards:
            raise RequestError("env.scorer gives the reward of this session; it takes no other", "reward")
        session.reward = number
        return web.json_response({"reward": reward})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        session.check_open()
        try:
            asked = await _read(request, self._asked)
        except BaseException:  # also of a client that leaves halfway
            session.counts["calls"] += 1  # or a session could be refused without end
            raise
        for note in asked.notes:
            if len(self.notes) < 100:
                self.notes[note] = None
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.model}
        headers = {"X-Notes": "; ".join(asked.notes)[:1000]} if asked.notes else {}
        sampling = asyncio.ensure_future(_sampled(session, asked))
        try:
            if asked.stream:
                return await self._streamed(request, head, asked, headers, sampling)
            responses = await sampling
        finally:
            sampling.cancel()
        choices = [self._choice(i, response, asked.logprobs) for i, response in enumerate(responses)]
        body = {**head, "object": "chat.completion", "choices": choices, "usage": _usage(responses)}
        return web.json_response(body, headers=headers)

    def _asked(self, body: bytes) -> ChatRequest:
        return read_request(read_json(body), self._sampling, self.model, self._is_trained)

    async def _streamed(
        self,
        request: web.Request,
        head: dict[str, Any],
        asked: ChatRequest,
        headers: dict[str, str],
        sampling: asyncio.Future[list[Response]],
    ) -> web.StreamResponse:
        """Comments as long as the response is sampled, then the response; an error before the first has its status."""
        headers |= {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        stream = web.StreamResponse(headers=headers)
        while not (await asyncio.wait({sampling}, timeout=KEEP_ALIVE_S))[0]:
            if not stream.prepared:
                await stream.prepare(request)
            await stream.write(b": the response is sampled\n\n")
        try:
            chunks = self._chunks(head, asked, sampling.result())
        except Exception as error:  # as for all requests, see _in_openais_form
            if not stream.prepared:
                raise
            chunks = [_error_reply(error)[0]]
        if not stream.prepared:
            await stream.prepare(request)
        for chunk in chunks:
            await stream.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        return stream

    def _choice(self, i: int, response: Response, with_logprobs: bool) -> dict[str, Any]:
        logprobs = self._logprobs(response) if with_logprobs else None
        message = {"refusal": None, **response.message}
        return {"index": i, "message": message, "logprobs": logprobs, "finish_reason": response.finish_reason}

    def _chunks(self, head: dict[str, Any], asked: ChatRequest, responses: list[Response]) -> list[dict[str, Any]]:
        head = {**head, "object": "chat.completion.chunk"} | ({"usage": None} if asked.include_usage else {})
        chunks = []
        for i, response in enumerate(responses):
            delta = dict(response.message)
            if "tool_calls" in delta:
                delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
            logprobs = self._logprobs(response) if asked.logprobs else None
            for part, reason in ((delta, None), ({}, response.finish_reason)):
                choice = {"index": i, "delta": part, "logprobs": None if reason else logprobs, "finish_reason": reason}
                chunks.append({**head, "choices": [choice]})
        if asked.include_usage:
            chunks.append({**head, "choices": [], "usage": _usage(responses)})
        return chunks

    def _logprobs(self, response: Response) -> dict[str, Any]:
        entries = []
        for token, log_prob in zip(response.ids, response.samples.log_probs.tolist(), strict=True):
            text = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
            # JSON has no infinities; OpenAI, too, writes -9999 for what is next to impossible.
            log_prob = max(log_prob, -9999.0)
            entries.append({"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": entries, "refusal": None}


def _usage(responses: list[Response]) -> dict[str, int]:
    prompt, sampled = len(responses[0].prompt_ids), sum(len(response.ids) for response in responses)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


async def _read(request: web.Request, reader: Callable[[bytes], T]) -> T:
    """The parsed body of a request, read in a thread so that a long one does not hold up others."""
    try:
        async with asyncio.timeout(READ_S):
            body = await request.read()
    except TimeoutError as error:
        raise RequestError(f"the body has not come within {READ_S:g} s", None, "timeout", 408) from error
    return await asyncio.to_thread(reader, body)


async def _sampled(session: Session, asked: ChatRequest) -> list[Response]:
    try:
        return await session.ask(asked.messages, asked.tools, asked.n, asked.sampling)
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(str(error), "messages") from error


@web.middleware
async def _in_openais_form(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionError:  # the client is gone
        raise
    except Exception as error:  # untrusted requests: whatever breaks is sent in the form that clients read
        content, status = _error_reply(error)
        response = web.json_response(content, status=status)
        if status in (408, 429):
            response.force_close()
        return response


def _error_reply(error: Exception) -> tuple[dict[str, Any], int]:
    if isinstance(error, RequestError):
        message, param, code, status = error.message, error.param, error.code, error.status
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        message, param, code, status = error.text or error.reason, None, "context_length_exceeded", error.status
    elif isinstance(error, web.HTTPException):  # no such path or method
        message, param, code, status = error.text or error.reason, None, None, error.status
    else:
        message, param, code, status = f"{type(error).__name__}: {error}", None, None, 500
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}, status


class _Closed(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.abort()


def _more_open_files() -> int:
    """The soft limit of open files, once it is raised as far as :data:`OPEN_FILES` and the hard limit allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if 0 <= soft < wanted:  # below 0: there is none
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
