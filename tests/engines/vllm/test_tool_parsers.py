"""Calls in responses, by vLLM's parsers: the format of a model's family, several calls, and what is no call."""

import json

import pytest

pytest.importorskip("vllm")

from grpo_rl.engines.vllm.tool_parsers import tool_parser

# isort: split
from transformers import AutoTokenizer

SPECIAL = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        (
            "hermes",
            'So.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
            "So.\n",
        ),
        ("llama3_json", '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', ""),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', ""),
    ],
)
def test_the_calls_of_each_family_are_read(tokenizer, name, text, content):
    parser = tool_parser(name, tokenizer)
    for _ in range(2):  # nothing of one response is left for the next
        found, calls = parser.parse(text)
        assert found == content
        functions = [call["function"] for call in calls]
        assert [(f["name"], json.loads(f["arguments"])) for f in functions] == [("f", {"x": 1}), ("g", {})]
        assert len({call["id"] for call in calls}) == 2 and {call["type"] for call in calls} == {"function"}


THOUGHT = "<think>I should use <tool_call> tags.</think>\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (THOUGHT + CALL, THOUGHT, ["f"]),
        (f"no, not {CALL}</think>\n4", f"no, not {CALL}</think>\n4", []),
        (f"<think>or {CALL}", f"<think>or {CALL}", []),
    ],
)
def test_a_thought_neither_calls_nor_hides_a_call(tokenizer, text, content, names):
    found, calls = tool_parser("hermes", tokenizer).parse(text)
    assert (found, [call["function"]["name"] for call in calls]) == (content, names)


@pytest.mark.parametrize("text", ["", "4", "<tool_call>{", '<tool_call>{"name": "f"}</tool_call>', "<tool_call>[1]"])
def test_text_without_a_whole_call_comes_back_as_it_is_and_logs_nothing(tokenizer, text, capfd):
    parser = tool_parser("hermes", tokenizer)
    assert parser.parse(text) == (text, [])
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("template", "call"),
    [
        ("<tool_call> {{ messages }}", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("<|start_header_id|> {{ messages }}", '{"name": "f", "parameters": {}}'),
        ("[TOOL_CALLS] {{ messages }}", "[TOOL_CALLS]f[ARGS]{}"),
    ],
)
def test_without_a_name_the_chat_template_decides(tokenizer, template, call, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert [call["function"]["name"] for call in tool_parser(None, tokenizer).parse(call)[1]] == ["f"]
