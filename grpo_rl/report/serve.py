"""A run's page, served while the run goes on: on loopback, read-only, with what changed since a reader last asked."""

import gzip
import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from grpo_rl.loopback import LOOPBACK, names_this_machine
from grpo_rl.report.files import is_running

READ_S = 10.0
"""Seconds of silence after which a reader in the middle of a request, or of its answer, is given up with its thread."""
FRESH_S = 1.0
"""Data are built at most this often, however many read them."""
MOST_OF_TIME = 0.05
"""Building takes at most this share of the time: the run that is followed may need the machine for itself."""

WORTH_COMPRESSING = 10_000
"""Responses of more bytes are compressed for browsers that accept gzip: some are behind a tunnel."""


def state_of(runs: Sequence[Path]) -> object:
    """A value that changes with the files of the runs, and with whether they go on."""
    found: list[object] = [is_running(run) for run in runs]
    for path in (path for run in runs for path in sorted(run.iterdir()) if path.suffix != ".tmp"):
        with suppress(FileNotFoundError):  # it was removed meanwhile
            stat = path.lstat()
            found.append((path, stat.st_mtime_ns, stat.st_size))
    return found


class LivePage:
    """The data of a page, built anew when something has changed, and shared by all readers.

    Args:
        build: the data of each section as JSON, by id.
        assemble: the page of such data.
        state: a value that changes with what the data are built from.
    """

    def __init__(
        self,
        build: Callable[[], dict[str, str]],
        assemble: Callable[[dict[str, str]], str],
        state: Callable[[], object],
    ) -> None:
        self._build, self._assemble, self._state = build, assemble, state
        self._built: object = None
        """The state that the data were built from."""
        self._lock = threading.Lock()
        self._next = 0.0
        self._data: dict[str, str] = {}

    def page(self) -> str:
        """The whole page."""
        return self._assemble(self._refresh())

    def changes(self, have: dict[str, str]) -> str:
        """JSON of the sections whose version is not the one that the reader has: their version and data, by id."""
        data = self._refresh()
        versions = {name: _version(text) for name, text in data.items() if have.get(name) != _version(text)}
        parts = [f'{json.dumps(name)}:{{"version":"{v}","data":{data[name]}}}' for name, v in versions.items()]
        return "{" + ",".join(parts) + "}"

    def _refresh(self) -> dict[str, str]:
        with self._lock:
            if (begun := time.monotonic()) >= self._next and (state := self._state()) != self._built:
                self._data, self._built = self._build(), state
                ended = time.monotonic()
                self._next = ended + max(FRESH_S, (ended - begun) * (1 / MOST_OF_TIME - 1))
            return self._data


def make_server(page: LivePage, port: int = 0) -> ThreadingHTTPServer:
    """A server of the page on loopback; ``port`` 0 takes a free one.

    It has two addresses, ``/`` and ``/data.json``, and reads no file by a name that a reader gives.

    Raises:
        ValueError: the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "grpo-rl", ""
        timeout = READ_S

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            found = HTTPStatus.NOT_FOUND, "There is nothing here.", "text/plain"
            try:
                if not names_this_machine(self.headers.get("Host", "")):
                    found = HTTPStatus.FORBIDDEN, "This page is read on this machine alone.", "text/plain"
                elif url.path == "/":
                    found = HTTPStatus.OK, page.page(), "text/html"
                elif url.path == "/data.json":
                    words = parse_qs(url.query).get("have", [""])[0].split(",")
                    have = {name: version for name, _, version in (word.partition(":") for word in words)}
                    found = HTTPStatus.OK, page.changes(have), "application/json"
            except Exception as error:  # a file of the run is damaged, or half written; all is built before it is sent
                text = f"{type(error).__name__}: {error}"
                found = HTTPStatus.SERVICE_UNAVAILABLE, text, "text/plain"
            self._send(*found)

        do_HEAD = do_GET

        def _send(self, status: HTTPStatus, text: str, kind: str) -> None:
            content = text.encode()
            headers = {
                "Content-Type": f"{kind}; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                "Cross-Origin-Resource-Policy": "same-origin",
                "X-Frame-Options": "DENY",
            }
            if "gzip" in self.headers.get("Accept-Encoding", "") and len(content) > WORTH_COMPRESSING:
                content = gzip.compress(content, 1)
                headers["Content-Encoding"] = "gzip"
            headers["Content-Length"] = str(len(content))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass  # no log line for each request of each reader

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a reader that closed its window in the middle of an answer

    try:
        return Server((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"port {port} can't be used ({why}); leave --port out for a free one") from error


def serve(page: LivePage, port: int) -> int:
    """Serves the page until Ctrl-C."""
    with make_server(page, port) as server:
        with suppress(ValueError, OSError):  # a reader gets the reason
            page.page()  # so that the first reader doesn't wait for it
        print(f"http://{LOOPBACK}:{server.server_address[1]}/  (on this machine alone; Ctrl-C ends)", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)
    return 0


def _version(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
