from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Server:
    """An OpenAI-compatible server on loopback, whose behaviour a test sets."""

    def __init__(self):
        self.bodies, self.keys, self.failures, self.models = [], [], [], ["tiny"]
        self.respond, self.finish_reason, self.message = lambda body: "ok", "stop", "broken"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def _send(self, code, value, headers=()):
                data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(code)
                for name, text in dict(headers).items():
                    self.send_header(name, text)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self._send(200, {"data": [{"id": name} for name in outer.models]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.keys.append(self.headers["Authorization"])
                if outer.failures:
                    failure = outer.failures.pop(0)
                    if failure == "reset":
                        self.connection.close()
                        return
                    self._send(failure[0], outer.message, failure[1])
                    return
                message = {"role": "assistant", "content": outer.respond(body)}
                choice = {"message": message, "finish_reason": outer.finish_reason}
                self._send(200, {"choices": [choice], "usage": {"completion_tokens": 3}})

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda request, client_address: None
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()
