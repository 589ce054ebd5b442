"""A model served to an agent without training."""

import contextlib
import http.client
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import openai
import pytest

from grpo_rl.engines.base import Sampling
from grpo_rl.serving import serving
from grpo_rl.testing import ScriptedEngine


@contextlib.contextmanager
def served(tokenizer, engine, monkeypatch):
    """The base URL of a model that is served, and the stream of what is printed."""
    # `capsys.readouterr()` would lose what is printed while it reads.
    monkeypatch.setattr(sys, "stdout", printed := io.StringIO())
    until = Future()
    arguments = ("tiny", tokenizer, engine, Sampling(max_new_tokens=9), None, 0, until)
    thread = threading.Thread(target=serving.serve, args=arguments)
    thread.start()
    try:
        while not (url := re.search(r"OPENAI_BASE_URL=(\S+) ", printed.getvalue())):
            assert thread.is_alive()
            time.sleep(0.01)
        yield url[1], printed
    finally:
        until.set_result(None)
        thread.join()


@pytest.mark.slow
def test_any_key_opens_a_session_and_what_they_did_is_reported_at_the_end(tokenizer, monkeypatch):
    ids = [*tokenizer("abc")["input_ids"], tokenizer.eos_token_id]
    engine, seen = ScriptedEngine(lambda prompt, g: ids, max_model_len=100), set()
    generate = engine.generate
    engine.generate = lambda prompts, n, sampling: seen.add(sampling.temperature) or generate(prompts, n, sampling)
    monkeypatch.setattr(serving, "MOST_SESSIONS", 2)
    monkeypatch.setattr(serving, "MOST_CALLS", 2)
    with served(tokenizer, engine, monkeypatch) as (url, printed):
        for key in ("a", "b", "c", "c"):
            with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
                asked = [{"role": "user", "content": "p"}]
                answer = client.chat.completions.create(model="tiny", messages=asked, temperature=0.2)
                asked += [answer.choices[0].message, {"role": "user", "content": "q"}]
                client.chat.completions.create(model="tiny", messages=asked, temperature=0.2)
    last = printed.getvalue().splitlines()[-1]
    assert last == "4 sessions, 8 calls, 4 extended, 0 rewritten, 0 branches, 32 tokens" and seen == {0.2}


def test_a_request_at_which_the_engine_fails_fails_alone(tokenizer, monkeypatch):
    class Fails(ScriptedEngine):
        def generate(self, prompts, n, sampling):
            if sampling.top_p == 0.5:
                raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
            return super().generate(prompts, n, sampling)

    engine = Fails(lambda prompt, g: tokenizer("abc")["input_ids"], max_model_len=100)
    with served(tokenizer, engine, monkeypatch) as (url, _):
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "p"}]}

            def ask(top_p):
                try:
                    return client.chat.completions.create(**asked, top_p=top_p).choices[0].message.content
                except openai.BadRequestError as error:
                    return error.message

            with ThreadPoolExecutor(8) as threads:  # in one batch, or not
                found = list(threads.map(ask, [0.5, 0.9] * 4))
            assert found[1::2] == ["abc"] * 4 and all("the engine fails at this request" in told for told in found[::2])
            assert ask(0.9) == "abc"


def test_another_name_for_this_machine_is_refused(tokenizer, monkeypatch):
    def status(host):
        connection = http.client.HTTPConnection(url.split("/")[2], timeout=10)
        connection.request("GET", "/v1/models", headers={"Host": host, "Authorization": "Bearer any"})
        return connection.getresponse().status

    with served(tokenizer, ScriptedEngine(lambda prompt, g: [1], max_model_len=100), monkeypatch) as (url, _):
        assert [status(host) for host in ("evil.example:80", "127.0.0.1:1", "localhost")] == [403, 200, 200]


@pytest.mark.nightly
def test_the_command_serves_a_model_until_it_is_interrupted(tiny_model):
    words = ["inference_model.engine=transformers", "inference_model.max_model_len=64", "sampling.max_new_tokens=8"]
    command = [sys.executable, "-m", "grpo_rl.cli", "serve-policy", str(tiny_model), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        while not (url := re.search(r"OPENAI_BASE_URL=(\S+)", process.stdout.readline())):
            assert process.poll() is None
        client = openai.OpenAI(base_url=url[1], api_key="any", max_retries=0)

        def said(seed):
            asked = {"messages": [{"role": "user", "content": "p"}], "seed": seed, "stop": "a"}
            return client.chat.completions.create(model="model", **asked).choices[0].message.content

        assert said(1) == said(1) and len({said(seed) for seed in range(5)}) > 1
        process.send_signal(signal.SIGINT)
        assert "1 sessions, 7 calls, 0 extended, 0 rewritten, 6 branches" in process.communicate(timeout=200)[0]
        assert process.returncode == 0
    finally:
        process.kill()
