"""Requests against a server on loopback that sends its responses in pieces, too late, cut off, or without an end."""

import contextlib
import socketserver
import threading
import time
from types import SimpleNamespace

import pytest

from grpo_rl.envs.rewards import json_client
from grpo_rl.envs.rewards.json_client import EndpointError, JsonClient

OK = b"HTTP/1.1 200 OK\r\n"
BUSY = b"HTTP/1.1 503 Busy\r\nRetry-After: 30\r\nContent-Length: 4\r\n\r\nbusy"
CHUNKED = OK + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n5\r\n": 1}\r\n0\r\n\r\n'


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        length = 0
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            length = int(line.split()[1]) if line.lower().startswith(b"content-length:") else length
        self.rfile.read(length)
        self.server.asked += 1
        with contextlib.suppress(OSError):  # the client has left
            for piece in self.server.pieces():
                self.wfile.write(piece)
                self.wfile.flush()


@pytest.fixture
def server():
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close, server.asked = True, False, 0
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def trickling(head, seconds=0.05, pieces=600):
    yield head
    for _ in range(pieces):
        time.sleep(seconds)
        yield b" "


@pytest.mark.parametrize("head", [OK, b"HTTP/1.1 400 Bad\r\n"])
@pytest.mark.parametrize("length", [b"", b"Content-Length: 600\r\n"])
def test_a_server_that_sends_byte_by_byte_is_left_at_the_deadline(server, head, length):
    server.pieces = lambda: trickling(head + length + b"\r\n")
    begun, failed = time.monotonic(), "refuses: HTTP 400" if b"400" in head else "1 tries; the last: TimeoutError"
    with pytest.raises((EndpointError, ValueError), match=failed):
        JsonClient(server.url, retries=0, deadline_s=0.3).ask("/x", {})
    assert time.monotonic() - begun < 20  # all of it takes half a minute


def test_a_wait_up_to_the_end_of_the_whole_request_is_followed_by_no_try(server, monkeypatch):
    server.pieces, now, tries = lambda: [BUSY], [0.0], []
    monkeypatch.setattr(json_client, "time", SimpleNamespace(monotonic=lambda: now[0]))
    client = JsonClient(server.url, sleep=lambda s: now.__setitem__(0, now[0] + s))
    with pytest.raises(EndpointError, match="in 1 tries; the last: HTTP 503: busy"):
        client.ask("/x", {}, until=5.0, on_try=lambda: tries.append(now[0]))
    assert tries == [0.0] and server.asked == 1 and client.retried == 0
    with pytest.raises(EndpointError, match="in 2 tries"):
        client.ask("/x", {}, until=40.0)
    assert server.asked == 3 and client.retried == 1


def test_a_response_that_is_cut_off_is_asked_for_again_and_one_in_chunks_is_read(server):
    pieces = iter([[OK + b'Content-Length: 90\r\n\r\n{"a": 1}'], [CHUNKED[:-20]], [CHUNKED]])
    server.pieces = lambda: next(pieces)
    client = JsonClient(server.url, sleep=lambda _: None)
    assert client.ask("/x") == {"a": 1} and client.retried == 2


@pytest.mark.parametrize("body", [b"<html>", b'"\xff"', b"[" * 100_000, b"1" * 5_000])
def test_a_response_that_is_no_json_is_reported_with_its_address(server, body):
    server.pieces = lambda: [OK + b"Content-Length: %d\r\n\r\n" % len(body) + body]
    with pytest.raises(ValueError, match=r"^http://.*/x responds with no JSON that can be read: ") as told:
        JsonClient(server.url).ask("/x")
    assert server.asked == 1 and len(str(told.value)) < 300


def test_a_response_that_is_too_large_is_refused(server, monkeypatch):
    monkeypatch.setattr(json_client, "MOST_BYTES", 1 << 20)
    server.pieces = lambda: [OK + b"\r\n"] + [b" " * (1 << 16)] * 200
    with pytest.raises(ValueError, match="responds with more than 1 MiB"):
        JsonClient(server.url).ask("/x")
    assert server.asked == 1
