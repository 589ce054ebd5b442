"""OpenEnv: a server's episodes, by its protocol."""

import json
import random
import socket
import threading
from http import HTTPStatus

import pytest

from grpo_rl.envs.openenv import OpenEnv, action_of, load_rows
from tests.envs.conftest import said

SCHEMA = {"required": ["number"], "properties": {"number": {"type": "integer"}}}


@pytest.fixture(scope="module")
def spoken():
    """The address of a server that speaks the protocol as openenv 0.10 does, for a game: guess a number from 1 to 9."""
    from websockets.datastructures import Headers
    from websockets.http11 import Response
    from websockets.sync.server import serve

    def session(connection):
        secret = None
        for message in connection:
            asked = json.loads(message)
            if asked["type"] == "reset":
                secret = random.Random(asked["data"]["seed"]).randint(1, 9)
                answer = {"observation": {"hint": "Guess."}, "reward": None, "done": False}
            elif isinstance(number := asked["data"].get("number"), int):
                hint = "Right." if number == secret else "No."
                answer = {"observation": {"hint": hint}, "reward": float(number == secret), "done": number == secret}
            else:
                wrong = [{"loc": ["number"], "msg": "no"}]
                told = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": wrong}
                connection.send(json.dumps({"type": "error", "data": told}))
                continue
            connection.send(json.dumps({"type": "observation", "data": answer}))

    def schema(connection, request):
        bodies = {"/schema": json.dumps({"action": SCHEMA}).encode(), "/deep/schema": b"[" * 100_000}
        if body := bodies.get(request.path):
            return Response(HTTPStatus.OK, "OK", Headers({"Content-Length": str(len(body))}), body)
        return None if request.path == "/ws" else connection.respond(HTTPStatus.FOUND, "elsewhere")

    with serve(session, "127.0.0.1", 0, process_request=schema) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


def test_a_servers_fault_is_not_reported_to_the_policy(spoken, monkeypatch):
    task = OpenEnv(load_rows(), url=spoken)
    session, _ = task.reset({"seed": 3})
    monkeypatch.setattr(session, "recv", lambda timeout: "<html>502 Bad Gateway")
    with pytest.raises(RuntimeError, match="answers '<html>502 Bad Gateway', which is no JSON object"):
        task.step(session, "0")
    task.close(session)


def test_a_conversation_is_an_episode_in_a_session_and_earns_what_the_server_gives(spoken):
    task, row = OpenEnv(load_rows(), url=spoken, system_prompt="Play."), {"seed": 3}
    right = str(random.Random(3).randint(1, 9))
    messages = said(task, row, "0", "x", '{"number": 0}', right)
    heard = ["Play.", "Guess.", "0", "No.", "x", "Error: Invalid message; number: no", '{"number": 0}', "No.", right]
    assert [message["content"] for message in messages] == heard
    assert task.score_dialog(row, messages).parts == {"episode": 1.0}


def test_a_server_that_is_not_there_or_sends_elsewhere_is_refused(spoken):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ValueError, match="no OpenEnv server gives its schema there"):
        OpenEnv([], url=f"http://127.0.0.1:{port}")
    with pytest.raises(ValueError, match="RecursionError"):
        OpenEnv([], url=f"{spoken}/deep")
    with pytest.raises(ValueError, match=r"ValueError: it answers 302 Found"):
        OpenEnv([], url=f"{spoken}/elsewhere")


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"number": 3}', {"number": 3}),
        ('```json\n{"number": 3}\n```', {"number": 3}),
        (" 7 ", {"number": 7}),
        ("seven", {"number": "seven"}),
        ("[" * 100_000, {"number": "[" * 100_000}),
    ],
)
def test_a_text_is_an_action(text, action):
    assert action_of(text, SCHEMA) == action
    with pytest.raises(ValueError, match="an action is a JSON object with x, y"):
        action_of("12", {"required": ["x", "y"], "properties": {"x": {}, "y": {}}})
