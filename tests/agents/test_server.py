"""The endpoint, called by the unmodified `openai` client."""

import asyncio
import json
import logging
import random
import threading

import aiohttp
import openai
import pytest

from grpo_rl.agents import recorder
from grpo_rl.agents import server as server_module
from grpo_rl.agents.recorder import Limits
from grpo_rl.agents.requests import RequestError, read_request
from grpo_rl.agents.server import ChatServer
from grpo_rl.engines.base import Sampling
from tests.agents.conftest import MAX_MODEL_LEN, Played
from tests.agents.test_recorder import TOOLS, flat, user
from tests.agents.test_recorder import written as text_of
from tests.envs.chat_templates import FAMILIES, sampled_ids, tokenizer_of, written

pytestmark = pytest.mark.slow

SAMPLING = Sampling(max_new_tokens=20, temperature=0.8)


class Served:
    """A server with one open session, whose policy says ``said`` one after the other; a client that never retries."""

    def __init__(self, play, tokenizer, *said, session=None, **settings):
        self.played = play(*said, **session or {})
        self.server = ChatServer("tiny", tokenizer, settings.pop("sampling", SAMPLING), **settings)

    async def __aenter__(self):
        await self.server.start()
        self.key = self.server.open(self.played.session)
        self.client = openai.AsyncOpenAI(base_url=self.server.url, api_key=self.key, max_retries=0)
        return self

    async def __aexit__(self, *_):
        await self.client.close()
        await self.server.close()

    async def chat(self, *messages, **settings):
        return await self.client.chat.completions.create(model="tiny", messages=list(messages), **settings)

    async def raw(self, path, body=None, key=None):
        headers = {"Authorization": f"Bearer {key or self.key}"}
        method = "GET" if body is None else "POST"
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.request(method, self.server.url + path, data=body) as got:
                return got.status, await got.json()


async def test_an_agent_of_openais_client_is_recorded_token_by_token(play, tokenizer):
    async with Served(play, tokenizer, 'so!{"a": 1}', "two", "three", "four") as served:
        first = await served.chat(user("p"), tools=TOOLS, logprobs=True, seed=3)
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls" and len(choice.logprobs.content) == 12
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
        assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (3, 12)
        result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        # The message goes back as the client's own object.
        second = await served.chat(user("p"), choice.message, result, tools=TOOLS, n=2, max_tokens=3)
        assert [one.message.content for one in second.choices] == ["two", "thr"]
        assert [one.finish_reason for one in second.choices] == ["length", "length"]
        assert [model.id async for model in served.client.models.list()] == ["tiny"]
        assert (await served.client.models.retrieve("tiny")).id == "tiny"
    sequences = served.played.session.sequences()
    assert [text_of(tokenizer, one) for one in sequences] == [
        'p<end>>so!{"a": 1}<end>2<end>>two', 'p<end>>so!{"a": 1}<end>2<end>>thr',
    ]  # fmt: skip
    assert {sampling.temperature for *_, sampling in served.played.seen} == {0.8}


FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("multiply", "page")
]


