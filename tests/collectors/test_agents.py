"""Groups of agents' sessions: what the engine sampled is what is trained on; an agent that fails is left out alone."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, Future
from contextlib import closing
from dataclasses import replace
from unittest.mock import MagicMock

import aiohttp
import pytest
import torch

from grpo_rl.agents.client import Client
from grpo_rl.agents.programs import AgentError, Function, Program
from grpo_rl.agents.recorder import Limits
from grpo_rl.assembly.agents import HeldOutSessions
from grpo_rl.collectors.agent_sessions import AgentSettings
from grpo_rl.collectors.agents import AgentGroups, SteppedGroups
from grpo_rl.collectors.asynchronous import AsyncCollector
from grpo_rl.collectors.engine_policy import EnginePolicy
from grpo_rl.collectors.sync import SyncCollector
from grpo_rl.data.advantages import AdvantageEstimator
from grpo_rl.data.group import Group
from grpo_rl.engines.base import EngineDeadError, Samples, Sampling
from grpo_rl.engines.loop_thread import LoopThread, SteppedEngine
from grpo_rl.envs.agent import Told
from grpo_rl.envs.base import LLMEnv, Reward, Task
from grpo_rl.envs.calculator import Calculator
from grpo_rl.run.held_out import HeldOut
from grpo_rl.settings.sections import Evaluate
from grpo_rl.testing import ScriptedEngine
from grpo_rl.training.evaluate import evaluate
from tests.collectors import test_asynchronous
from tests.collectors.test_asynchronous import Weights, fleet_of
from tests.envs.guards.test_isolation import ended

pytestmark = pytest.mark.slow

SAMPLING = Sampling(max_new_tokens=8)


class Length(Task):
    """A session is worth the letters of its last message."""

    reward_parts = ("letters",)

    def __init__(self, rows):
        self.rows = rows

    def prompt(self, row):
        return [{"role": "user", "content": "p"}]

    def score(self, row, response):
        return Reward({"letters": float(len(response))})


class Engine(ScriptedEngine):
    """Samples "aab" and an end; or whatever is given. Remembers its batches."""

    def __init__(self, tokenizer, said="aab"):
        ids = [*tokenizer(said)["input_ids"], tokenizer.eos_token_id]
        super().__init__(lambda prompt, g: ids, max_model_len=200)
        self.batches, self.temperatures = [], set()

    def generate(self, prompts, n, sampling):
        self.batches.append([list(prompt) for prompt in prompts])
        self.temperatures.add(sampling.temperature)
        return super().generate(prompts, n, sampling)


class Broken(Engine):
    def generate(self, prompts, n, sampling):
        raise RuntimeError("the engine is broken")


class Scripted:
    """An agent of this process: ``script(number, call, client)`` plays a session, ``number`` counts them."""

    def __init__(self, script):
        self._script, self.started = script, 0

    async def play(self, client, row):
        number, self.started = self.started, self.started + 1
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client.api_key}"}) as http:

            async def call(*messages, **settings):
                body = {"messages": [{"role": role, "content": text} for role, text in messages], **settings}
                async with http.post(f"{client.base_url}/chat/completions", json=body) as got:
                    told = await got.json()
                    if got.status != 200:
                        raise AgentError(told["error"]["message"])
                    return told["choices"][0]["message"]["content"]

            async def reward(value):
                async with http.post(f"{client.base_url}/reward", json={"reward": value}) as got:
                    assert got.status == 200

            call.reward = reward
            return await self._script(number, call)

    def close(self):
        pass


async def asks_once(number, call):
    await call(("user", "p"))


def settings_of(agent, task, limits=None, max_sessions=256):
    return AgentSettings(agent, "tiny", 20.0, limits or Limits(), None, isinstance(task, Told), max_sessions)


def sessions_of(agent, task):
    return HeldOutSessions(settings_of(agent, task))


def groups_of(tokenizer, agent, task, repeats=3, limits=None, max_sessions=256):
    env = LLMEnv(task, tokenizer, 1, repeats, max_failed_fraction=1.0)
    return env, AgentGroups(env, settings_of(agent, task, limits, max_sessions), SAMPLING, 200)


@contextlib.contextmanager
def collecting(env, groups, engine, total=100):
    """A collector in turns, which ends its sessions and its server."""
    collector = SyncCollector(env, EnginePolicy(engine, SAMPLING), total, agents=SteppedGroups(groups, engine))
    try:
        yield collector
    finally:
        collector.shutdown()


def collected(tokenizer, agent, task=None, engine=None, repeats=3, total=6, limits=None, max_sessions=256):
    """The groups of a collection in turns, its environment, engine and collector."""
    engine = engine or Engine(tokenizer)
    env, groups = groups_of(tokenizer, agent, task or Length([{}]), repeats, limits, max_sessions)
    with collecting(env, groups, engine, total) as collector:
        return collector.collect(), env, engine, collector


def written(tokenizer, group):
    return [tokenizer.decode([*group.prompt_ids, *ids]) for ids in group.responses]


def chosen(tokenizer, group):
    masks = group.trainable.split(group.lengths.tolist())
    return [tokenizer.decode(ids[mask]) for ids, mask in zip(group.responses, masks, strict=True)]


def test_the_calls_of_a_session_become_sequences_with_its_reward(tokenizer):
    async def script(number, call):
        said = await call(("user", "p"))
        if number == 1:
            said = await call(("user", "p"), ("assistant", said), ("user", "q"), max_tokens=2)
        if number == 2:
            await call(("user", "pr"))

    (group,), _, engine, collector = collected(tokenizer, Scripted(script))
    assert written(tokenizer, group) == [
        "p<end>>aab<end>", "p<end>>aab<end>q<end>>aa", "p<end>>aab<end>", "pr<end>>aab<end>",
    ]  # fmt: skip
    assert chosen(tokenizer, group) == ["aab<end>", "aab<end>aa", "aab<end>", "aab<end>"]
    assert tokenizer.decode(group.prompt_ids) == "p"  # what all prompts begin with
    assert group.rewards.tolist() == [3.0, 2.0, 3.0, 3.0] and group.sessions.tolist() == [0, 1, 2, 2]
    assert group.truncated.tolist() == [False, True, False, False] and not group.log_probs[~group.trainable].any()
    sampled = [prompt for batch in engine.batches for prompt in batch]
    whole = [[*group.prompt_ids.tolist(), *ids.tolist()] for ids in group.responses]
    assert all(any(tokens[: len(prompt)] == prompt for tokens in whole) for prompt in sampled)
    counts = dict(sessions=3, calls=5, extended=1, rewritten=1, branches=0, sequences=4, left_out=0)
    assert collector.metrics() == {f"agents/{name}": count for name, count in counts.items()}
    # Three sessions are compared, not four sequences: 3, 2, 3 have the mean 8/3 and the std 0.577.
    (group,) = AdvantageEstimator()([group])
    assert group.advantages.tolist() == pytest.approx([0.5773, -1.1545, 0.5773, 0.5773], abs=1e-4)
    assert Group.from_tensordict(group.to_tensordict()).sessions.tolist() == [0, 1, 2, 2]
    assert group.with_only([1, 3]).sessions.tolist() == [1, 2]


def test_sessions_of_all_rows_are_sampled_together_and_a_slow_one_holds_up_nobody(tokenizer):
    release = threading.Event()

    async def script(number, call):
        if number == 0:
            while not release.is_set():
                await asyncio.sleep(0.005)
        for _ in range(3):
            said = await call(("user", "p"), ("user", str(number)))
        if number == 5:
            release.set()
        return said

    engine = Engine(tokenizer)
    (group,), *_ = collected(tokenizer, Scripted(script), engine=engine, repeats=6)
    assert group.size == 18 and release.is_set()
    assert sum(map(len, engine.batches)) == 18 and max(map(len, engine.batches)) >= 2


def test_an_agent_that_fails_loses_its_session_alone(tokenizer):
    async def script(number, call):
        await call(("user", "p"))
        if number == 1:
            raise AgentError("it ended with SIGKILL: …")
        if number == 2:
            raise TimeoutError("it was not done within 20 s")
        return "a text of its own" if number == 3 else None

    (group,), env, *_ = collected(tokenizer, Scripted(script), repeats=5)
    assert group.sessions.tolist() == [0, 3, 4] and group.rewards.tolist() == [3.0, 17.0, 3.0]
    assert env.guard.failed == {"error": 1, "timeout": 1}
    assert "the agent failed on row 0, session 1: it ended with SIGKILL" in env.guard.examples["error"]


def test_an_agent_tells_its_reward_by_a_call_or_as_its_result(tokenizer):
    async def script(number, call):
        if number != 3:
            await call(("user", "p"))
        if number not in (1, 2):
            await call.reward(2.0)
        return {1: 0.5, 4: 0.25, 5: 10**400}.get(number)  # the last one counts

    (group,), env, *_ = collected(tokenizer, Scripted(script), Told([{"seed": 1}]), repeats=6)
    assert group.rewards.tolist() == [2.0, 0.5, 0.25] and list(group.reward_parts) == ["agent"]
    assert env.guard.failed == {"error": 3}
    assert "no reward on row 0, session 2" in env.guard.examples["error"]


def test_a_task_with_a_tool_scores_the_final_message_of_a_session(tokenizer):
    task, right = Calculator([{"question": "6 times 7?", "answer": "#### 42"}]), "<answer>42</answer>"

    async def script(number, call):
        said = await call(("user", "p"))
        await call(("user", "p"), ("assistant", said), ("user", "q"))
        return right if number == 1 else None

    (group,), *_ = collected(tokenizer, Scripted(script), task)
    plain = task.score(task.rows[0], right).total
    assert group.rewards.tolist() == [0.0, plain, 0.0] and plain > 0


def test_where_fewer_than_two_sessions_are_left_the_next_row_is_taken(tokenizer):
    async def script(number, call):
        await call(("user", "p"))
        if number in (0, 2):
            raise AgentError("no")

    (group,), _, _, collector = collected(tokenizer, Scripted(script), Length([{}, {"x": 1}]))
    assert group.group_id == 1 and collector.dropped_groups == 1 and collector.collected == 6


def test_notes_on_requests_are_told_once_and_counts_are_kept_in_checkpoints(tokenizer):
    async def script(number, call):
        await call(("user", "p"), temperature=0.3)

    engine = Engine(tokenizer)
    env, groups = groups_of(tokenizer, Scripted(script), Length([{}]))
    with collecting(env, groups, engine) as collector:
        collector.collect()
        collector.collect()
        (note,) = collector.events()
        assert "temperature=0.3 is replaced by the run's 1.0" in note and collector.events() == []
        state = collector.state_dict()
        collector.collect()
        collector.load_state_dict(state)
        assert collector.metrics()["agents/calls"] == 6


def test_an_engine_that_fails_ends_the_collection_and_an_evaluation(tokenizer):
    with pytest.raises(RuntimeError, match="the engine is broken"):
        collected(tokenizer, Scripted(asks_once), engine=Broken(tokenizer))
    env = LLMEnv(Length([{}]), tokenizer, 1, 2)
    with pytest.raises(RuntimeError, match="the engine is broken"):
        evaluate(env, Broken(tokenizer), [{}], GREEDY, sessions=sessions_of(Scripted(asks_once), env.task))


def test_sequences_that_begin_otherwise_than_most_are_left_out(tokenizer):
    async def script(number, call):
        await call(("user", "x" if number == 1 else "p"))

    (group,), _, _, collector = collected(tokenizer, Scripted(script))
    assert group.sessions.tolist() == [0, 2] and collector.metrics()["agents/left_out"] == 1


GREEDY = Sampling(temperature=0.0, max_new_tokens=8)


async def asks_twice(number, call):
    """Two calls; the third session breaks off after its first, and the fourth makes none."""
    if number == 3:
        return
    said = await call(("user", "p"), temperature=0.7)
    if number == 2:
        raise AgentError("no")
    await call(("user", "p"), ("assistant", said), ("user", "q"), max_tokens=2)


def test_held_out_rows_are_played_greedily_and_agents_that_fail_count_as_scorers_and_end_no_training(tokenizer):
    env, engine, told = LLMEnv(Length([{}]), tokenizer, 1, 2, max_failed_fraction=0.0), Engine(tokenizer), []
    env.guard.tell = told.append
    rows = [{"held": i} for i in range(4)]
    found = evaluate(env, engine, rows, GREEDY, sessions=sessions_of(Scripted(asks_twice), env.task))
    # Which row a session is about depends on who connects first.
    columns = map(str, found.rewards), found.prompts, found.completions, found.lengths, found.truncated
    assert Counter(zip(*columns, strict=True)) == {
        ("2.0", "p>", "aab\n\nq\n\naa", 6, True): 2,
        ("nan", "p>", "aab", 4, False): 1,
        ("nan", "p", "", 0, False): 1,
    }  # fmt: skip
    assert found.metrics()["eval/failed"] == 2 and found.reward == 2.0 and engine.temperatures == {0.0}
    guard = env.held_out_guard
    assert guard.failed == {"error": 2} and env.guard.counts == {"judged": 0}
    (text,) = [text for text in told if "held-out row" in text]
    assert guard.examples["error"] in text


def test_what_held_out_sessions_run_into_is_told_once(tokenizer):
    async def script(number, call):
        await call(("user", "p"), temperature=0.7, tools=[{"type": "function", "function": {"name": "f"}}])

    def broken(tokenizer, tools):
        class Parser:
            def parse(self, text):
                raise KeyError("no such thing")

        return Parser()

    env, told = LLMEnv(Length([{}]), tokenizer, 1, 2), []
    sessions = HeldOutSessions(replace(settings_of(Scripted(script), env.task), make_parser=broken))
    env.guard.tell = told.append
    for _ in range(2):
        evaluate(env, Engine(tokenizer), [{}, {}], GREEDY, sessions=sessions)
    assert len(told) == 2 and "temperature=0.7 is replaced by the run's 0.0" in told[0] and "no such thing" in told[1]


def test_several_sessions_about_a_held_out_row_stand_side_by_side(tokenizer):
    class Seeds(Task):
        reward_parts, tells_right, correct_part = ("right",), True, "right"
        rows = ({"seed": 0},)

        def prompt(self, row):
            return [{"role": "user", "content": "p"}]

        def score(self, row, response):
            return Reward({"right": float(response == str(row["seed"]))})

    class SaysItsSeed:
        """Ends with the row's seed, or in its first session about it with something else."""

        def __init__(self):
            self.seen = set()

        async def play(self, client, row):
            await Scripted(asks_once).play(client, row)
            first = row["seed"] not in self.seen
            self.seen.add(row["seed"])
            return "?" if first else str(row["seed"])

    env, engine = LLMEnv(Seeds(), tokenizer, 1, 2), Engine(tokenizer)
    sessions = sessions_of(SaysItsSeed(), env.task)
    state = torch.random.get_rng_state()
    found = evaluate(env, engine, [{"seed": 4}, {"seed": 7}], Sampling(max_new_tokens=8), samples=3, sessions=sessions)
    assert [sorted(found.rewards[:3]), sorted(found.rewards[3:])] == [[0.0, 1.0, 1.0]] * 2
    assert found.row_scores()["pass@1"] == pytest.approx([2 / 3, 2 / 3]) and engine.temperatures == {1.0}
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_session_tells_its_reward_of_a_held_out_row_too(tokenizer):
    class Tells:
        async def play(self, client, row):
            await Scripted(asks_once).play(client, row)
            return row["worth"]

    env = LLMEnv(Told([{"worth": 9}]), tokenizer, 1, 2)
    rows = [{"worth": 0.5}, {"worth": 2}]
    found = evaluate(env, Engine(tokenizer), rows, GREEDY, sessions=sessions_of(Tells(), env.task))
    assert found.rewards == [0.5, 2.0] and found.parts == {"agent": 1.25} and found.completions == ["aab", "aab"]


