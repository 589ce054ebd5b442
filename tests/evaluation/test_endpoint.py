"""The endpoint against a loopback server: what it sends, what it repeats, what it gives up, and where the key goes."""

import threading
import time

import pytest

from grpo_rl.engines.base import Sampling
from grpo_rl.evaluation.sources import Endpoint

SAMPLING = Sampling(temperature=0.5, max_new_tokens=7, stop=("END",))


def asked(*texts):
    return [[{"role": "user", "content": text}] for text in texts]


def test_each_response_is_a_request_of_its_own_with_its_own_seed(server):
    server.respond = lambda body: f"{body['messages'][-1]['content']} {body['seed']}"
    replies = Endpoint(server.url, key="sk-1").respond(asked("a", "b"), 2, SAMPLING, seed=10)
    assert [[reply.text for reply in group] for group in replies] == [["a 10", "a 11"], ["b 12", "b 13"]]
    assert replies[0][0].tokens == 5 and not replies[0][0].truncated
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"], body["stop"]) == ("tiny", 0.5, 7, ["END"])
    assert set(server.keys) == {"Bearer sk-1"}


def test_a_response_at_the_length_limit_is_truncated_and_one_without_content_is_empty(server):
    server.respond, server.finish_reason = lambda body: None, "length"
    [[reply]] = Endpoint(server.url).respond(asked("a"), 1, SAMPLING)
    assert (reply.text, reply.truncated) == ("", True)


@pytest.mark.parametrize("usage, content", [(float("inf"), "a"), ("5", "a"), (5, [{"type": "text", "text": "a"}])])
def test_a_response_of_the_wrong_types_names_the_server(server, usage, content):
    server.respond, server.usage = lambda body: content, {"completion_tokens": usage}
    with pytest.raises(ValueError, match=rf"{server.url} is no chat endpoint"):
        Endpoint(server.url).respond(asked("a"), 1, SAMPLING)


def test_what_fails_for_now_is_repeated_and_waits_as_long_as_the_server_asks(server):
    waits = []
    server.replies = [(429, {"Retry-After": "2.5"}), (503, {}), ConnectionResetError]
    endpoint = Endpoint(server.url, served="tiny", concurrency=1, sleep=waits.append)
    assert endpoint.respond(asked("a"), 1, SAMPLING)[0][0].text == "ok"
    assert waits[0] == 2.5 and 0.5 <= waits[1] <= 1.5 and 1 <= waits[2] <= 3  # 0.5 * 2^n, half or half as much again


@pytest.mark.parametrize("code", [400, 401, 404])
def test_a_refusal_is_not_repeated_and_never_shows_the_key(server, code):
    server.replies, server.message = [(code, {})] * 9, "no: you sent Bearer sk-secret"
    with pytest.raises(ValueError, match=rf"refuses: HTTP {code}: no: you sent Bearer \[key\]") as told:
        Endpoint(server.url, key="sk-secret", served="tiny").respond(asked("a"), 1, SAMPLING)
    assert "sk-secret" not in str(told.value) + repr(told.value.__context__) and len(server.bodies) == 1


def test_a_redirect_is_not_followed_as_it_would_take_the_key_along(server):
    server.replies = [(307, {"Location": f"{server.url}/elsewhere"})]
    with pytest.raises(ValueError, match="HTTP 307"):
        Endpoint(server.url, key="sk-1", served="tiny").respond(asked("a"), 1, SAMPLING)
    assert len(server.bodies) == 1


def test_as_many_requests_are_under_way_as_concurrency_says(server):
    lock, now, most = threading.Lock(), 0, 0

    def respond(body):
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        time.sleep(0.05)
        with lock:
            now -= 1
        return "ok"

    server.respond = respond
    Endpoint(server.url, served="tiny", concurrency=3).respond(asked(*"abcdefgh"), 1, SAMPLING)
    assert most == 3


def test_the_served_model_has_to_be_named_where_there_are_several(server):
    server.models = ["a", "b"]
    with pytest.raises(ValueError, match="serves a, b; choose one with served=NAME"):
        Endpoint(server.url)
