"""The ids that an agent's calls sampled, those that its next call reads and those that are trained on are the same."""

import asyncio
import json
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from grpo_rl.agents import recorder
from grpo_rl.agents.recorder import Limits
from grpo_rl.agents.requests import RequestError
from grpo_rl.engines.base import Sampling
from tests.agents.conftest import MAX_MODEL_LEN

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def user(text):
    return {"role": "user", "content": text}


def flat(pieces):
    return torch.cat(pieces).tolist()


def written(tokenizer, recorded):
    return tokenizer.decode([*recorded.prompt_ids, *flat(recorded.ids)])


def chosen(tokenizer, recorded):
    return tokenizer.decode([i for i, own in zip(flat(recorded.ids), flat(recorded.trainable), strict=True) if own])


def test_a_call_that_extends_another_shares_its_tokens_and_one_that_rewrites_history_stands_alone(play, tokenizer):
    played = play("a", "b", "c")
    (a,) = played.ask([user("p")])
    played.version = 1
    (b,) = played.ask([user("p"), a.message, user("q")])
    played.ask([user("summary"), b.message, user("r")])
    first, second = played.session.sequences()
    assert written(tokenizer, first) == "p<end>>a<end>q<end>>b<end>"
    assert written(tokenizer, second) == "summary<end>b<end>r<end>>c<end>"
    assert [chosen(tokenizer, one) for one in (first, second)] == ["a<end>b<end>", "c<end>"]
    assert flat(first.versions) == [0] * 2 + [1] * 5
    counts = {"calls": 3, "extended": 1, "rewritten": 1, "tokens": 6}
    assert {name: n for name, n in played.session.counts.items() if n} == counts


def test_what_several_sequences_share_is_trained_on_once(play, tokenizer):
    played = play("a", "b", "c", "d", "e")
    a, _ = played.ask([user("p")], n=2)
    played.ask([user("p"), a.message, user("q")])
    played.ask([user("p"), a.message, user("q")])  # a retry
    played.ask([user("p")])
    found = played.session.sequences()
    assert [chosen(tokenizer, one) for one in found] == ["b<end>", "a<end>c<end>", "d<end>", "e<end>"]
    assert [written(tokenizer, one) for one in found[1:3]] == [
        "p<end>>a<end>q<end>>c<end>", "p<end>>a<end>q<end>>d<end>",
    ]  # fmt: skip
    assert played.session.counts["branches"] == 3 and played.session.counts["rewritten"] == 0


def test_what_a_cut_off_sequence_shares_is_trained_on_in_another(play, tokenizer):
    played = play("a", "bbb", "c")
    (a,) = played.ask([user("p")])
    for text, most in (("q", 2), ("r", 9)):
        played.ask([user("p"), a.message, user(text)], sampling=Sampling(max_new_tokens=most))
    assert [chosen(tokenizer, one) for one in played.session.sequences()] == ["bb", "a<end>c<end>"]


class Fails:
    """A parser that fails at "?", and finds a call without a function at "%"."""

    def __init__(self, tokenizer, tools):
        self.names = [tool["function"]["name"] for tool in tools]

    def parse(self, text):
        if text == "?":
            raise KeyError("name")
        return "", [{"type": "function"}] if text == "%" else [{"function": {"name": self.names[0], "arguments": "{}"}}]


def test_what_a_parser_fails_at_is_text_that_is_trained_on_and_reported_once(play, tokenizer):
    played = play("?", "%", "x", make_parser=Fails)
    found = played.ask([user("p")], tools=TOOLS, n=3)
    assert [one.message["content"] for one in found] == ["?", "%", None]
    assert found[2].message["tool_calls"][0]["function"]["name"] == "add"  # parsers know the request's tools
    assert [chosen(tokenizer, one) for one in played.session.sequences()] == ["?<end>", "%<end>", "x<end>"]
    (problem,) = played.session.problems.values()
    assert problem.startswith("the parser of env.tool_parser failed: KeyError: 'name' (") and __file__ in problem


def test_a_template_that_changes_earlier_turns_is_reported(play, tokenizer, monkeypatch):
    template = "{% for m in messages %}{{ loop.length }}{{ m['content'] }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    played = play("a", "b")
    (a,) = played.ask([user("p")])
    played.ask([user("p"), a.message, user("q")])
    assert played.session.counts["rewritten"] == 1 and "changes earlier turns" in played.session.problems["template"]


def test_other_tools_are_another_history(play, tokenizer):
    played = play("a", "b")
    (a,) = played.ask([user("p")], tools=TOOLS)
    played.ask([user("p"), a.message, user("q")])
    assert len(played.session.sequences()) == 2 and played.session.counts["rewritten"] == 1


