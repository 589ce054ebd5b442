"""The benchmark of tools tells tools beside the engine from tools in its way."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from grpo_rl.collectors import multi_turn
from grpo_rl.testing import save_tiny_model
from tests.envs.tools.plain_parser import PlainParser

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("path", ["synchronous", "asynchronous"])
def test_tools_that_hold_up_the_engine_show(script, path, tmp_path, monkeypatch):
    tools = script("tools")
    monkeypatch.setattr(tools, "hermes_parser", PlainParser)
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path))
    work = tools.Work(16, turns=2, repeats=4, tokens=(80, 120), step_s=0.002, tool_s=(0.1, 0.15), collections=3)
    beside = getattr(tools, path)(work, tokenizer, slow=True)
    monkeypatch.setattr(multi_turn, "in_thread", lambda function, *arguments: function(*arguments))
    in_its_way = getattr(tools, path)(work, tokenizer, slow=True)
    assert in_its_way["tokens_per_s"] < 0.7 * beside["tokens_per_s"], (beside, in_its_way)
    assert in_its_way["busy"] < 0.7 * beside["busy"], (beside, in_its_way)
