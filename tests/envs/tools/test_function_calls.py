"""Arguments of calls beside their schemas: what a schema allows is run, what it does not is told."""

from __future__ import annotations

import time

import pytest

from grpo_rl.envs.tools.functions import run_calls

NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}}


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


def test_each_call_has_the_deadline_of_its_tool():
    deadlines = {"slow": 5.0, "late": 0.1}
    schemas = [{"function": {"name": name, "parameters": {}}} for name in deadlines]
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in deadlines]

    def run(name, given):
        time.sleep(0.4)
        return name

    results = run_calls(calls, schemas, run, seconds=deadlines.__getitem__)
    assert [result["content"] for result in results] == ["slow", "Error: no result within 0.1 s"]