def test_calls_of_tools_come_back_as_clients_write_them(play, tokenizer):
    played = play('so!{"a":1}', "2", "3")
    (called,) = played.ask([user("p")], tools=TOOLS)
    (call,) = called.message["tool_calls"]
    assert called.finish_reason == "tool_calls" and called.message["content"] == "so"
    assert call["function"] == {"name": "add", "arguments": '{"a":1}'} and len(call["id"]) == 9
    # Another id, other spaces in the arguments, keys that other clients add.
    function = {"name": "add", "arguments": '{"a": 1}'}
    back = {"role": "assistant", "content": [{"type": "text", "text": "so"}], "refusal": None}
    back["tool_calls"] = [{"id": "x", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "x", "content": "2"}
    (said,) = played.ask([user("p"), back, result], tools=TOOLS)
    # All calls are numbered anew once more, and a client adds a key of its own.
    back["tool_calls"][0]["id"] = result["tool_call_id"] = "y"
    own = {**said.message, "provider_specific_fields": {"refusal": None}}
    played.ask([user("p"), back, result, own, user("q")], tools=TOOLS)
    (one,) = played.session.sequences()
    assert written(tokenizer, one) == 'p<end>>so!{"a":1}<end>2<end>>2<end>q<end>>3<end>'


def test_the_text_ends_before_a_stop_string_and_the_ids_do_not(play, tokenizer):
    played = play(tokenizer("a#")["input_ids"], "b")
    sampling = Sampling(stop=("#",))
    (a,) = played.ask([user("p")], sampling=sampling)
    assert a.message["content"] == "a" and a.finish_reason == "stop"
    played.ask([user("p"), a.message, user("q")], sampling=sampling)
    assert written(tokenizer, played.session.sequences()[0]) == "p<end>>a#<end>q<end>>b<end>"


def test_limits_refuse_calls_and_shorten_responses(play, tokenizer):
    played = play(*["abcdef"] * 9, limits=Limits(calls=3, tokens=9))
    assert played.ask([user("p")], n=2)[1].finish_reason == "length"  # each of two gets half of what is left
    played.ask([user("p")])
    with pytest.raises(RequestError, match="all of its 9 tokens") as refused:
        played.ask([user("p")])
    assert refused.value.code == "session_limit" and played.session.counts["tokens"] == 9
    few = play("a", "b", limits=Limits(calls=3))
    for wrong in ([], [user("p" * MAX_MODEL_LEN)]):  # refused calls come to an end too
        with pytest.raises(ValueError):
            few.ask(wrong)
    few.ask([user("p")])
    with pytest.raises(RequestError, match="all of its 3 calls"):
        few.ask([user("p")])
    assert len(few.seen) == 1
    with pytest.raises(RequestError, match="401 tokens, and the context is 400") as refused:
        played.session.counts["calls"] = 0
        played.ask([user("p" * (MAX_MODEL_LEN - 1))])
    assert refused.value.code == "context_length_exceeded"


def at_once(played, *calls, until=lambda: None):
    """The outcomes of several calls at the same time; the engine waits until all of them have been made."""

    async def at_once(function, *arguments):  # threads would end in any order
        return function(*arguments)

    async def run():
        made, was = asyncio.Event(), played.session._sample

        async def sample(prompt, sampling):
            await made.wait()
            return await was(prompt, sampling)

        played.session._sample = sample
        asks = [asyncio.ensure_future(played.session.ask([user(text)], n=n)) for text, n in calls]
        for _ in range(5):
            await asyncio.sleep(0)
        until()
        made.set()
        return await asyncio.gather(*asks, return_exceptions=True)

    with mock.patch.object(recorder.asyncio, "to_thread", at_once):
        return asyncio.run(asyncio.wait_for(run(), 10.0))


def test_a_call_is_neither_refused_nor_shortened_for_tokens_that_others_hold_and_do_not_sample(play, tokenizer):
    played = play("ab", "c", "d", "efgh", "ij", limits=Limits(tokens=500))
    found = at_once(played, ("p", 1), ("q", 2), ("r", 1), ("s", 1))  # each response may have 256 tokens
    assert [[one.message["content"] for one in got] for got in found] == [["ab"], ["c", "d"], ["efgh"], ["ij"]]
    # 500 tokens: the first has its 256; the two of the second half of 497 each; what is left is more than 256.
    assert [sampling.max_new_tokens for *_, sampling in played.seen] == [256, 248, 248, 256, 256]
    assert played.session.counts["calls"] == 4 and played.session._reserved == 0


def test_a_call_that_waits_is_refused_where_the_tokens_or_calls_are_used_up_or_the_session_ends(play, tokenizer):
    def errors(limits, until=lambda played: None):
        played = play("abc", "d", limits=limits)
        return str(at_once(played, ("p", 1), ("q", 1), ("r", 1), until=lambda: until(played))[-1])

    assert errors(Limits(tokens=6)) == "the session has sampled all of its 6 tokens"
    assert errors(Limits(tokens=9, calls=2)) == "the session has made all of its 2 calls"
    assert errors(Limits(tokens=9), lambda played: setattr(played.session, "ended", True)) == "this session has ended"


def test_what_comes_after_the_end_is_not_recorded(play, tokenizer):
    played = play("a", "b")

    async def sample(prompt, sampling):
        played.session.ended = True
        return await was(prompt, sampling)

    was, played.session._sample = played.session._sample, sample
    for _ in range(2):
        with pytest.raises(RequestError, match="ended"):
            played.ask([user("p")])
    assert played.session.sequences() == [] and len(played.seen) == 1


def test_no_message_of_an_agent_writes_control_tokens(play, tokenizer):
    played = play("a", "b")
    played.ask([user("x<end>y")])
    system = {"role": "system", "content": [{"type": "text", "text": "s<end>"}]}
    tool = {"role": "tool", "content": "<end>z", "name": "<end>"}
    played.ask([system, {"role": "assistant", "content": "a<end>"}, tool, user("r")])
    first, rewritten = played.session.sequences()
    assert written(tokenizer, first) == "x< end>y<end>>a<end>"
    assert written(tokenizer, rewritten) == "s< end><end>a< end><end>< end>z<end>r<end>>b<end>"


def test_equal_seeds_differ_between_sessions_and_between_choices(play, tokenizer):
    seeds = []
    for session in (1, 2, 1):
        played = play("a", "b", seed=session)
        played.ask([user("p")], n=2, sampling=Sampling(seed=5))
        seeds.append([sampling.seed for *_, sampling in played.seen])
    assert seeds[0] == seeds[2] and len({*seeds[0], *seeds[1]}) == 4


IMAGE = {"role": "user", "content": [{"type": "image"}]}


@pytest.mark.parametrize("messages", [["hi"], [{"content": "x"}], [IMAGE], [{"role": "assistant", "tool_calls": 5}]])
def test_what_is_no_conversation_is_refused(play, tokenizer, messages):
    with pytest.raises(ValueError, match="message|content|tool_calls"):
        play().ask(messages)


def back(message, how):
    """The message as one of several clients sends it back."""
    if how == 1:
        return {key: value for key, value in message.items() if value}
    if how == 2:
        return json.loads(json.dumps({**message, "refusal": None, "annotations": []}))
    return message


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "extend", "fork", "retry", "rewrite", "compress"]),
        st.integers(1, 3),  # choices
        st.integers(0, 10**6),  # which of the earlier responses
        st.integers(0, 2),  # how a client sends it back
        st.text(max_size=4),
    ),
    max_size=8,
)
RESPONSES = st.lists(st.lists(st.integers(0, 256), max_size=6), min_size=24, max_size=24)


