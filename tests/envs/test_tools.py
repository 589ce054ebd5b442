from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.envs.tools import MAX_CALLS, Call, Tool, answer_calls, check_settings, find_calls, is_final, last_answer

SHOUT = Tool("shout", "text", "hi", str.upper)
COUNT = Tool("count_words", "words", "one two", lambda text: str(len(text.split())))
TOOLS = (SHOUT, COUNT)


def wrong(reason: str) -> str:
    return f"Error: {reason}. Write a call as <shout>hi</shout>"


def wrong_json(reason: str) -> str:
    call = '<tool_call>{"name": "shout", "arguments": {"text": "hi"}}</tool_call>'
    return f"Error: {reason}. Write a call as {call}"


NOT_CLOSED = wrong("<shout> is not closed")
NO_TEXT = wrong_json('"arguments" is no object with the text "text"')
NO_NAME = wrong_json('the call is no object with a "name"')


def json_call(name="shout", **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # none
        ("", []),
        ("I shout: hi", []),
        ("3 < 4 and 5 > 4", []),
        ("<answer>7</answer><reasoning>x</reasoning>", []),
        ("<shouting>hi</shouting> <shout2>hi</shout2> < shout>hi", []),
        ("<ſhout>hi</ſhout>", []),  # a long s is no s
        # one
        ("<shout>hi</shout>", [(SHOUT, "hi")]),
        ("I think <shout> hi there\n</shout> is right", [(SHOUT, "hi there")]),
        ("<SHOUT>hi</Shout>", [(SHOUT, "hi")]),
        ("<shout >hi</shout >", [(SHOUT, "hi")]),
        ("<shout>3 < 4 <b>x</b></shout>", [(SHOUT, "3 < 4 <b>x</b>")]),
        ("<count_words>a b</count_words>", [(COUNT, "a b")]),
        (json_call(text="hi"), [(SHOUT, "hi")]),
        (json_call(text='a "quoted" <shouted> word \u00e9'), [(SHOUT, 'a "quoted" <shouted> word é')]),
        ('<tool_call>{"arguments": {"text": "hi", "more": 1}, "name": "shout"}</tool_call>', [(SHOUT, "hi")]),
        (json_call("count_words", words="a b"), [(COUNT, "a b")]),
        # several, in both forms, in their order
        ("<shout>a</shout> <count_words>b</count_words>" + json_call(text="c"),
         [(SHOUT, "a"), (COUNT, "b"), (SHOUT, "c")]),
    ],
)  # fmt: skip
def test_calls_are_found_in_both_forms(text, expected):
    assert find_calls(text, TOOLS) == [Call(tool, argument) for tool, argument in expected]


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("<shout>hi", [NOT_CLOSED]),
        ("<shout>", [NOT_CLOSED]),
        ("<shout>a <shout>b</shout>", [NOT_CLOSED, None]),
        ("<shout>a <count_words>b</count_words>", [NOT_CLOSED, None]),
        ("hi</shout>", [wrong("</shout> has no <shout> before it")]),
        ("<shout>hi</count_words>", [wrong("<shout> is closed by </count_words>")]),
        ("<shout/>", [wrong("<shout/> has nothing inside")]),
        ('<shout text="hi"/>', [wrong("<shout/> has nothing inside")]),
        ('<shout x="1">hi</shout>', [wrong("<shout> has something more inside its brackets")]),
        ("<shout></shout>", [wrong("the call is empty")]),
        ("<shout> \n </shout>", [wrong("the call is empty")]),
        (f"<shout>{'a' * 501}</shout>", [wrong("the text has 501 characters, at most 500")]),
        (f"<shout>{'a' * 500}</shout>", [None]),
        (f"<shout>{'a' * 2001}</shout>", [wrong("the call has 2001 characters, at most 2000")]),
        (json_call(text="a" * 501), [wrong_json("the argument has 501 characters, at most 500")]),
        (json_call(text="a" * 5000), [wrong_json("the call has 5044 characters, at most 2000")]),
        (json_call(text=" "), [wrong_json("the call is empty")]),
        ("<tool_call>shout hi</tool_call>", [wrong_json("the call is not JSON")]),
        ("<tool_call></tool_call>", [wrong_json("the call is not JSON")]),
        ("<tool_call>{'name': 'shout'}</tool_call>", [wrong_json("the call is not JSON")]),
        (f"<tool_call>{'[' * 1900}</tool_call>", [wrong_json("the call is not JSON")]),
        (f"<tool_call>{'[' * 100}{']' * 100}</tool_call>", [NO_NAME]),
        ("<tool_call>[1]</tool_call>", [NO_NAME]),
        ('<tool_call>{"arguments": {}}</tool_call>', [NO_NAME]),
        ('<tool_call>{"name": 7}</tool_call>', [NO_NAME]),
        (json_call("whisper", text="hi"), [wrong_json("there is no tool 'whisper'; there is shout, count_words")]),
        (json_call("w" * 99), [wrong_json(f"there is no tool '{'w' * 40}'; there is shout, count_words")]),
        ('<tool_call>{"name": "shout"}</tool_call>', [NO_TEXT]),
        ('<tool_call>{"name": "shout", "arguments": "hi"}</tool_call>', [NO_TEXT]),
        (json_call(words="hi"), [NO_TEXT]),
        (json_call(text=7), [NO_TEXT]),
        (json_call(text=None), [NO_TEXT]),
        ("<tool_call>" + '{"name": "shout"}', [wrong_json("<tool_call> is not closed")]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_call_is_said_with_how_to_write_it(text, errors):
    assert [call.error or None for call in find_calls(text, TOOLS)] == errors


def test_a_message_has_a_bounded_number_of_calls():
    calls = find_calls("<shout>hi</shout>" * 1000, TOOLS)
    assert [call.argument for call in calls[:MAX_CALLS]] == ["hi"] * MAX_CALLS
    assert [call.error for call in calls[MAX_CALLS:]] == ["Error: only the first 4 calls of a message are answered"]
    assert len(find_calls("<shout>hi</shout>" * MAX_CALLS, TOOLS)) == MAX_CALLS
    # Malformed ones count too: their errors are read as well.
    assert len(find_calls("<shout>" * 1000, TOOLS)) <= MAX_CALLS + 2


@pytest.mark.parametrize("form", ["tag", "json"])
def test_the_example_in_the_prompt_is_a_call(form):
    assert find_calls(f"You: {SHOUT.written(form)}", TOOLS) == [Call(SHOUT, "hi")]


PIECES = st.sampled_from(
    ["<shout>", "</shout>", "<shout/>", "<tool_call>", "</tool_call>", '{"name": "shout", "arguments": {"text": "x"}}',
     '"', "{", "}", "[", "\\", "hi", "\n", "<answer>", "</answer>", "<", ">", "\ud800", "\x00"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=20).map("".join) | st.text())
def test_no_text_makes_it_fail(text):
    for call in find_calls(text, TOOLS):
        assert (call.tool is None) == bool(call.error)
        assert len(call.error) < 300
    assert (answer_calls(text, TOOLS, "tool") is None) == is_final(text, TOOLS)


@pytest.mark.parametrize("piece", ["<shout>", "</shout>", "<shout ", "<shout>a</shout>", "<", "<answer>"])
def test_a_megabyte_of_anything_takes_time_linear_in_it(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    for hostile in (text, text + ">", "<tool_call>" + text + "</tool_call>"):
        answer_calls(hostile, TOOLS, "tool")
    assert time.process_time() - start < 5  # a quadratic scan takes hours


def test_results_come_one_message_a_call():
    text = "<shout>a</shout> and <count_words>b b"
    error = "Error: <count_words> is not closed. Write a call as <count_words>one two</count_words>"
    assert answer_calls(text, TOOLS, "tool") == [{"role": "tool", "content": "A"}, {"role": "tool", "content": error}]


def test_results_come_in_one_message_where_turns_alternate():
    reply = answer_calls("<shout>a</shout> and <count_words>b b</count_words>", TOOLS, "user")
    assert reply == [{"role": "user", "content": "<result>\nA\n</result>\n<result>\n2\n</result>"}]


@pytest.mark.parametrize("text", ["7", "", "<shout>a</shout> <answer>A</answer>", "<answer></answer> <shout>a</shout>"])
def test_a_message_that_answers_or_calls_nothing_is_the_last(text):
    assert is_final(text, TOOLS) and answer_calls(text, TOOLS, "tool") is None


@pytest.mark.parametrize("text", ["<shout>a</shout> <answer>A", "<shout>a", "</answer> <shout>a</shout> <answer>"])
def test_a_message_that_calls_and_has_no_whole_answer_is_not_the_last(text):
    assert not is_final(text, TOOLS) and answer_calls(text, TOOLS, "tool")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("<answer> 7\n</answer>", "7"), ("<answer>1</answer><answer>2</answer>", "2"),
     ("<answer>1</answer><answer>2", "1"), ("<answer>1<answer>2</answer>", "2"), ("<answer></answer>", ""),
     ("7", None), ("</answer>7<answer>", None)],
)  # fmt: skip
def test_the_last_whole_answer_counts(text, expected):
    assert last_answer(text) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("xml", "tool", {}), "env.form=xml; a call is written as tag or json"),
        (("tag", "system", {}), "env.tool_role=system; results come in the role tool or user"),
        (("tag", "tool", {"f1": float("inf")}), "env.reward.f1=inf; a weight is a finite number"),
        (("tag", "tool", {"f1": True}), "env.reward.f1=True"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        check_settings(*settings)
