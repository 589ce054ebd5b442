"""Conversations with the tools of a real MCP server over HTTP, a process that hangs, dies and is started again."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from random import SystemRandom

import pytest

pytest.importorskip("mcp")

from transformers import AutoTokenizer

from grpo_rl.collectors.multi_turn import begin, play
from grpo_rl.engines.base import Sampling
from grpo_rl.engines.scripted import ScriptedEngine
from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.gsm8k import GSM8K
from grpo_rl.testing import save_tiny_model
from tests.envs.tools.plain_parser import PlainParser

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

    def restart(self):
        """Starts the server again once it has died."""
        self.process.wait(30)
        self.start()

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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def conversations(server, tokenizer):
    """Plays conversations at the same time, each of which makes its calls one a turn; gives what each one heard."""
    envs = []

    def played(*plans, before_turn=lambda turn: None, **entry):
        rows = [{"question": f"do {json.dumps(plan)} now", "answer": "#### 2"} for plan in plans]
        task = GSM8K(rows)
        entry = {"url": server.url, "timeout_s": 20.0} | entry
        settings = {"tool_parser": PlainParser, "mcp": [entry], "max_turns": 5, "max_failed_fraction": 1.0}
        env = LLMEnv(task, tokenizer, 1, 2, **settings)
        envs.append(env)
        ends = [env.encode(row).count(tokenizer.eos_token_id) for row in rows]

        def say(prompt, g):
            turn = (list(prompt).count(tokenizer.eos_token_id) - ends[0]) // 2
            before_turn(turn)
            plan = json.loads(re.search(r"do (\[.*?\]) now", tokenizer.decode(prompt))[1])
            text = "<answer>2</answer>"
            if turn < len(plan):
                text = f"<tool_call>{json.dumps(dict(zip(('name', 'arguments'), plan[turn], strict=True)))}</tool_call>"
            return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

        trajectories = [begin(env, row, "row", env.encode(row)) for row in env.task.rows]
        play(env, ScriptedEngine(say), Sampling(max_new_tokens=1000), trajectories)
        heard = []
        for trajectory in trajectories:
            messages = trajectory.dialog.messages
            if trajectory.dropped is None:
                assert messages[-1]["content"] == "<answer>2</answer>"
                assert env.task.score_dialog(env.task.rows[0], messages).parts["correctness"] > 0
            results = [message["content"] for message in messages if message["role"] == "tool"]
            heard.append(trajectory.dropped or results)
        return heard

    yield played
    for env in envs:
        env.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("size", [300_000, 10_000_000])
def test_results_arrive_cut_and_without_control_characters(conversations, size):
    plans = [ADD], [("act", {"how": str(size)}), ADD], [("act", {"how": "control"})], [("act", {"how": "raise"})]
    normal, large, control, raised = conversations(*plans)
    assert normal == ["2"]
    assert large == ["x" * 4000 + f"\n[the first 4000 of {size} characters]", "2"]
    assert control == ["a[31mbc\nd"]
    assert raised[0].startswith("Error: ") and "nothing there" in raised[0]


def test_a_tool_that_hangs_is_told_and_others_are_answered_meanwhile(conversations):
    begun = time.monotonic()
    slow, fast = conversations([("act", {"how": "hang"}), ADD], [ADD, ADD], timeout_s=4.0)
    assert "gave no result within 4 s" in slow[0] and slow[1] == "2" and fast == ["2", "2"]
    assert time.monotonic() - begun < 50


@pytest.mark.nightly
@pytest.mark.parametrize("on_failure", ["tell", "drop"])
def test_a_server_that_dies_and_is_started_again_is_connected_to_again(server, conversations, on_failure):
    restarts = []

    def before_turn(turn):
        if turn == 1 and not restarts:  # the call that it dies of was made in turn 0
            restarts.append(server.restart())

    died, after = conversations(
        [("act", {"how": "die"}), ADD], [ADD, ADD, ADD], before_turn=before_turn, on_failure=on_failure
    )
    # The other conversation's earlier calls may have been under way when the server died.
    if on_failure == "drop":
        assert died.kind == "error" and "the MCP server" in died.message
    else:
        assert "failed: " in died[0] and died[1] == "2" and after[-1] == "2"
    restarts or server.restart()
    assert conversations([ADD]) == [["2"]]


@pytest.mark.nightly
def test_a_server_that_freezes_is_told_within_its_deadline_and_one_in_its_place_is_connected_to(server, conversations):
    def before_turn(turn):
        if turn == 1:
            server.end()
            server.start()

    told = f"the MCP server {server.url.removesuffix('/mcp')} gave no result within 1 s, and is connected to again"
    assert conversations([("freeze", {}), ADD], before_turn=before_turn, timeout_s=1.0) == [
        [f"Error: RuntimeError: {told}", "2"]
    ]