def test_a_session_that_breaks_ends_the_evaluation_and_the_sessions_of_other_rows_with_their_programs(
    tokenizer, tmp_path
):
    program = Program(f"sh -c 'echo $$ > {tmp_path}/pid; exec sleep 60'", 50.0)

    cancelled = []

    class Breaks:
        async def play(self, client, row):
            if not row:
                try:
                    await program.play(client, row)
                except asyncio.CancelledError:
                    cancelled.append(row)
                    raise
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                await asyncio.sleep(0.01)
            raise TypeError("a mistake in the agent's adapter")

    env = LLMEnv(Length([{}]), tokenizer, 1, 2)
    with pytest.raises(TypeError, match="a mistake"):
        evaluate(env, Engine(tokenizer), [{}, {"x": 1}], GREEDY, sessions=sessions_of(Breaks(), env.task))
    assert cancelled == [{}] and ended(int((tmp_path / "pid").read_text()))


PROGRAM = """
import json, os, signal, sys, urllib.request
row, base = json.load(sys.stdin), os.environ["OPENAI_BASE_URL"]
def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
messages = [{"role": "user", "content": row["q"]}]
said = post("/chat/completions", {"model": os.environ["OPENAI_MODEL"], "messages": messages})
try:
    os.close(os.open(row["folder"] + "/first", os.O_CREAT | os.O_EXCL))
except FileExistsError:
    pass
else:
    print("I am the first", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
post("/reward", {"reward": len(said["choices"][0]["message"]["content"])})
"""


