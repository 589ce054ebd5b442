"""vLLM's tool parsers: the calls in a response, read in the format that the model was trained to write them in.

No engine is started: the parsers read text, and serve responses of the transformers engine as well.
"""

import difflib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

# isort: split
# transformers comes first: the two import each other in a circle.
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

MARKS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
)
"""Text in a chat template, and the parser of the models that have it; the first counts."""
THOUGHT = ("<think>", "</think>")
"""Text around a thought; the chat template may write the first into the prompt."""


class ToolParser:
    """Reads the calls in responses, for as long as it lives and from any thread.

    Args:
        parser: vLLM's class; each response gets an instance of its own, since instances keep state.
        tokenizer: of the policy.
        tools: JSON schemas, from which some formats learn the types of arguments.
    """

    def __init__(self, parser: Any, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parser, self._tokenizer = parser, tokenizer
        self._request = ChatCompletionRequest.model_validate(
            {"messages": [], "model": "policy", "tools": list(tools) or None}
        )

    def parse(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The text before the calls, and the calls as OpenAI's ``tool_calls``; text without calls comes back whole.

        A call in a thought is no call, as in vLLM's own server; a thought without an end holds the whole text.

        Args:
            text: the response with special tokens, some formats being made of them, and without the one that ended it.
        """
        thought, end, message = text.partition(THOUGHT[1])
        if not end and text.lstrip().startswith(THOUGHT[0]):
            return text, []
        thought, message = (thought + end, message) if end else ("", text)
        parser = self._parser(self._tokenizer, self._request.tools)
        try:
            found = parser.extract_tool_calls(message, request=self._request)
        # Untrusted text in foreign code: what no parser understands is text, as in vLLM's own server.
        except Exception:
            return text, []
        if not found.tools_called:
            return text, []
        return thought + (found.content or ""), [
            {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in found.tool_calls
        ]


def tool_parser(
    name: str | None, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()
) -> ToolParser:
    """The parser of this name; without one, that of the models which have the tokenizer's chat template.

    Args:
        name: one of vLLM's, such as ``hermes``; see :func:`parser_names`.
        tools: JSON schemas of what can be called.

    Raises:
        ValueError: there is no such parser, the template shows none, or the parser can't work with the tokenizer.
    """
    chosen = name or _family(tokenizer)
    if chosen not in parser_names():
        nearest = difflib.get_close_matches(chosen, parser_names(), 1)
        hint = f"; did you mean {nearest[0]}?" if nearest else f"; there are {', '.join(parser_names())}"
        raise ValueError(f"env.tool_parser={chosen} is none of vLLM's tool parsers{hint}")
    for folder in ("tool_parsers", "parser"):  # a malformed call, which policies write daily, would log a traceback
        logging.getLogger(f"vllm.{folder}").setLevel(logging.CRITICAL)
    try:
        parser = ToolParserManager.get_tool_parser(chosen)
        # A parser that reads ids instead of text raises NotImplementedError at every text.
        request = ChatCompletionRequest.model_validate({"messages": [], "model": "policy"})
        parser(tokenizer).extract_tool_calls("", request=request)
    # Foreign code: a parser raises what it likes where the vocabulary lacks its tokens.
    except Exception as error:
        raise ValueError(
            f"env.tool_parser={chosen} does not fit the tokenizer: {type(error).__name__}: {error}; name the parser of "
            "the model's family"
        ) from error
    return ToolParser(parser, tokenizer, tools)


def parser_names() -> list[str]:
    """The names of vLLM's tool parsers, in the alphabet's order."""
    return ToolParserManager.list_registered()


def _family(tokenizer: PreTrainedTokenizerBase) -> str:
    template = str(tokenizer.chat_template)
    for mark, name in MARKS:
        if mark in template:
            return name
    raise ValueError(f"the template shows no known format of calls; set env.tool_parser: {', '.join(parser_names())}")
