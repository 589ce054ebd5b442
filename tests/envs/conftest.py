"""Fixtures of the tasks' tests: a tokenizer that needs no file, modules and a search index of their own."""

import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_rl.envs import search_qa
from grpo_rl.envs.tools.search_index import load_corpus

collect_ignore = ["tools/mcp_server.py"]  # it is a program


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A real tokenizer: one token a byte, an end token, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({byte: index for index, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    fast.chat_template = (
        "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return fast


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of search indexes, empty at first."""
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bm25"


@pytest.fixture
def written_module(tmp_path, monkeypatch):
    """Writes a module of the user's own, where Python finds it, and gives its name."""
    names = []

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        names.append(name)
        return name

    yield write
    for name in names:  # another test may write a module of that name
        sys.modules.pop(name, None)


@pytest.fixture
def hotpotqa(real_data):
    """Questions of HotpotQA, and the documents to search."""
    folder = real_data / "hotpotqa"
    return search_qa.load_rows(folder / "hotpotqa_train.json"), load_corpus(folder / "hotpotqa_train_corpus.json")


def said(task, row, *texts):
    """The conversation with these texts of the policy, up to where the task ends it, as a collector plays it."""
    messages = task.prompt(row)
    for text in texts:
        messages = [*messages, {"role": "assistant", "content": text}]
        if (reply := task.reply(row, messages)) is None:
            break
        messages += reply
    return messages
