import json
import time

import pytest

from grpo_rl.envs.tools.calls import MAX_CALLS, Call, Tool, find_calls, is_final, reply_to_calls
from grpo_rl.envs.tools.functions import run_calls

SHOUT = Tool("shout", "text", "hi", str.upper)
COUNT = Tool("count_words", "words", "one two", lambda text: str(len(text.split())))
TOOLS = (SHOUT, COUNT)


def wrong(reason: str) -> str:
    return f"Error: {reason}. Write one as a line of its own, such as Shout: hi"


def wrong_json(reason: str) -> str:
    call = '<tool_call>{"name": "shout", "arguments": {"text": "hi"}}</tool_call>'
    return f"Error: {reason}. Write one as {call}"


NO_CALL = wrong("that is no call")
EMPTY = wrong("the call is empty")
NOT_CLOSED = wrong_json("<tool_call> is not closed")
NO_TEXT = wrong_json('"arguments" is no object with the text "text"')
NO_NAME = wrong_json('the call is no object with a "name"')


def json_call(name="shout", **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # none
        ("", []),
        ("shouting: hi\nshout2: hi\nshout hi\nSearch: hi", []),
        ("3 < 4 and 5 > 4", []),
        ("<answer>7</answer><reasoning>x</reasoning>", []),
        ("ſhout: hi", []),  # a long s is no s
        # one
        ("Shout: hi", [(SHOUT, "hi")]),
        ("I think.\n  shout:hi there \nis right", [(SHOUT, "hi there")]),
        ("SHOUT:\thi: there", [(SHOUT, "hi: there")]),
        (json_call(text="hi"), [(SHOUT, "hi")]),
        ("I think " + json_call(text=' a "quoted" <shouted> word \u00e9\n'), [(SHOUT, 'a "quoted" <shouted> word é')]),
        ('<TOOL_CALL>{"arguments": {"text": "hi", "more": 1}, "name": "shout"}</tool_call>', [(SHOUT, "hi")]),
        # several, in both forms, in their order
        ("Shout: a\nCount_words: b\n" + json_call(text="c") + "\nShout: d",
         [(SHOUT, "a"), (COUNT, "b"), (SHOUT, "c"), (SHOUT, "d")]),
        # one inside another is part of it
        ('<tool_call>{"name": "shout",\nshout: hi\n"arguments": 7}</tool_call>\nShout: a', [None, (SHOUT, "a")]),
        ("Shout: <tool_call>", [(SHOUT, "<tool_call>")]),
    ],
)  # fmt: skip
def test_calls_are_found_in_both_forms(text, expected):
    found = [(call.tool, call.argument) if call.tool else None for call in find_calls(text, TOOLS)]
    assert found == expected


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("Shout:", [EMPTY]),
        (f"Shout: {'a' * 501}", [wrong("the text has 501 characters, at most 500")]),
        (f"Shout: {'a' * 500}", [None]),
        ("Count_words:", ["Error: the call is empty. Write one as a line of its own, such as Count_words: one two"]),
        # what other habits make of a call
        ("shout(hi)", [NO_CALL]),
        ("I do <shout>hi</shout>", [NO_CALL]),
        ("[shout] hi [/shout]", [NO_CALL]),
        ("<count_words>hi</count_words>\nShout: hi", [NO_CALL, None]),
        ("I will:\n- Shout: hi\n > **count_words**: hi", [NO_CALL, NO_CALL]),
        ('{"name": "shout", "arguments": {"text": "hi"}}', [NO_CALL]),
        ("I shout(hi), or [shout]", []),
        (json_call(text="a" * 501), [wrong_json("the text has 501 characters, at most 500")]),
        (json_call(text="a" * 5000), [wrong_json("the call has 5046 characters, at most 2000")]),
        ("<tool_call>shout hi</tool_call>", [wrong_json("the call is not JSON")]),
        (f"<tool_call>{'[' * 1900}</tool_call>", [wrong_json("the call is not JSON")]),
        ("<tool_call>[1]</tool_call>", [NO_NAME]),
        ('<tool_call>{"name": 7}</tool_call>', [NO_NAME]),
        (json_call("whisper", text="hi"), [wrong_json("there is no tool 'whisper', only shout, count_words")]),
        (json_call("w" * 99), [wrong_json(f"there is no tool '{'w' * 40}', only shout, count_words")]),
        ('<tool_call>{"name": "shout", "arguments": "hi"}</tool_call>', [NO_TEXT]),
        (json_call(text=7), [NO_TEXT]),
        (json_call("count_words", text="hi"),
         ['Error: "arguments" is no object with the text "words". Write one as <tool_call>{"name": "count_words", '
          '"arguments": {"words": "one two"}}</tool_call>']),
        ('<tool_call>{"name": "shout"}', [NOT_CLOSED]),
        ("<tool_call>" + json_call(text="hi"), [NOT_CLOSED, None]),
        ("hi</tool_call>", [wrong_json("</tool_call> has no <tool_call> before it")]),
    ],
)  # fmt: skip
def test_the_fault_of_a_call_is_in_the_reply_with_the_right_form(text, errors):
    assert [call.error or None for call in find_calls(text, TOOLS)] == errors


def test_a_message_has_a_bounded_number_of_calls():
    for call in ("Shout: hi\n", json_call(text="hi")):
        calls = find_calls(call * 1000, TOOLS)
        assert [call.argument for call in calls[:MAX_CALLS]] == ["hi"] * MAX_CALLS
        assert [call.error for call in calls[MAX_CALLS:]] == ["Error: only the first 4 calls of a message are answered"]
        assert len(find_calls(call * MAX_CALLS, TOOLS)) == MAX_CALLS
    # Malformed ones count too: their errors are read as well.
    assert len(find_calls("<tool_call>" * 1000, TOOLS)) == len(find_calls("shout(\n" * 1000, TOOLS)) == MAX_CALLS + 1


@pytest.mark.parametrize("form", ["line", "json"])
@pytest.mark.parametrize("argument", [None, "a: b", 'é "quoted" \\ word'])
def test_a_call_is_read_as_it_is_written(form, argument):
    call = Call(SHOUT, argument or "hi")
    assert find_calls(SHOUT.written(form, argument), TOOLS) == [call]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "piece", ["Shout: ", "Shout: a\n", "<tool_call>", "</tool_call>", " ", "\n ", "<shout", "<answer>"]
)
def test_a_megabyte_of_anything_takes_time_linear_in_it(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    for hostile in (text, "Shout: " + text, "<tool_call>" + text + "</tool_call>"):
        reply_to_calls(hostile, TOOLS, "tool")
    assert time.process_time() - start < 5  # a quadratic scan takes hours


def test_results_come_one_message_a_call():
    error = "Error: the call is empty. Write one as a line of its own, such as Count_words: one two"
    assert reply_to_calls("Shout: a\nand then\nCount_words:", TOOLS, "tool") == [
        {"role": "tool", "content": "A"}, {"role": "tool", "content": error},
    ]  # fmt: skip
    # In one where turns alternate.
    assert reply_to_calls("Shout: a\nCount_words: b b", TOOLS, "user") == [{"role": "user", "content": "A\n2"}]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("7", True), ("", True), ("Shout: a\n<answer>A</answer>", True), ("<answer></answer>\nShout: a", True),
        ("Shout: a\n<answer>A", False), ("shout(a)", False), ("</answer>\nShout: a <answer>", False),
    ],
)  # fmt: skip
def test_a_message_that_answers_or_calls_nothing_is_the_last(text, last):
    assert is_final(text, TOOLS) is last and (reply_to_calls(text, TOOLS, "tool") is None) is last


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
