import gzip
import http.client
import io
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from grpo_rl import cli
from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.report import serve
from grpo_rl.report.files import is_running
from tests.report.runs import make_run, served


def get(
    port: int, path: str, host: str | None = None, method: str = "GET", encoding: str = "identity"
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}", "Accept-Encoding": encoding})
    response = connection.getresponse()
    return response.status, response.read(), dict(response.headers)


def changes(port: int, have: dict[str, str]) -> dict:
    words = ",".join(f"{name}:{version}" for name, version in have.items())
    return json.loads(get(port, f"/data.json?have={words}")[1])


@pytest.fixture
def at_once(monkeypatch):
    """Data are built whenever they may have changed."""
    monkeypatch.setattr(serve, "FRESH_S", 0.0)
    monkeypatch.setattr(serve, "MOST_OF_TIME", 1.0)


def test_a_reader_gets_only_the_sections_that_changed(tmp_path, at_once):
    make_run(tmp_path, steps=3, evaluated=False)
    with served(tmp_path) as port:
        first = changes(port, {})
        assert {"summary", "charts", "configuration"} <= set(first)
        have = {name: section["version"] for name, section in first.items()}
        assert changes(port, have) == {}
        MetricsLog(tmp_path).log(4, {"reward/mean": 0.5})
        second = changes(port, have)
        assert set(second) == {"summary", "charts"}
        assert second["charts"]["data"]["runs"][0]["step"] == [1, 2, 3, 4]


def test_a_reader_that_accepts_gzip_gets_the_same_page_compressed(tmp_path):
    make_run(tmp_path, steps=1)
    with served(tmp_path) as port:
        _, packed, headers = get(port, "/", encoding="gzip, deflate")
        assert headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(packed) == get(port, "/")[1]


def test_no_file_is_read_by_a_readers_name(tmp_path):
    make_run(tmp_path, steps=1)
    (tmp_path.parent / "secret").write_text("secret")
    with served(tmp_path) as port:
        for path in ("/../secret", "/metrics.jsonl", "//etc/passwd", "/%2e%2e/secret", "/..%2fsecret", "/config.yaml"):
            assert get(port, path)[0] == 404


def test_another_name_for_this_machine_reads_nothing(tmp_path):
    with served(tmp_path) as port:
        status, content, _ = get(port, "/", host="evil.example:80")
        assert status == 403 and b"<" not in content
        assert get(port, "/", host="localhost:1234")[0] == 200  # a port forwarded by ssh
        assert get(port, "/", host="localhost")[0] == 200  # port 80


def test_the_server_listens_on_loopback_and_takes_no_writes(tmp_path):
    with served(tmp_path) as port:
        assert get(port, "/", method="POST")[0] == 501
        assert get(port, "/", method="HEAD")[:2] == (200, b"")
        addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
        for address in addresses - {"127.0.0.1"}:
            if not address.startswith("127."):
                with pytest.raises(OSError):
                    socket.create_connection((address, port), timeout=1).close()


def test_half_a_request_holds_no_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "READ_S", 0.1)
    with served(tmp_path) as port:
        for sent in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: "):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as half:
                half.sendall(sent)
                assert half.recv(1) == b""


def test_damage_is_reported_to_the_reader_and_mended_files_are_served(tmp_path, at_once):
    make_run(tmp_path, steps=1)
    whole = (tmp_path / "summary.json").read_text()
    with served(tmp_path) as port:
        (tmp_path / "summary.json").write_text("{")
        status, content, headers = get(port, "/data.json")
        assert status == 503 and b"summary.json is not JSON" in content and "text/plain" in headers["Content-Type"]
        (tmp_path / "summary.json").write_text(whole)
        assert get(port, "/data.json")[0] == 200


def test_a_page_that_takes_long_to_build_is_built_seldom(monkeypatch):
    clock, built = [100.0], []

    def build():
        clock[0] += 3.0
        built.append(clock[0])
        return {"summary": str(len(built))}

    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    live = serve.LivePage(build, str, lambda: clock[0])
    live.page()
    clock[0] += 56.0  # 3 s are 5 % of 60 s: the next begins 57 s after this one's end
    live.page()
    assert len(built) == 1
    clock[0] += 1.5
    live.page()
    assert len(built) == 2


def test_a_page_is_built_once_for_each_change(tmp_path, at_once):
    make_run(tmp_path, steps=1)
    built = []
    live = serve.LivePage(lambda: built.append(1) or {"summary": "1"}, str, lambda: serve.state_of([tmp_path]))
    for changes in range(1, 3):
        live.page()
        live.page()
        assert len(built) == changes
        MetricsLog(tmp_path).log(1 + changes, {"reward/mean": 0.5})


@pytest.mark.parametrize(
    ("holder", "running"),
    [
        ({}, False),
        ({"pid": os.getppid(), "host": socket.gethostname()}, True),
        ({"pid": os.getpid(), "host": socket.gethostname()}, False),  # the run itself, which writes its page at its end
        ({"pid": 2**22 + 1, "host": socket.gethostname()}, False),  # above the greatest id of a process
        ({"pid": 1, "host": "elsewhere"}, None),
    ],
)
def test_a_run_goes_on_while_its_process_lives(tmp_path, holder, running):
    assert is_running(tmp_path) is False
    (tmp_path / ".lock").write_text(json.dumps(holder))
    assert is_running(tmp_path) is running


@pytest.mark.slow
def test_the_command_serves_the_recorded_run_until_ctrl_c(monkeypatch, capsys):
    found = {}
    # `capsys.readouterr()` would lose what is printed while it reads.
    monkeypatch.setattr(sys, "stdout", printed := io.StringIO())

    def read_and_interrupt():
        while not (port := re.search(r"http://[^/]*:(\d+)/", printed.getvalue())):
            time.sleep(0.05)
        port = int(port[1])
        found["page"] = get(port, "/")[1]
        found["changes"] = changes(port, {})
        os.kill(os.getpid(), signal.SIGINT)

    reader = threading.Thread(target=read_and_interrupt)
    reader.start()
    assert cli.main(["report", "--demo"]) == 0
    reader.join()
    assert b"SmolLM2-135M-Instruct trained with GRPO on gsm8k" in found["page"]
    assert found["changes"]["charts"]["data"]["runs"][0]["step"] == list(range(16))
    assert capsys.readouterr().err == ""
