"""A parser of calls for tests that do not test parsers: vLLM's take nine seconds of a processor to import."""

from __future__ import annotations

import json


class PlainParser:
    """Reads one call, written as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

    def __init__(self, tokenizer, schemas): ...

    def parse(self, text):
        before, mark, call = text.partition("<tool_call>")
        if not mark:
            return text, []
        function = json.loads(call.partition("</tool_call>")[0])
        return before, [{"id": "x", "function": function | {"arguments": json.dumps(function["arguments"])}}]