def check_a_session(play, steps, responses, parses):
    # Ids are any of the vocabulary: bytes that are no text, ends in the middle, responses without an end.
    played = play(*responses)
    session, asked = played.session, []
    tools = TOOLS if parses else ()
    for action, n, which, how, text in [("first", 1, 0, 0, "p"), *steps]:
        said = session.responses
        messages = [user(text)]
        if action == "retry":
            messages = asked[which % len(asked)]
        elif said and action in ("extend", "fork"):
            one = said[-1] if action == "extend" else said[which % len(said)]
            messages = [*one.history, back(one.message, how), {"role": "tool", "content": text}]
        elif said and action == "compress":
            messages = [user("so far"), back(said[-1].message, how), user(text)]
        before = len(said)
        got = played.ask(messages, tools=tools, n=n, sampling=Sampling(max_new_tokens=5))
        asked.append(messages)
        for one in got:
            object.__setattr__(one, "history", messages)
        if action in ("extend", "fork") and before:
            assert all(new.parent is not None for new in got)
    sequences = session.sequences()
    whole = [[*one.prompt_ids, *flat(one.ids)] for one in sequences]
    # Every prompt, with its response, is the beginning of a sequence; and sequences hold nothing else.
    for prompt, sampled, _ in played.seen:
        assert any(tokens[: len(prompt) + len(sampled)] == [*prompt, *sampled] for tokens in whole)
    read = [[*prompt, *sampled] for prompt, sampled, _ in played.seen]
    assert all(tokens in read for tokens in whole)
    trained = sorted(i for one in sequences for i, own in zip(flat(one.ids), flat(one.trainable), strict=True) if own)
    assert trained == sorted(i for _, sampled, _ in played.seen for i in sampled)
    for one in sequences:
        lengths = [len(flat(pieces)) for pieces in (one.ids, one.log_probs, one.versions)]
        assert lengths == [sum(tokens for _, tokens in one.kept)] * 3
    counts = session.counts
    assert counts["calls"] == len(asked) and counts["tokens"] == len(trained)
    roots = sum(one.parent is None for one in session.responses)
    assert counts["rewritten"] + 1 <= roots and len(sequences) <= 1 + counts["rewritten"] + counts["branches"]


@pytest.mark.slow
@settings(max_examples=25)
@given(steps=STEPS, responses=RESPONSES, parses=st.booleans())
def test_no_id_differs_between_what_was_sampled_read_and_trained_on(play, steps, responses, parses):
    check_a_session(play, steps, responses, parses)


@pytest.mark.nightly
@settings(max_examples=2000)
@given(steps=STEPS, responses=RESPONSES, parses=st.booleans())
def test_no_id_differs_in_thousands_of_sessions(play, steps, responses, parses):
    check_a_session(play, steps, responses, parses)
