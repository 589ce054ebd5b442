"""Sessions over an engine that plays given responses."""

import asyncio
import inspect

import pytest
from transformers import AutoTokenizer

from grpo_rl.agents.recorder import Session
from grpo_rl.testing import ScriptedEngine

MAX_MODEL_LEN = 400


def pytest_pyfunc_call(pyfuncitem):
    """Runs tests that are coroutines."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


class Parser:
    """Takes all text behind "!" for the arguments of a call of ``add``."""

    def __init__(self, tokenizer=None, tools=()):
        pass

    def parse(self, text):
        content, bang, arguments = text.partition("!")
        function = {"name": "add", "arguments": arguments}
        return content, [{"id": "any", "type": "function", "function": function}] if bang else []


class Played:
    """A session over an engine whose responses are those of a list, in order; ``seen`` holds prompt and response."""

    def __init__(self, tokenizer, responses, max_model_len=MAX_MODEL_LEN, **settings):
        said = iter(responses)
        self.seen, self.version = [], 0

        async def sample(prompt, sampling):
            engine = ScriptedEngine(lambda *_: next(said))
            engine.version = self.version
            (samples,) = engine.generate([prompt], 1, sampling)
            self.seen.append((list(prompt), samples.response_ids.tolist(), sampling))
            return samples

        self.session = Session(tokenizer, sample, max_model_len, **{"make_parser": Parser} | settings)

    def ask(self, messages, **settings):
        return asyncio.run(self.session.ask(messages, **settings))


@pytest.fixture(scope="package")
def tokenizer(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    # A template that takes tools and writes none: tests stay short.
    tokenizer.chat_template = "{% if tools %}{% endif %}" + tokenizer.chat_template
    return tokenizer


@pytest.fixture(scope="package")
def play(tokenizer):
    """Makes a session whose policy says the given texts, each ended, or samples the given ids."""

    def make(*said, **settings):
        end = tokenizer.eos_token_id
        ids = [[*tokenizer(one)["input_ids"], end] if isinstance(one, str) else one for one in said]
        return Played(tokenizer, ids, **settings)

    return make
