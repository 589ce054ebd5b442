"""The tools of a real MCP server over HTTP, a process that hangs, dies and is started again."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import SystemRandom

import pytest

pytest.importorskip("mcp")

from grpo_rl.envs.gsm8k import GSM8K
from grpo_rl.envs.tools.functions import Dropped
from grpo_rl.envs.tools.mcp import with_mcp
from tests.envs.tools.test_mcp import ROW, results

pytestmark = pytest.mark.slow

ADD = ("add", {"a": 1, "b": 1})


class Served:
    """A server's process on a free port."""

    def __init__(self):
        # Below those that the kernel hands out: no other process is given it before the server takes it.
        self.port = SystemRandom().randrange(10_000, 32_000)
        self.url, self.process = f"http://127.0.0.1:{self.port}/mcp", None

    def start(self):
        command = [sys.executable, str(Path(__file__).with_name("mcp_server.py")), str(self.port)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < until:
            try:
                return socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"the server did not start: {self.process.poll()}")

    def end(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def server():
    served = Served()
    served.start()
    yield served
    served.end()


@pytest.fixture
def connected(server):
    """Makes tasks with the tools of the server."""
    made = []

    def task(**entry):
        made.append(with_mcp(GSM8K([ROW]), [{"url": server.url, "timeout_s": 20.0} | entry]))
        return made[-1]

    yield task
    for one in made:
        one._of["add"].close()


def test_results_arrive_cut_and_without_control_characters_also_while_a_tool_hangs(connected):
    task, begun = connected(timeout_s=4.0), time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(results, task, ("act", {"how": "hang"}))
        large, control, raised = results(task, *(("act", {"how": how}) for how in ("300000", "control", "raise")))
        assert "gave no result within 4 s" in slow.result()[0]
    assert large == "x" * 4000 + "\n[the first 4000 of 300000 characters]"
    assert control == "a[31mbc\nd"
    assert raised.startswith("Error: ") and "nothing there" in raised
    assert results(task, ADD) == ["2"] and time.monotonic() - begun < 50


@pytest.mark.nightly
@pytest.mark.parametrize("on_failure", ["tell", "drop"])
def test_a_server_that_dies_and_is_started_again_is_connected_to_again(server, connected, on_failure):
    task = connected(on_failure=on_failure)
    if on_failure == "drop":
        with pytest.raises(Dropped, match="the MCP server"):
            results(task, ("act", {"how": "die"}))
    else:
        assert "failed: " in results(task, ("act", {"how": "die"}))[0]
    server.process.wait(30)
    server.start()
    assert results(task, ADD) == ["2"]


@pytest.mark.nightly
def test_a_server_that_freezes_is_told_within_its_deadline_and_one_in_its_place_is_connected_to(server, connected):
    task = connected(timeout_s=1.0)
    told = f"the MCP server {server.url.removesuffix('/mcp')} gave no result within 1 s, and is connected to again"
    assert results(task, ("freeze", {})) == [f"Error: RuntimeError: {told}"]
    server.end()
    server.start()
    assert results(task, ADD) == ["2"]
