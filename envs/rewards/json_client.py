"""JsonClient: requests to a JSON HTTP server, repeated where they fail for now."""

import http.client
import json
import math
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

FOR_NOW = (408, 409, 425, 429, 500, 502, 503, 504)
"""Status codes of requests that may succeed later."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
EXCERPT = 300
MOST_BYTES, PIECE = 1 << 26, 1 << 16
"""The largest response, and how much is read at once."""


class EndpointError(RuntimeError):
    """The endpoint gave no response within all tries; names it."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: followed, it would carry the key to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class JsonClient:
    """A JSON HTTP server. The key goes into the request's header alone: it is in no message or representation.

    Args:
        url: before the paths of requests.
        key: sent as bearer token, without space around it; None or empty: none is sent.
        retries: further tries of a request that failed for now, with growing waits; ``Retry-After`` is honoured.
        deadline_s: seconds of one try, whose response has to be complete by then; one that stops in the middle may be
            waited for as long once more, until it is given up.

    Raises:
        ValueError: the key has characters that no header can have.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        retries: int = 5,
        deadline_s: float = 300.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url, self._key = url.rstrip("/"), (key or "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            # Python's own error would repeat the key.
            raise ValueError(f"the key of {url} has a character that is no printable ASCII; export it anew")
        self._retries, self._deadline_s, self._sleep = retries, deadline_s, sleep
        self._open = urllib.request.build_opener(_NoRedirects).open
        self.retried, self._counting = 0, threading.Lock()
        """The number of requests that were sent again."""

    def ask(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        until: float = math.inf,
        on_try: Callable[[], None] = lambda: None,
    ) -> Any:
        """The server's JSON. A request that fails for now is repeated.

        Args:
            body: sent as JSON by POST; None: a GET.
            until: the monotonic clock's time at which the whole request, its further tries included, is given up; over
                already, nothing is sent.
            on_try: called before each try; what it raises ends the request.

        Raises:
            ValueError: the server refuses the request, responds with no JSON, or with more than 64 MiB.
            EndpointError: all tries failed, or the time is over.
        """
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data, why, attempt = None if body is None else json.dumps(body).encode(), "", 0
        if time.monotonic() >= until:
            raise EndpointError(f"{self.url}{path} is not asked: no time is left for it")
        for attempt in range(self._retries + 1):
            on_try()
            # At least a few milliseconds, as 0 would mean none to a socket.
            asked_for_s, left_s = None, min(self._deadline_s, max(until - time.monotonic(), 0.005))
            ends = time.monotonic() + left_s
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                with self._open(request, timeout=left_s) as response:
                    body_read = self._read(response, ends, MOST_BYTES + 1)
                if len(body_read) > MOST_BYTES:
                    raise ValueError(f"{self.url}{path} responds with more than {MOST_BYTES >> 20} MiB")
                try:
                    return json.loads(body_read)
                except (ValueError, RecursionError) as error:  # not UTF-8, no JSON, too deep, or too long an integer
                    raise ValueError(f"{self.url}{path} responds with no JSON that can be read: {error}") from None
            except urllib.error.HTTPError as error:
                why = f"HTTP {error.code}: {self._excerpt(error, ends)}"
                if error.code not in FOR_NOW:
                    raise ValueError(f"{self.url}{path} refuses: {why}") from None
                asked_for_s = _seconds(error.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException) as error:  # refused, reset, cut off, or over its deadline
                why = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
            if attempt == self._retries:
                break
            # Jitter: requests that failed together do not come back together.
            wait_s = FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.5)
            wait_s = min(wait_s if asked_for_s is None else asked_for_s, LONGEST_WAIT_S)
            self._sleep(min(wait_s, max(until - time.monotonic(), 0.0)))
            if time.monotonic() >= until:  # another try would be paid for, and cut off at once
                break
            with self._counting:
                self.retried += 1
        raise EndpointError(f"{self.url}{path} failed in {attempt + 1} tries; the last: {why}")

    def only_model(self, remedy: str) -> str:
        """The name of the one model that an OpenAI-compatible server lists.

        Raises:
            ValueError: it lists none, or several, or no list; ends in the remedy.
        """
        try:
            names = [str(model["id"]) for model in self.ask("/models")["data"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.url}/models lists no models; {remedy}") from error
        if len(names) != 1:
            listed = " ".join(self.without_key(", ".join(names))[:EXCERPT].split())
            raise ValueError(f"{self.url} serves {listed or 'no model'}; {remedy}")
        return names[0]

    def without_key(self, text: str) -> str:
        """A server's message without secrets: some repeat what they were sent."""
        return text.replace(self._key, "[key]") if self._key else text

    def _read(self, response: Any, ends: float, most: int) -> bytes:
        """The body, or its first ``most`` bytes.

        A socket's timeout begins anew with each byte that comes, so that the whole try has one of its own.
        """
        body, whole = bytearray(), response.length  # None: in chunks, or up to the connection's end
        while len(body) < (most if whole is None else min(whole, most)):
            if time.monotonic() > ends:
                raise TimeoutError(f"{len(body)} bytes of the response came in time")
            if not (piece := response.read1(PIECE)):
                break
            body += piece
        if whole is not None and len(body) < min(whole, most):
            raise http.client.IncompleteRead(bytes(body), whole - len(body))
        return bytes(body[:most])

    def _excerpt(self, error: urllib.error.HTTPError, ends: float) -> str:
        try:
            text = self._read(error, ends, PIECE).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            text = ""
        return " ".join(self.without_key(text)[:EXCERPT].split())


def _seconds(retry_after: str | None) -> float | None:
    """The seconds to wait that a server requests; None if it names none, or a date.

    >>> _seconds("3"), _seconds("nan"), _seconds("Wed, 21 Oct 2026 07:28:00 GMT"), _seconds(None)
    (3.0, 0.0, None, None)
    """
    try:
        return max(0.0, float(retry_after)) if retry_after else None
    except ValueError:
        return None