def test_a_program_that_is_killed_in_the_middle_loses_its_session_alone(tokenizer, tmp_path):
    (tmp_path / "agent.py").write_text(PROGRAM)
    agent = Program(f"{sys.executable} -S {tmp_path / 'agent.py'}", 20.0)
    (group,), env, *_ = collected(tokenizer, agent, Told([{"q": "p", "folder": str(tmp_path)}]))
    assert group.rewards.tolist() == [3.0, 3.0] and env.guard.failed == {"error": 1}
    assert "it ended with SIGKILL: …I am the first" in env.guard.examples["error"]


def test_a_program_that_is_late_is_killed_with_what_it_started(tokenizer, tmp_path):
    (pid := tmp_path / "pid").touch()

    async def play(deadline_s):
        agent = Program(f"sh -c 'sleep 600 & echo $! > {pid}; wait'", deadline_s)
        with pytest.raises(TimeoutError, match=rf"not done within {deadline_s:g} s"):
            await agent.play(CLIENT, {"x": 1})

    deadline_s = 1.0
    while not pid.read_text():  # on a busy machine a second is too short for the program to begin
        asyncio.run(play(deadline_s))
        deadline_s *= 4
    assert ended(int(pid.read_text()))


CLIENT = Client("u", "k", "m")


@pytest.mark.parametrize("code", [0, 3])
def test_a_session_ends_with_its_program_though_a_process_that_it_started_holds_its_messages_open(tmp_path, code):
    agent = Program(f"sh -c 'sleep 60 & echo $! > {tmp_path}/pid; echo no such file >&2; exit {code}'", 30.0)
    failed = pytest.raises(AgentError, match="it ended with exit code 3: …no such file$")
    begun = time.monotonic()
    with failed if code else contextlib.nullcontext():
        asyncio.run(agent.play(CLIENT, {"x": "y" * 10**6}))  # a row that no one reads is too large for the pipe
    assert time.monotonic() - begun < 50 and ended(int((tmp_path / "pid").read_text()))


