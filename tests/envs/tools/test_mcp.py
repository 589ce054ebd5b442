"""Tools of MCP servers: real processes over stdio and HTTP, which hang, die, and return what no model should read."""

import gc
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import SystemRandom

import pytest

pytest.importorskip("mcp")

from grpo_rl.assembly.environment import make_env
from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.calculator import Calculator
from grpo_rl.envs.gsm8k import GSM8K
from grpo_rl.envs.task import last_said
from grpo_rl.envs.tools import mcp
from grpo_rl.envs.tools.functions import Dropped, run_calls
from grpo_rl.envs.tools.mcp import Server, with_mcp
from grpo_rl.settings.compose import choosing_configs, compose_config
from grpo_rl.settings.schema import Settings
from tests.envs.guards.test_isolation import ended
from tests.envs.scoring import PlainParser

pytestmark = pytest.mark.slow

ROW = {"question": "1 + 1?", "answer": "#### 2"}
COMMAND = shlex.join([sys.executable, str(Path(__file__).with_name("mcp_server.py"))])


@pytest.fixture(scope="module")
def task():
    made = with_mcp(GSM8K([ROW]), [{"command": COMMAND, "timeout_s": 30.0}])
    yield made
    made._of["add"].close()


def results(task, *calls):
    given = [
        {"id": f"call{i:05d}", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    said = [*task.prompt(ROW), {"role": "assistant", "content": "", "tool_calls": given}]
    return [message["content"] for message in task.reply(ROW, said)]


def test_a_task_of_one_turn_gets_the_tools_of_a_server_and_is_scored_as_before(task):
    assert [tool["name"] for tool in task.tools] == ["add", "act", "freeze", "pid"]
    assert results(task, ("add", {"a": 1, "b": 1}), ("add", {"a": "x", "b": 1}), ("none", {})) == [
        "2",
        'Error: a of add is "x"; it must be of type integer',
        "Error: there is no tool 'none', only add, act, freeze, pid",
    ]
    final = [*task.prompt(ROW), {"role": "assistant", "content": "<answer>2</answer>"}]
    assert task.reply(ROW, final) is None
    plain = GSM8K([ROW])
    assert task.score_dialog(ROW, final) == plain.score(ROW, last_said(final))
    assert type(task.without_rows()) is GSM8K and task.without_rows().tools == ()


@pytest.mark.cases(1)
@pytest.mark.parametrize("size", ["300000", "10000000"])
def test_what_a_server_returns_is_cut_and_has_no_control_characters(task, size):
    large, control, raised = results(task, *(("act", {"how": how}) for how in (size, "control", "raise")))
    assert large == "x" * 4000 + f"\n[the first 4000 of {size} characters]"
    assert control == "a[31mbc\nd"
    assert raised.startswith("Error: ") and "nothing there" in raised


@pytest.mark.parametrize(
    ("name", "arguments", "why", "again"),
    [
        ("act", {"how": "hang"}, "gave no result within 1 s", 0),  # a slow tool: the others are answered meanwhile
        ("freeze", {}, "gave no result within 1 s, and is restarted", 1),
        ("act", {"how": "die"}, "failed: ", 1),
    ],
)
def test_a_server_that_hangs_or_dies_is_named_and_restarted(task, name, arguments, why, again, monkeypatch):
    if "result" in why:
        monkeypatch.setattr(task._of["add"], "timeout_s", 1.0)
    starts, begun = task._of["add"].starts, time.monotonic()
    (told,) = results(task, (name, arguments))
    assert told.startswith(f"Error: RuntimeError: the MCP server {sys.executable} {why}")
    assert time.monotonic() - begun < 50
    monkeypatch.undo()
    assert results(task, ("add", {"a": 1, "b": 1})) == ["2"]
    assert task._of["add"].starts == starts + again


def test_no_secret_of_a_server_reaches_the_policy_or_the_terminal(capfd):
    variables = {"SEARCH_API_KEY": "planted-in-env", "PLAIN": "as it is"}
    command = f"{COMMAND} --api-key planted-behind --token=planted-in-word"
    task = with_mcp(GSM8K([ROW]), [{"command": command, "env": variables, "timeout_s": 30.0}])
    (shown,), (died,) = (results(task, ("act", {"how": how})) for how in ("secrets", "die"))
    task._of["add"].close()
    assert shown == "*** as it is ['--api-key', '***', '--token=***']"
    assert died.startswith(f"Error: RuntimeError: the MCP server {sys.executable} failed: ") and "planted" not in died
    assert capfd.readouterr() == ("", "")


def test_the_stderr_of_a_server_that_does_not_start_is_in_the_error_and_not_printed(capfd):
    entry = {"command": "sh -c 'echo no such module abc $A_KEY >&2; exit 3'", "env": {"A_KEY": "planted-key"}}
    with pytest.raises(ValueError, match=r"env.mcp: sh listed no tools: .*; stderr: …no such module abc \*\*\*$"):
        with_mcp(GSM8K([ROW]), [entry])
    assert capfd.readouterr() == ("", "")


STARTS = """
import os, signal, sys
from grpo_rl.envs.tools.mcp import Server
server = Server(sys.argv[1])
server.schemas()
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
server.close()
"""


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_what_a_server_has_started_ends_with_it_and_with_the_run(tmp_path, end):
    command = shlex.join(["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; exec {COMMAND}"])
    subprocess.run([sys.executable, "-c", STARTS, command, end], timeout=200)
    assert ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    "entry",
    [
        "python 'server --api-key planted",
        {"command": "no-such-program --api-key planted"},
        {"url": "http://me:planted@example.com/planted"},
        ["server", "--api-key", "planted"],
        {"command": ["server", "--api-key", "planted"]},
        {"command": "server --api-key planted", "url": "http://planted@localhost"},
        {"command": "server", "env": ["TOKEN=planted"]},
    ],
)
def test_no_refusal_of_an_entry_repeats_its_secrets(entry):
    with pytest.raises(ValueError, match="env.mcp") as refused:
        Server(entry)
    assert "planted" not in str(refused.value)


@pytest.mark.parametrize("wrong", [{"required": [["a"]]}, {"required": "a"}, {"properties": ["a"]}, ["a"]])
def test_a_schema_that_describes_no_object_is_refused_before_a_call_reads_it(task, monkeypatch, wrong):
    monkeypatch.setattr(Server, "schemas", lambda self: [{"name": "add", "parameters": wrong}])
    with pytest.raises(ValueError, match="the parameters of the tool 'add' are no JSON schema"):
        with_mcp(task, [COMMAND])


def test_a_wrong_entry_leaves_no_thread_of_the_entries_before_it(task):
    def of_servers():
        return {thread for thread in threading.enumerate() if thread.name.startswith("MCP ")}

    before = of_servers()
    with pytest.raises(ValueError, match="no-such-program"):
        with_mcp(task, [COMMAND, "no-such-program"])
    assert not of_servers() - before


def test_a_function_of_the_task_and_one_of_a_server_are_called_in_one_message():
    task = with_mcp(Calculator([ROW], form="function"), [COMMAND])
    assert results(task, ("calculator", {"expression": "6*7"}), ("add", {"a": 1, "b": 1})) == ["42", "2"]
    task._of["add"].close()


def test_on_failure_drop_takes_the_conversation_out():
    task = with_mcp(GSM8K([ROW]), [{"command": COMMAND, "on_failure": "drop"}])
    with pytest.raises(Dropped, match="the MCP server .* failed"):
        results(task, ("act", {"how": "die"}))
    task._of["add"].close()


def test_a_server_that_starts_slowly_drops_the_conversation_in_time_and_is_called_no_more_for_it(monkeypatch):
    server = Server({"command": f"sh -c 'sleep 0.5; exec {COMMAND}'", "on_failure": "drop"})
    called, wait = [], Server._wait
    monkeypatch.setattr(Server, "_wait", lambda self, work, s: called.append(work.__name__) or wait(self, work, s))
    calls = [{"id": "x", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]
    schemas = [{"function": {"name": "add"}}]
    monkeypatch.setattr(server, "deadline_s", 0.8)
    with pytest.raises(Dropped, match=r"did not start: TimeoutError: it needs longer than 0\.3 s"):
        run_calls(calls, schemas, server.call, seconds=lambda name: server.deadline_s)
    monkeypatch.setattr(server, "deadline_s", 22.0)
    (result,) = run_calls(calls, schemas, server.call, seconds=lambda name: server.deadline_s)
    assert result["content"] == "3" and called == ["call_tool"] and server.starts == 1  # the start went on
    server.close()


def test_a_start_that_hangs_is_ended_by_a_later_call_and_begun_anew(tmp_path):
    pids = tmp_path / "pids"
    server = Server(shlex.join(["sh", "-c", f"echo $$ >> {pids}; cat > {os.devnull}"]))
    server.deadline_s = 0.6

    def call():
        with pytest.raises(RuntimeError, match="did not start: TimeoutError"):
            server.call("add", {})
        return server.starts

    assert [call(), call()] == [1, 1]
    while not pids.exists() or not pids.read_text():
        time.sleep(0.01)
    server._current.begun -= mcp.START_S
    assert [call(), call()] == [1, 2] and ended(int(pids.read_text().split()[0]))
    server.close()


@pytest.mark.parametrize(
    "host", ["http://example.com", "http://127.0.0.1.example.com", "http://10.0.0.1", "HTTP://a.b"]
)
def test_an_address_outside_is_refused(host):
    with pytest.raises(ValueError, match="is not on this machine"):
        Server(f"{host}/mcp")


def test_the_setting_gives_an_environment_the_tools_and_their_parser(tmp_path, tokenizer):
    pytest.importorskip("vllm")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n")
    words = [f"env.path={rows}", f"env.mcp=[{{command: '{COMMAND}'}}]", "env.system_prompt=null", "mode=sync"]
    words += ["inference_model.max_model_len=4000"]
    settings = Settings.read(compose_config("grpo_gsm8k", choosing_configs(words)))
    env = make_env(settings, tokenizer)
    assert env.max_turns == settings.env.max_turns > 1
    assert '"name": "freeze"' in env.decode(env.encode(ROW))
    said = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
    text, calls = env.read_turn(said, {})
    (result,) = env.task.reply(ROW, [{"role": "assistant", "content": text, "tool_calls": calls}])
    assert result["content"] == "2"
    env.task._of["add"].close()


@pytest.mark.parametrize("forgotten", [False, True])
def test_an_environment_that_is_closed_or_forgotten_ends_its_servers(tokenizer, monkeypatch, forgotten):
    env = LLMEnv(GSM8K([ROW]), tokenizer, 1, 2, tool_parser=PlainParser, mcp=[COMMAND])
    pid, server, task = int(results(env.task, ("pid", {}))[0]), env._servers[0], env.task
    os.kill(pid, 0)  # it runs
    waited = []
    monkeypatch.setattr(server._thread, "join", lambda seconds=None: waited.append(seconds))
    if forgotten:
        del env
        gc.collect()
    else:
        env.close()
    assert bool(waited) is not forgotten
    monkeypatch.undo()
    server._thread.join(10.0)
    assert ended(pid, 0.1) and not server._thread.is_alive() and server._loop.is_closed()
    # A reply that was left behind starts no process that no one ends.
    assert results(task, ("pid", {})) == [
        f"Error: RuntimeError: the MCP server {sys.executable} did not start: RuntimeError: it is closed"
    ]
    assert server.starts == 1


# ---- over HTTP ----

ADD = ("add", {"a": 1, "b": 1})


class Served:
    """A server's process on a free port."""

    def __init__(self):
        # Below those that the kernel hands out: no other process is given it before the server takes it.
        self.port = SystemRandom().randrange(10_000, 32_000)
        self.url = f"http://127.0.0.1:{self.port}/mcp"

    def start(self):
        command = [*shlex.split(COMMAND), str(self.port)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < until:
            try:
                return socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"the server did not start: {self.process.poll()}")

    def end(self):
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


def test_results_arrive_also_while_a_tool_hangs(connected):
    task, begun = connected(timeout_s=4.0), time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(results, task, ("act", {"how": "hang"}))
        (large,) = results(task, ("act", {"how": "300000"}))
        assert "gave no result within 4 s" in slow.result()[0]
    assert large == "x" * 4000 + "\n[the first 4000 of 300000 characters]"
    assert results(task, ADD) == ["2"] and time.monotonic() - begun < 50


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("timeout_s", "call", "why"),
    [
        (1.0, ("freeze", {}), "gave no result within 1 s, and is connected to again$"),
        (20.0, ("act", {"how": "die"}), "failed: "),
    ],
)
def test_a_server_in_the_place_of_one_that_froze_or_died_is_connected_to(server, connected, timeout_s, call, why):
    task = connected(timeout_s=timeout_s)
    (told,) = results(task, call)
    assert re.match(f"Error: RuntimeError: the MCP server {server.url.removesuffix('/mcp')} {why}", told)
    server.end()
    server.start()
    assert results(task, ADD) == ["2"]


def test_a_url_of_this_machine_is_not_asked_through_a_proxy(connected, monkeypatch):
    for name, value in (("http_proxy", "http://127.0.0.1:9"), ("no_proxy", ""), ("NO_PROXY", "")):
        monkeypatch.setenv(name, value)
    assert results(connected(), ADD) == ["2"]
