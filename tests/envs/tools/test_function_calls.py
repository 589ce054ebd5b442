"""Arguments of calls beside their schemas: what a schema allows is run, what it does not is told."""

from __future__ import annotations

import time

import pytest

from grpo_rl.envs.task import Reward
from grpo_rl.envs.tools import functions
from grpo_rl.envs.tools.functions import FunctionTask, run_calls

NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}}


class Tools(FunctionTask):
    reward_parts, tools, rows = ("right",), (lambda: 1,), ()

    def prompt(self, row):
        return [{"role": "user", "content": "?"}]

    def score(self, row, response):
        return Reward({"right": 1.0})


@pytest.mark.parametrize(
    ("parameters", "arguments", "told"),
    [
        ({"type": "object"}, '{"x": 1}', '{"x": 1}'),
        ({"anyOf": [NUMBER]}, '{"x": 1}', '{"x": 1}'),
        (NUMBER | {"additionalProperties": {}}, '{"y": 1}', '{"y": 1}'),
        ({"type": "object", "additionalProperties": False}, '{"x": 1}', "Error: f takes no 'x', only nothing"),
        (NUMBER, '{"y": 1}', "Error: f takes no 'y', only x"),
        (NUMBER, '{"x": 3.0}', '{"x": 3.0}'),
        (NUMBER, '{"x": 3.5}', "Error: x of f is 3.5; it must be of type integer"),
        (NUMBER, '{"x": NaN}', "Error: the arguments are no JSON object"),
    ],
)
def test_arguments_are_refused_where_the_schema_refuses_them(parameters, arguments, told):
    call = {"id": "call00000", "function": {"name": "f", "arguments": arguments}}
    schema = {"function": {"name": "f", "parameters": parameters}}
    (result,) = run_calls([call], [schema], lambda name, given: given)
    assert result["content"] == told


def test_the_first_error_of_a_tool_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(functions, "_logged", set())
    call = {"id": "call00000", "function": {"name": "f", "arguments": "{}"}}

    def run(name, given):
        raise NameError("no x")

    for _ in range(2):
        run_calls([call], [{"function": {"name": "f"}}], run)
    assert [record.getMessage() for record in caplog.records] == [
        "the tool f raised NameError: no x (told to the policy; further ones are not logged)"
    ]


def test_each_call_has_the_deadline_of_its_tool():
    schemas = [{"function": {"name": name, "parameters": {}}} for name in ("slow", "late")]
    calls = [
        {"id": s["function"]["name"], "function": {"name": s["function"]["name"], "arguments": "{}"}} for s in schemas
    ]
    deadlines = {"slow": 5.0, "late": 0.1}

    def run(name, given):
        time.sleep(0.4)
        return name

    results = run_calls(calls, schemas, run, seconds=deadlines.__getitem__)
    assert [result["content"] for result in results] == ["slow", "Error: no result within 0.1 s"]
