"""A model's engine and the endpoint over it, until it is interrupted."""

import sys
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

from grpo_rl.agents.recorder import Limits, Session
from grpo_rl.agents.requests import MakeParser
from grpo_rl.agents.server import ChatServer
from grpo_rl.assembly.environment import tool_parser_of
from grpo_rl.assembly.sync import make_engine
from grpo_rl.engines.base import Sampler, Sampling
from grpo_rl.engines.loop_thread import LoopThread, SteppedEngine
from grpo_rl.policies.generation import load_tokenizer
from grpo_rl.policies.hub import resolve_model
from grpo_rl.settings.devices import allocate
from grpo_rl.settings.schema import Settings

MOST_SESSIONS = 1000
"""Keys whose sessions are kept; beyond it the oldest is forgotten."""
MOST_CALLS = 1000
"""Calls of one key that are kept. The next one begins anew: conversations are then written from their beginning."""
LIMITS = Limits(calls=sys.maxsize, tokens=sys.maxsize)


class OpenSessions:
    """Sessions that the first call with their key opens."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, engine: SteppedEngine, max_model_len: int, parser: MakeParser | None
    ) -> None:
        self._parts = (tokenizer, engine.sample, max_model_len, parser, LIMITS)
        self._sessions: dict[str, Session] = {}
        self._forgotten: Counter[str] = Counter()

    def __call__(self, key: str) -> Session:
        if key in self._sessions and self._sessions[key].counts["calls"] >= MOST_CALLS:
            self._forget(key)
        if key not in self._sessions:
            if len(self._sessions) == MOST_SESSIONS:
                self._forget(next(iter(self._sessions)))
            self._sessions[key] = Session(*self._parts)
        return self._sessions[key]

    def _forget(self, key: str) -> None:
        self._forgotten += self._sessions.pop(key).counts + Counter(sessions=1)

    def counts(self) -> Counter[str]:
        """The counts of all sessions together, and their number."""
        opened = Counter(sessions=len(self._sessions))
        return sum((session.counts for session in self._sessions.values()), self._forgotten + opened)


def serve_model(settings: Settings, port: int) -> int:
    """Serves the model of ``model.name`` until it is interrupted, and returns the exit code.

    Raises:
        ValueError: the settings do not fit this machine or the model, or the port is taken.
    """
    folder = resolve_model(settings.model.name)
    tokenizer = load_tokenizer(folder, settings.model)
    parser = tool_parser_of(settings)
    if settings.env.tool_parser is not None:
        parser(tokenizer, [])  # a wrong name is refused before anything starts
    heads = AutoConfig.from_pretrained(folder).get_text_config().num_attention_heads
    engine = make_engine(settings, folder, allocate(settings, num_attention_heads=heads))
    try:
        sampling, name = Sampling(**settings.sampling), Path(settings.model.name).name
        serve(name, tokenizer, engine, sampling, parser, port, Future())
    finally:
        engine.close()
    return 0


def serve(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    engine: Sampler,
    sampling: Sampling,
    parser: MakeParser | None,
    port: int,
    until: Future[None],
) -> None:
    """Serves an engine until ``until`` is done, or Ctrl-C is pressed."""
    stepped, loop = SteppedEngine(engine, goes_on=True), LoopThread()
    sessions = OpenSessions(tokenizer, stepped, engine.max_model_len, parser)
    server = ChatServer(name, tokenizer, sampling, False, engine.max_model_len, sessions)
    try:
        loop.run(server.start(port=port))
        print(f"export OPENAI_BASE_URL={server.url} OPENAI_API_KEY=any  # on this machine; Ctrl-C ends", flush=True)
        stepped.run(until)
    except KeyboardInterrupt:
        print()
    finally:
        loop.run(server.close())
        loop.close()
    counts = sessions.counts()
    names = ("sessions", "calls", "extended", "rewritten", "branches", "tokens")
    print(", ".join(f"{counts[name]} {name}" for name in names), flush=True)