@pytest.mark.parametrize("family", FAMILIES)
async def test_calls_in_a_familys_own_format_reach_the_client_and_their_results_extend_the_call(family):
    parsers = pytest.importorskip("grpo_rl.engines.vllm.tool_parsers")
    tokenizer, dice = tokenizer_of(family), random.Random(family)
    wanted = [("multiply", {"a": 3, "b": 4}), ("page", {"name": "here  and  there"})]
    wanted = wanted[: 1 if family == "llama3" else 2]  # its template takes one call a message
    # Ids that the tokenizer would not choose for the text: whatever is tokenised again is found out.
    said = [
        [*sampled_ids(tokenizer, text, dice), tokenizer.eos_token_id]
        for text in (written(family, wanted, dice), "There is a 12.", "Bye.")
    ]

    def play(*_, **settings):
        return Played(tokenizer, said, 10_000, **settings)

    def make_parser(tokenizer, tools):
        return parsers.tool_parser(FAMILIES[family][3], tokenizer, tools)

    how = {"session": {"make_parser": make_parser}, "sampling": Sampling(max_new_tokens=500)}
    async with Served(play, tokenizer, **how) as served:
        messages = [{"role": "system", "content": "Call."}, user("12?")]
        first = (await served.chat(*messages, tools=FUNCTIONS)).choices[0]
        calls = first.message.tool_calls
        assert first.finish_reason == "tool_calls"
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == wanted
        results = [{"role": "tool", "tool_call_id": call.id, "content": f"so {i}"} for i, call in enumerate(calls)]
        messages += [first.message, *results]
        second = (await served.chat(*messages, tools=FUNCTIONS)).choices[0].message
        assert second.content == "There is a 12." and not second.tool_calls
        await served.chat(*messages, second, user("bye"), tools=FUNCTIONS)
        played, calls = served.played, [call.model_dump() for call in calls]
    session, (first, second, third) = played.session, played.seen
    assert second[0][: len(first[0] + first[1])] == first[0] + first[1]
    # Qwen3's takes thoughts out of earlier turns once the user speaks again, so that no such call can extend another.
    forgets = family == "qwen3"
    assert (third[0][: len(second[0] + second[1])] == second[0] + second[1]) is not forgets
    assert (session.counts["extended"], session.counts["rewritten"]) == ((1, 1) if forgets else (2, 0))
    assert ("changes earlier turns" in session.problems.get("template", "")) is forgets
    # Between them stands what the family's template writes, and no more.
    for call in calls:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    dialog = [user("12?"), {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    whole = tokenizer.apply_chat_template(dialog, tools=FUNCTIONS, add_generation_prompt=True, tokenize=False)
    between = tokenizer.decode(second[0][len(first[0] + first[1]) :])
    assert whole.endswith(FAMILIES[family][2] + between) and between.count("so ") == len(results)
    assert all(f'"{tool["function"]["name"]}"' in tokenizer.decode(first[0]) for tool in FUNCTIONS)
    found = [zip(flat(one.ids), flat(one.trainable), strict=True) for one in session.sequences()]
    assert [i for one in found for i, own in one if own] == [i for ids in said for i in ids]


async def test_a_stream_says_the_same(play, tokenizer):
    async with Served(play, tokenizer, "one", '!{"a": 1}', "two") as served:
        options = {"stream": True, "stream_options": {"include_usage": True}, "tools": TOOLS}
        chunks = [chunk async for chunk in await served.chat(user("p"), n=2, **options)]
        assert chunks[-1].usage.completion_tokens == 14 and all(chunk.usage is None for chunk in chunks[:-1])
        said = "".join(c.choices[0].delta.content or "" for c in chunks[:-1] if c.choices[0].index == 0)
        (call,) = next(c.choices[0].delta.tool_calls for c in chunks[:-1] if c.choices[0].delta.tool_calls)
        assert (said, call.index, call.function.arguments) == ("one", 0, '{"a": 1}')
        ends = {c.choices[0].index: c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason}
        assert ends == {0: "stop", 1: "tool_calls"}
        async with served.client.chat.completions.stream(
            model="tiny", messages=[user("p"), {"role": "assistant", "content": "one"}, user("q")], tools=TOOLS
        ) as stream:
            assert (await stream.get_final_completion()).choices[0].message.content == "two"
    assert served.played.session.counts["extended"] == 1 and len(served.played.session.sequences()) == 2


def slow(session, seconds):
    """Has the session's engine take its time."""
    sample = session._sample

    async def late(prompt, sampling):
        await asyncio.sleep(seconds)
        return await sample(prompt, sampling)

    session._sample = late


async def test_a_stream_keeps_clients_that_give_up_on_silence_and_tells_what_goes_wrong_meanwhile(
    play, tokenizer, monkeypatch
):
    monkeypatch.setattr(server_module, "KEEP_ALIVE_S", 0.05)
    async with Served(play, tokenizer, "one", "two") as served:
        slow(served.played.session, 0.6)
        impatient = served.client.with_options(timeout=openai.Timeout(5.0, read=0.4))
        call = {"model": "tiny", "messages": [user("p")]}
        with pytest.raises(openai.APITimeoutError):
            await impatient.chat.completions.create(**call)
        stream = await impatient.chat.completions.create(**call, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "one"
        stream = await impatient.chat.completions.create(**call, stream=True)  # the first comment has come
        served.played.session.ended = True
        with pytest.raises(openai.APIError, match="the session ended while this call was sampled"):
            [chunk async for chunk in stream]
        # What is refused before the first comment has its status.
        with pytest.raises(openai.PermissionDeniedError, match="this session has ended"):
            await impatient.chat.completions.create(**call, stream=True)
        assert len(served.played.session.responses) == 1


async def test_a_reward_is_sent_by_a_call_and_an_ended_session_takes_none(play, tokenizer):
    async with Served(play, tokenizer, "a") as served:
        assert await served.raw("/reward", b'{"reward": 1}') == (200, {"reward": 1})
        assert (await served.raw("/reward", b'{"reward": 0.5}'))[0] == 200
        for wrong in (b"", b'"reward": true', b'"reward": NaN', b'"reward": "1"', b'"reward": 1' + b"0" * 400):
            status, told = await served.raw("/reward", b"{" + wrong + b"}")
            assert status == 400 and told["error"]["param"] == "reward"
        served.server.end(served.key)
        assert served.played.session.reward == 0.5 and served.played.session.ended
        assert (await served.raw("/reward", b'{"reward": 1}'))[0] == 401
        with pytest.raises(openai.AuthenticationError, match="no session has this key"):
            await served.chat(user("p"))


async def test_errors_are_openais(play, tokenizer):
    async with Served(play, tokenizer, *"abcd", session={"limits": Limits(calls=12)}, max_model_len=9) as served:
        with pytest.raises(openai.BadRequestError, match="Unrecognized request argument supplied: colour"):
            await served.chat(user("p"), extra_body={"colour": "red"})
        with pytest.raises(openai.BadRequestError, match="content") as refused:
            await served.chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
        assert refused.value.param == "messages"
        with pytest.raises(openai.APIStatusError) as refused:
            await served.chat(user("p" * (1 << 20)))
        assert refused.value.status_code == 413
        with pytest.raises(openai.BadRequestError) as refused:
            await served.chat(user("p" * 500))
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError, match="does not exist; tiny does"):
            await served.client.models.retrieve("gpt-4o")
        with pytest.raises(openai.NotFoundError):
            await served.client.embeddings.create(model="tiny", input="p")
        assert not served.played.seen
        lone = '{"messages": [{"role": "user", "content": "\\ud800"}]}'
        raw = lone.replace("\\ud800", "\ud800").encode("utf-8", "surrogatepass")
        for body in (b"{", b"[]", b"3", lone.encode(), lone.encode("utf-16"), raw, b"[" * 1900):
            status, told = await served.raw("/chat/completions", body)
            assert status == 400 and told["error"]["type"] == "invalid_request_error"
        await served.chat(user("p"))
        with pytest.raises(openai.PermissionDeniedError, match="all of its 12 calls") as refused:
            await served.chat(user("p"))
        assert refused.value.code == "session_limit"
        assert (await served.raw("/models", key="x"))[0] == 401


async def test_the_server_listens_on_loopback(play, tokenizer):
    async with Served(play, tokenizer, "a") as served:
        ((name, port),) = (socket.getsockname() for socket in served.server._listening.sockets)
        assert name == "127.0.0.1"
        with pytest.raises(ValueError, match="can't be used"):
            await ChatServer("other", tokenizer, SAMPLING).start(port=port)


async def raw_connection(served, sent=b""):
    """A connection on which these bytes were sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.server._listening.sockets[0].getsockname()[1])
    writer.write(sent)
    return reader, writer


async def read_to_the_end(reader):
    try:
        return await asyncio.wait_for(reader.read(), 30.0)
    except ConnectionError:
        return b""


def head(served, path="/v1/models", method="GET", more=""):
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.key}\r\n{more}\r\n".encode()


def test_connections_beyond_the_most_are_closed_and_reported_in_one_line(play, tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 5)

    async def agent():
        async with Served(play, tokenizer, "a") as served:
            opened = [await raw_connection(served) for _ in range(5)]
            while len(served.server._runner.server.connections) < 5:
                await asyncio.sleep(0.01)
            opened += [await raw_connection(served) for _ in range(7)]
            reads = {asyncio.ensure_future(read_to_the_end(reader)) for reader, _ in opened}
            closed = set()
            while len(closed) < 7:
                closed |= (await asyncio.wait(reads - closed, return_when=asyncio.FIRST_COMPLETED))[0]
            assert {read.result() for read in closed} == {b""} and not any(read.done() for read in reads - closed)
            for _, writer in opened:
                writer.close()
            while served.server._runner.server.connections:
                await asyncio.sleep(0.01)
            await served.chat(user("p"))
            (told,) = served.server.problems.values()
            assert "more than 5 connections" in told

    asyncio.run(agent())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_session_that_opens_too_many_connections_is_refused_and_others_are_answered(
    play, tokenizer, monkeypatch
):
    monkeypatch.setattr(server_module, "MOST_OF_SESSION", 2)
    async with Served(play, tokenizer, "a") as served:
        opened = [await raw_connection(served, head(served)) for _ in range(2)]
        assert [(await reader.readline()).split()[1] for reader, _ in opened] == [b"200", b"200"]
        third, writer = await raw_connection(served, head(served))
        told = await read_to_the_end(third)  # it is closed
        assert told.split()[1] == b"429" and b"rate_limit_exceeded" in told
        opened[0][1].write(head(served))
        rest = [await opened[0][0].readline() for _ in range(6)]  # of the first response, and the second
        assert rest[-1].endswith(b"HTTP/1.1 200 OK\r\n")
        assert (await served.raw("/models", key=served.server.open(play("b").session)))[0] == 200
        writer.close()


def test_half_a_head_and_half_a_body_are_given_up(play, tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(server_module, "READ_S", 0.2)

    async def agent():
        async with Served(play, tokenizer, "a") as served:
            begun = [b"", b"POST /v1/chat/comple", b"GET / NOPE\r\n\r\n"]
            begun.append(head(served, "/v1/chat/completions", "POST", "Content-Length: 100\r\n") + b'{"mess')
            connections = [await raw_connection(served, sent) for sent in begun]
            told = await asyncio.gather(*(read_to_the_end(reader) for reader, _ in connections))
            assert told[:2] == [b"", b""] and b" 400 " in told[2].split(b"\n")[0]
            assert b" 408 " in told[3].split(b"\n")[0] and b"the body has not come within 0.2 s" in told[3]
            assert served.played.session.counts["calls"] == 1

    asyncio.run(agent())
    assert caplog.records == []


async def test_a_long_text_delays_no_other_call(play, tokenizer, monkeypatch):
    go_on = threading.Event()
    encode = recorder.encode_prompts
    monkeypatch.setattr(recorder, "encode_prompts", lambda *given: (go_on.wait(30.0), encode(*given))[1])
    async with Served(play, tokenizer, "a", max_model_len=MAX_MODEL_LEN) as served:
        with pytest.raises(openai.APIStatusError) as refused:  # of 400 tokens no text has a megabyte
            await served.chat(user("p" * (1 << 20)))
        assert (refused.value.status_code, refused.value.code) == (413, "context_length_exceeded")
        call = asyncio.ensure_future(served.chat(user("p")))
        assert (await served.raw("/models"))[0] == 200 and not call.done()
        go_on.set()
        assert (await call).choices[0].message.content == "a"


async def test_a_call_whose_client_is_gone_is_not_recorded(play, tokenizer):
    async with Served(play, tokenizer, "a", "b") as served:
        session, began = served.played.session, asyncio.Event()
        sample, ended = session._sample, []

        async def hangs(prompt, sampling):
            began.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        session._sample = hangs
        call = asyncio.ensure_future(served.chat(user("p")))
        await began.wait()
        call.cancel()
        await asyncio.wait({call})
        while not ended:
            await asyncio.sleep(0.01)
        session._sample = sample
        await served.chat(user("p"))
        assert len(session.responses) == 1 and session.counts["branches"] == 0


def read(is_trained=True, **fields):
    return read_request({"messages": [user("p")], **fields}, SAMPLING, "tiny", is_trained)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0}, {"n": True}, {"n": 1000}, {"n": 1.5}, {"max_tokens": 0}, {"stop": [""]}, {"stop": 3}, {"stream": 1},
        {"temperature": "hot"}, {"seed": "x"}, {"tools": {}}, {"tools": [{"type": "web_search"}]}, {"top_k": 1.5},
        {"logit_bias": {"5": 100}}, {"presence_penalty": 0.5}, {"tool_choice": "required"}, {"top_logprobs": 5},
        {"response_format": {"type": "json_object"}}, {"functions": []}, {"messages": "hi"}, {"messages": []},
        {"stop": "x" * 1001}, {"top_k": 10**30}, {"stream_options": {"include_usage": 3}}, {"stream_options": True},
        {"max_completion_tokens": -1}, {"modalities": ["audio"]},
    ],
)  # fmt: skip
def test_what_is_not_there_or_makes_no_sense_is_refused_with_its_field(fields):
    with pytest.raises(RequestError) as refused:
        read(**fields)
    assert refused.value.param in {*fields, "include_usage"}


def test_sampling_is_the_runs_in_training_and_the_requests_otherwise():
    asked = {"temperature": 0.1, "top_p": 0.5, "max_tokens": 50, "stop": "#", "seed": 4, "model": "gpt-4o", "user": "u"}
    trained, free = read(**asked), read(is_trained=False, **asked)
    assert trained.sampling == Sampling(max_new_tokens=20, temperature=0.8, stop=("#",), seed=4)
    assert free.sampling == Sampling(max_new_tokens=20, temperature=0.1, top_p=0.5, stop=("#",), seed=4)
    assert [note.split()[0] for note in trained.notes] == [
        "user", "model='gpt-4o'", "max_tokens=50", "temperature=0.1", "top_p=0.5",
    ]  # fmt: skip
    assert read(is_trained=False, top_k=-1).sampling.top_k == 0
    with pytest.raises(RequestError, match="temperature is 1e-320; it must be 0, which is greedy, or in"):
        read(is_trained=False, temperature=1e-320)
    with pytest.raises(RequestError, match="top_p is 2"):
        read(is_trained=False, top_p=2)
    assert not read(presence_penalty=0, logit_bias=None, response_format={"type": "text"}, tool_choice="auto").notes
    assert read(tools=json.loads(json.dumps(TOOLS)), tool_choice="none").tools == []