def test_a_program_reads_its_whole_row(tmp_path):
    agent = Program(f"{sys.executable} -S -c 'import sys; sys.exit(len(sys.stdin.read()) % 251)'", 30.0)
    with pytest.raises(AgentError, match=f"exit code {(10**6 + 9) % 251}$"):  # {"x": ""} has nine characters
        asyncio.run(agent.play(CLIENT, {"x": "y" * 10**6}))


def test_a_program_ends_with_the_trainer_and_calls_the_endpoint_without_a_proxy(monkeypatch, tmp_path):
    monkeypatch.setenv("NO_PROXY", "x.org")
    monkeypatch.delenv("no_proxy", raising=False)
    (tmp_path / "asks.py").write_text(
        "import ctypes, os, sys\nsignal = ctypes.c_int()\nctypes.CDLL(None).prctl(2, ctypes.byref(signal))\n"
        "sys.exit(f\"{signal.value} {os.environ['no_proxy']} {os.environ['NO_PROXY']}\")"
    )
    agent = Program(f"{sys.executable} -S {tmp_path / 'asks.py'}", 20.0)
    with pytest.raises(AgentError, match=r"…9 x\.org,127\.0\.0\.1 x\.org,127\.0\.0\.1$"):  # 9: what Linux sends it
        asyncio.run(agent.play(CLIENT, {}))


