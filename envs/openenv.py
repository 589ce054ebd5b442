"""OpenEnv: environments behind a server with OpenEnv's protocol, each conversation with a session of its own."""

import http.client
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Annotated, Any
from urllib.parse import urlsplit

from grpo_rl.envs import tables
from grpo_rl.envs.declared import SystemPrompt, means
from grpo_rl.envs.episodes import Episodes
from grpo_rl.envs.sources import AnySource, Source
from grpo_rl.envs.spec import TaskSpec

TIMEOUT_S = 60.0
MAX_BYTES = 10 * 2**20
"""The largest answer of a server."""
_REFUSED = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Errors about an action, which the policy may read."""


class Refused(ValueError):
    """An action is none, or the server does not take it; the message is for the policy."""


class OpenEnv(Episodes[Any]):
    """Episodes of an OpenEnv server; a response earns ``episode``, the sum of what the server gives for its steps.

    The policy's message is the action: a JSON object, bare or in a fenced block, or where actions have a single
    required field its value. An action that the server refuses costs a turn, and is sent to the policy.

    Source: https://github.com/meta-pytorch/OpenEnv, protocol of openenv 0.10.

    Rows are arguments of the server's ``reset``, such as ``seed``. No other address than ``url`` is contacted, and
    redirects are not followed.

    Raises:
        ValueError: the address is none, or no one answers there.
    """

    max_open = 512  # each has a connection, and a process may usually open 1024 files

    def __init__(
        self,
        rows: Sequence[dict],
        *,
        url: Annotated[
            str | None, means("the server's address, such as http://127.0.0.1:8000; no other is contacted")
        ] = None,
        system_prompt: SystemPrompt = None,
    ) -> None:
        super().__init__(rows, system_prompt)
        parts = urlsplit(url or "")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"env.url={url}; give the address of an OpenEnv server, such as http://127.0.0.1:8000")
        self._url = (url or "").rstrip("/")
        try:
            self._action = _schema(self._url)["action"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException) as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"env.url={url}: no OpenEnv server gives its schema there ({why})") from error

    def reset(self, row: dict) -> tuple[Any, str]:
        """Opens a session, and begins an episode in it."""
        session = _connected(self._url)
        try:
            return session, _observation(_asked(session, "reset", row))
        except BaseException:
            session.close()
            raise

    def step(self, state: Any, text: str) -> tuple[str, float, bool]:
        """Sends the action that the text is."""
        try:
            data = _asked(state, "step", action_of(text, self._action))
        except Refused as error:
            return f"Error: {error}", 0.0, False
        return _observation(data), float(data.get("reward") or 0.0), bool(data.get("done"))

    def close(self, state: Any) -> None:
        """Closes the session."""
        state.close()


def action_of(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The action that a text is.

    Raises:
        Refused: it is none of this schema.

    >>> schema = {"required": ["guess"], "properties": {"guess": {"type": "integer"}}}
    >>> action_of('{"guess": 3}', schema), action_of("3", schema)
    ({'guess': 3}, {'guess': 3})
    """
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        text = "\n".join(text.splitlines()[1:-1]).strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, dict):
        return value
    required = schema.get("required") or []
    if len(required) != 1:
        fields = ", ".join(schema.get("properties") or {})
        raise Refused(f"an action is a JSON object with {fields or 'its fields'}")
    kind = (schema.get("properties") or {}).get(required[0], {}).get("type")
    return {required[0]: text if kind == "string" else value}


def _schema(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    with closing(kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)) as connection:
        connection.request("GET", f"{parts.path}/schema")
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"it answers {answer.status} {answer.reason}")
        return json.loads(answer.read(MAX_BYTES))


def _connected(url: str) -> Any:
    try:
        from websockets.sync.client import connect
    except ImportError as error:
        raise ValueError("env.dataset=openenv needs websockets: pip install 'grpo-rl[openenv]'") from error
    # Nor is a proxy of the environment used.
    address = "ws" + url.removeprefix("http") + "/ws"
    # A session stays open from turn to turn, and `close` ends it: no block could.
    return connect(address, max_size=MAX_BYTES, proxy=None, open_timeout=TIMEOUT_S).__enter__()


def _asked(session: Any, what: str, data: Mapping[str, Any]) -> dict[str, Any]:
    session.send(json.dumps({"type": what, "data": data}))
    text = session.recv(timeout=TIMEOUT_S)
    try:
        answer = json.loads(text)
        reply = answer.get("data") or {}
    except (ValueError, AttributeError, RecursionError) as error:
        raise RuntimeError(f"the OpenEnv server answers {text!r:.200}, which is no JSON object") from error
    if answer.get("type") != "error":
        return reply
    faults = [f"{'.'.join(map(str, fault.get('loc', ())))}: {fault.get('msg')}" for fault in reply.get("errors") or ()]
    message = "; ".join([str(reply.get("message")), *faults])[:500]
    if what == "step" and reply.get("code") in _REFUSED:
        raise Refused(message)
    remedy = "; start the server with more max_concurrent_envs" if reply.get("code") == "CAPACITY_REACHED" else ""
    raise RuntimeError(f"the OpenEnv server answers {reply.get('code')}: {message}{remedy}")


def _observation(data: Mapping[str, Any]) -> str:
    """The observation as text: itself, the only text in it, or JSON."""
    seen = data.get("observation")
    if isinstance(seen, dict):
        seen = {name: value for name, value in seen.items() if name not in ("metadata", "done", "reward")}
        texts = [value for value in seen.values() if isinstance(value, str)]
        seen = texts[0] if len(seen) == len(texts) == 1 else seen
    return seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)


def load_rows(
    path: AnySource = None,
    split: str = "train",
    episodes: Annotated[
        int, means("seeds to train on where there is no path; a tenth as many are held out", ge=1)
    ] = 1000,
) -> Sequence[dict]:
    """Arguments of ``reset``, of :func:`grpo_rl.envs.tables.load_rows`; without a path seeds, others in each split.

    >>> load_rows(episodes=2), load_rows(split="test", episodes=20)
    ([{'seed': 0}, {'seed': 1}], [{'seed': 1000000000}, {'seed': 1000000001}])
    """
    source = Source.of(path)
    if source.path is not None:
        return tables.load_rows(source, split)
    first, count = (0, episodes) if split == "train" else (10**9, max(1, episodes // 10))
    return [{"seed": first + index} for index in range(count)]


OpenEnvEnv = TaskSpec(OpenEnv, load_rows, row_settings=("episodes",))
"""Episodes of an OpenEnv server as a TorchRL environment."""
