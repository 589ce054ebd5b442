"""An OpenAI-compatible endpoint on loopback, whose behaviour a test sets."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def _send(self, status, text, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self._send(200, json.dumps({"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self):
        server = self.server
        server.bodies.append(body := json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        server.keys.append(self.headers["Authorization"])
        reply = server.replies.pop(0) if server.replies else server.respond(body)
        if reply is ConnectionResetError:
            self.connection.close()
        elif isinstance(reply, tuple):
            self._send(reply[0], server.message, reply[1])
        elif isinstance(reply, dict | list):
            self._send(200, json.dumps(reply))
        else:
            choice = {"message": {"role": "assistant", "content": reply}, "finish_reason": server.finish_reason}
            self._send(200, json.dumps({"choices": [choice], "usage": server.usage}))


class ChatEndpoint(ThreadingHTTPServer):
    """Replies with ``replies`` first, then with what ``respond`` makes of a request's body.

    A reply is a text, JSON, a status with headers, whose body is then ``message``, or ConnectionResetError.
    """

    daemon_threads, block_on_close = True, False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.bodies, self.keys, self.replies, self.models = [], [], [], ["tiny"]
        self.respond, self.finish_reason, self.message = lambda body: "ok", "stop", "broken"
        self.usage = {"prompt_tokens": 100, "completion_tokens": 5}

    def handle_error(self, request, client_address):
        pass


@contextlib.contextmanager
def chat_endpoint():
    with ChatEndpoint() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()