SEEN = """
import os, sys
NAMES = ["API_URL", "DATABASE", "OPENAI_API_KEY", "SEARCH_TOKEN", "WANDB_API_KEY"]

def seen(client=None, row=None):
    return " ".join(f"{name}={os.environ[name]}" for name in NAMES if name in os.environ)

if __name__ == "__main__":
    sys.exit(seen())
"""


def test_agents_inherit_no_variable_that_looks_like_a_secret_unless_it_is_passed(monkeypatch, tmp_path):
    (tmp_path / "sees.py").write_text(SEEN)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("OPENAI_API_KEY", "SEARCH_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "own")
    monkeypatch.setenv("DATABASE", "postgres://me:pw@host/db")
    monkeypatch.setenv("API_URL", "https://host/v1")
    program = Program(f"{sys.executable} -S {tmp_path / 'sees.py'}", 20.0, ["SEARCH_TOKEN"])
    with pytest.raises(AgentError, match=r"…API_URL=https://host/v1 OPENAI_API_KEY=k SEARCH_TOKEN=own$"):
        asyncio.run(program.play(CLIENT, {}))
    with closing(Function("sees:seen", 20.0, ["SEARCH_TOKEN"])) as function:
        assert asyncio.run(function.play(CLIENT, {})) == "API_URL=https://host/v1 SEARCH_TOKEN=own"
    for make in (lambda: Program("true", 1.0, ["NOT_SET"]), lambda: Function("sees:seen", 1.0, ["NOT_SET"])):
        with pytest.raises(ValueError, match="env.pass_environment names NOT_SET, which is not set"):
            make()


def test_a_call_that_is_left_when_the_sessions_are_over():
    stepped, loop = SteppedEngine(ScriptedEngine(lambda prompt, g: [1])), LoopThread()
    left, over = loop.start(stepped.sample([1], SAMPLING)), Future()
    over.set_result(None)
    loop.run(asyncio.sleep(0))
    stepped.run(over)
    with pytest.raises(CancelledError):
        left.result(5.0)
    loop.close()


@pytest.mark.parametrize(
    ("command", "why"),
    [("no-such-program x", "there is no program"), ("", "there is no program"), ("python 'x", "can't be split")],
)
def test_a_program_that_is_not_there_is_refused(command, why):
    with pytest.raises(ValueError, match=why):
        Program(command, 1.0)


MODULE = """
import json, os, signal, time, urllib.request

def play(client, row):
    headers = {"Authorization": "Bearer " + client.api_key}
    body = json.dumps({"messages": [{"role": "user", "content": row["q"]}]}).encode()
    request = urllib.request.Request(client.base_url + "/chat/completions", body, headers)
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    try:
        os.close(os.open(row["folder"] + "/first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return said + "!"
    os.kill(os.getpid(), signal.SIGKILL)

def wrong(client, row):
    return [1] if row["kind"] == "list" else 10**400

def slow(client, row):
    open(row["file"], "w").write(str(os.getpid()))
    time.sleep(600)
"""


def test_a_function_is_called_in_a_process_of_its_own_and_its_text_is_scored(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "my_agent.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    agent = Function("my_agent:play", 20.0)
    (group,), env, *_ = collected(tokenizer, agent, Length([{"q": "p", "folder": str(tmp_path)}]), max_sessions=1)
    assert len(agent._idle) == 1  # one process at a time is used again and again
    assert group.rewards.tolist() == [4.0, 4.0] and env.guard.failed == {"error": 1}
    assert "WorkerDied: the process of the call died, of SIGKILL" in env.guard.examples["error"]


def test_an_evaluation_leaves_as_many_processes_as_it_found(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "kept_agent.py").write_text("def play(client, row):\n    return 'x'\n")
    monkeypatch.syspath_prepend(tmp_path)
    agent, env = Function("kept_agent:play", 20.0), LLMEnv(Length([{}]), tokenizer, 1, 2)
    try:
        asyncio.run(agent.play(CLIENT, {}))
        (found,) = agent._idle
        held_out = HeldOut(env, [{}, {}], GREEDY, Evaluate(), sessions=sessions_of(agent, env.task))
        with pytest.raises(ValueError, match="none of the 2 held-out responses"):  # it makes no call
            held_out.evaluate(0, Engine(tokenizer), lambda work: work())
        assert len(agent._idle) == 1 and not agent._busy and found._live
    finally:
        agent.close()


def test_a_process_that_cannot_be_started_fails_its_session(tmp_path, monkeypatch):
    (tmp_path / "some_agent.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", MagicMock(side_effect=OSError(24, "Too many open files")))
    agent = Function("some_agent:slow", 60.0)
    with pytest.raises(AgentError, match="Too many open files"):
        asyncio.run(agent.play(CLIENT, {}))


def test_a_session_that_is_cancelled_takes_its_function_along_and_wrong_results_are_named(tmp_path, monkeypatch):
    (tmp_path / "odd_agent.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    async def cancelled():
        playing = asyncio.ensure_future(slow.play(CLIENT, {"file": str(tmp_path / "pid")}))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.wait({playing})

    async def wrongs():
        for kind, name in (("list", "list"), ("large", "int")):
            with pytest.raises(AgentError, match=f"wrong returned a {name}; it must be a finite number"):
                await wrong.play(CLIENT, {"kind": kind})

    slow, wrong = (Function(f"odd_agent:{name}", 600.0) for name in ("slow", "wrong"))
    try:
        asyncio.run(cancelled())
        assert ended(int((tmp_path / "pid").read_text()))
        asyncio.run(wrongs())
    finally:
        slow.close()
        wrong.close()


class AsyncTiny(test_asynchronous.Engine):
    """An engine of a fleet; its first ``dies`` calls kill it."""

    max_model_len = 200

    def __init__(self, tokenizer, dies=0):
        self._ids, self._dies, self.seen = [*tokenizer("aab")["input_ids"], tokenizer.eos_token_id], dies, []

    async def generate(self, request_id, prompt, n, sampling):
        version = self.version
        await asyncio.sleep(0.01)
        if self._dies:
            self._dies -= 1
            raise EngineDeadError("engine 0 died")
        ids = self._ids[: sampling.max_new_tokens]
        self.seen.append([*prompt, *ids])
        return Samples.from_lists([ids], [[-0.5] * len(ids)], [False], version)


@pytest.mark.parametrize("dies", [0, 1])
def test_sessions_go_on_while_the_policy_is_trained_and_are_played_again_where_their_engine_dies(tokenizer, dies):
    async def script(number, call):
        said = await call(("user", "p"))
        await call(("user", "p"), ("assistant", said), ("user", str(number % 7)))

    loop, engine = LoopThread(), AsyncTiny(tokenizer, dies)
    weights, engines = Weights(engine), fleet_of(engine, loop)
    env, groups = groups_of(tokenizer, Scripted(script), Length([{}, {"x": 1}]))
    collector = AsyncCollector(env, engines, SAMPLING, 12, weights, 1, agents=groups)
    found: list[Group] = []
    try:
        while got := collector.collect():
            found += got
            # Other sessions of training are under way meanwhile.
            held_out = evaluate(env, engines, [{}, {}], GREEDY, sessions=sessions_of(Scripted(script), env.task))
            assert held_out.rewards == [3.0, 3.0] and held_out.lengths == [8, 8]
            weights.push()
        metrics = collector.metrics()
    finally:
        collector.shutdown()
        loop.close()
    assert len(found) == 4 and all(group.size == 3 for group in found)
    assert max(int(group.versions.max()) for group in found) > 0 and metrics["groups/resampled"] == dies
    assert metrics["agents/calls"] == 24
    for group in found:
        for ids in group.responses:
            assert [*group.prompt_ids.tolist(), *ids.tolist()] in engine.seen
        assert chosen(tokenizer, group) == ["aab<end>aab<end>"] * 3
    assert json.dumps(metrics)
