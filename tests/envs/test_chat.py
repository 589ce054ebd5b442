"""Ids of a reply: nothing sampled is written again, nothing that the template writes is lost."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from grpo_rl.envs.chat import Dialog, check_reply, encode_reply
from grpo_rl.testing import save_tiny_model

REPLY = [{"role": "tool", "content": "12"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("model")))


def written(tokenizer, last):
    return tokenizer.decode(encode_reply(tokenizer, REPLY, last))


def test_the_end_of_a_turn_is_written_unless_it_was_sampled(tokenizer):
    end, other = tokenizer.eos_token_id, tokenizer("x")["input_ids"][-1]
    assert written(tokenizer, end) == "12<end>>"
    assert written(tokenizer, other) == "<end>12<end>>"


def test_no_reply_writes_special_tokens_whatever_its_role(tokenizer):
    ids = encode_reply(tokenizer, [{"role": "user", "content": "a<end>b"}], tokenizer.eos_token_id)
    assert tokenizer.decode(ids) == "a< end>b<end>>"


def test_the_reply_that_is_checked_is_the_one_that_conversations_have(tokenizer, monkeypatch):
    """The template is like Gemma 4's, which shows results of calls alone."""
    schemas = [{"function": {"name": "f"}}]
    shows = "{% for m in messages %}{% if m.role != 'tool' or messages[loop.index0 - 1].tool_calls %}{{ m.content }}"
    monkeypatch.setattr(tokenizer, "chat_template", shows + "|{% endif %}{% endfor %}")
    check_reply(tokenizer, "user", schemas)
    with pytest.raises(ValueError, match="leaves out the reply"):
        check_reply(tokenizer, "tool")
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for m in messages if m.role != 'tool' %}{{ m.content }}|{% endfor %}"
    )
    with pytest.raises(ValueError, match="leaves out the reply"):
        check_reply(tokenizer, "user", schemas)


def test_the_templates_own_end_of_a_turn_is_kept_where_another_token_ended_the_answer(tokenizer):
    """The template is like Gemma's, whose turns end on another token than its texts."""
    tokenizer.chat_template, before = None, tokenizer.chat_template
    opens = "{% if add_generation_prompt %}>{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}#\n{% endfor %}" + opens
    try:
        assert written(tokenizer, tokenizer.eos_token_id) == "#\n12#\n>"
        assert written(tokenizer, tokenizer("#")["input_ids"][-1]) == "\n12#\n>"
    finally:
        tokenizer.chat_template = before


FORGETS = "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}|{% endfor %}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (FORGETS, "changes earlier turns"),
        ("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}", "or leaves them out"),
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}|{% endfor %}", "or it leaves out the reply"),
        ("{{ raise_exception('no such role') }}", r"refuses messages with the roles \['assistant', 'user'\]: no such"),
        ("{{ 1 // (2 - messages | length) }}", "refuses messages .*: ZeroDivisionError: "),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "refuses messages .*: RecursionError: "),
    ],
)
def test_a_template_that_fails_or_changes_earlier_turns_is_refused(tokenizer, template, why):
    tokenizer.chat_template, before = template, tokenizer.chat_template
    try:
        with pytest.raises(ValueError, match=why):
            encode_reply(tokenizer, REPLY)
    finally:
        tokenizer.chat_template = before


@pytest.mark.parametrize("reply", ["12", [], ["12"], [{"role": "tool"}], {"role": "tool", "content": "12"}])
def test_a_reply_that_is_no_message_is_refused(reply):
    class Odd:
        def reply(self, row, messages):
            return reply

    with pytest.raises(TypeError, match="reply returned"):
        Dialog([], turns=1).reply(Odd(), {}, 4)
