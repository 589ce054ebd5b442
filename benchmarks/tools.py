"""Shows that slow tools keep the engine busy: `python benchmarks/tools.py`.

Conversations of several turns call a function in all turns but the last, once with a function that answers at once, and
once with one that takes 50 to 500 ms. They are played by the environment, its parser of calls and the collectors as in
a run, synchronous and asynchronous. Only the engine is scripted: a decoding step yields a token of each response that
it holds, however many, and takes a time that grows slowly with their number. Prompts cost nothing, as with a prefix
cache.

The busy share is the time of the engine's steps, as the sizes give it, over the time of the collection, until the last
conversation has its reward; a step counts as busy however few responses it holds. The figure is the least ratio of the
busy share with slow tools to that with fast ones. The engine is also less full while conversations wait for their
tools: `tokens ratio` is how much less it samples in the same time, and `tokens ratio allowed` what it would be if
each conversation waited for its own tools alone. It is made up for by more conversations in flight, as a step takes
hardly longer for them.

Asynchronous collections are measured after the first, as the engine is filled by then, and training takes no time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import queue
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import harness
import torch
from transformers import PreTrainedTokenizerBase

from grpo_rl.cluster.fleet import Fleet, FleetEngine
from grpo_rl.collectors.asynchronous import AsyncCollector
from grpo_rl.collectors.engine_policy import EnginePolicy
from grpo_rl.collectors.sync import SyncCollector
from grpo_rl.engines.base import Samples, Sampling
from grpo_rl.engines.loop_thread import LoopThread
from grpo_rl.envs.base import LLMEnv, Messages, Reward
from grpo_rl.envs.tools.functions import FunctionTask
from grpo_rl.testing import ScriptedEngine, hermes_parser

NAME = "tools"
BAR = 0.9
FAST, SLOW = "fast tools", "slow tools"
PATHS = ("synchronous", "asynchronous")
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "pelican"}}\n</tool_call>'
SEED = 0


@dataclass(frozen=True)
class Work:
    """The sizes of one row.

    Args:
        conversations: in flight; asynchronous steps train half as many, with a staleness of one step.
        turns: of the policy, each but the last with one call.
        tokens: the least and the most of a turn.
        step_s: seconds of a decoding step.
        each_s: seconds that a step takes longer for each response.
        tool_s: the least and the most of a slow call.
        collections: asynchronous ones that are measured.
    """

    conversations: int
    turns: int = 4
    repeats: int = 8
    tokens: tuple[int, int] = (32, 96)
    step_s: float = 0.01
    each_s: float = 2e-5
    tool_s: tuple[float, float] = (0.05, 0.5)
    collections: int = 4

    @property
    def sampled_share(self) -> float:
        """Share of its time that a conversation is sampled in which waits for its own slow tools alone."""
        sampled_s = self.turns * sum(self.tokens) / 2 * (self.step_s + self.each_s * self.conversations)
        return sampled_s / (sampled_s + (self.turns - 1) * sum(self.tool_s) / 2)


class LookUp(FunctionTask):
    """A function that takes its time; each conversation earns the number of its results."""

    reward_parts = ("results",)

    def __init__(self, rows: int, seconds: Callable[[], float]) -> None:
        self.rows = [{"word": f"word {i}"} for i in range(rows)]

        def look_up(word: str) -> str:
            """Looks a word up.

            Args:
                word: the word
            """
            time.sleep(seconds())
            return f"{word} is a word."

        self.tools = (look_up,)

    def prompt(self, row: dict) -> Messages:
        return [{"role": "user", "content": f"Look {row['word']} up."}]

    def score(self, row: dict, response: str) -> Reward:
        return Reward({"results": 0.0})

    def score_dialog(self, row: dict, messages: Messages) -> Reward:
        return Reward({"results": float(sum(message["role"] == "tool" for message in messages))})


class Decoder(ScriptedEngine):
    """Samples a token of every response in each step, which sleeps: the time is a GPU's, and not this process's."""

    def __init__(self, work: Work, script: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        super().__init__(script)
        self._work, self._steps, self._held = work, 0, 0
        self._ending: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        self.busy_s = 0.0
        self.tokens = 0

    def submit(self, request: int, prompt: Sequence[int], sampling: Sampling) -> None:
        response = list(self._script(prompt, 0))
        assert len(response) <= sampling.max_new_tokens
        self._ending[self._steps + len(response)].append((request, response))
        self._held += 1

    def step(self) -> list[tuple[int, Samples]]:
        if not self._held:
            return []
        seconds = self._work.step_s + self._work.each_s * self._held
        time.sleep(seconds)
        self.busy_s += seconds  # not what the sleep took: on a machine that is busy with other work it takes longer
        self._steps += 1
        self.tokens += self._held
        ended = self._ending.pop(self._steps, [])
        self._held -= len(ended)
        return [(n, Samples.from_lists([ids], [[0.0] * len(ids)], [False], self.version)) for n, ids in ended]

    def abort(self) -> None:
        self._ending.clear()
        self._held = 0


class Served:
    """The decoder in a thread of its own, as asynchronous engines are called."""

    name, dtype, takes_adapters, proves_bytes = "engine 0", torch.bfloat16, False, False

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self.version, self.max_model_len = decoder, 0, decoder.max_model_len
        self._asked: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    async def generate(self, request_id: str, prompt: Sequence[int], n: int, sampling: Sampling) -> Samples:
        assert n == 1, "conversations are sampled one by one"
        given: asyncio.Future[Samples] = asyncio.get_running_loop().create_future()
        self._asked.put((given, prompt, sampling))
        return await given

    async def close(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _serve(self) -> None:
        waiting: dict[int, asyncio.Future[Samples]] = {}
        for number in itertools.count():
            while waiting and self._asked.empty():
                for ended, samples in self._decoder.step():
                    future = waiting.pop(ended)
                    future.get_loop().call_soon_threadsafe(_give, future, samples)
            if (asked := self._asked.get()) is None:
                return
            waiting[number], prompt, sampling = asked
            self._decoder.submit(number, prompt, sampling)


def _give(future: asyncio.Future[Samples], samples: Samples) -> None:
    if not future.done():  # cancelled with its collector
        future.set_result(samples)


class Weights:
    """A version that rises with each training step, which sends nothing."""

    def __init__(self) -> None:
        self.version, self._listeners = 0, []

    def subscribe(self, listener: Callable[[int], None]) -> None:
        self._listeners.append(listener)

    def push(self) -> None:
        self.version += 1
        for listener in self._listeners:
            listener(self.version)


class NoTransport:
    """Sends nothing: the engine has no weights."""

    dtype, takes_adapters, on_lost = torch.bfloat16, False, None

    def __init__(self, engines: object) -> None: ...
    def close(self) -> None: ...


def make(work: Work, tokenizer: PreTrainedTokenizerBase, slow: bool, num_envs: int) -> tuple[LLMEnv, Decoder]:
    """The environment and the engine of one arm; lengths of turns and seconds of calls follow from seeds."""
    rng, lengths = random.Random(SEED), random.Random(SEED + 1)
    task = LookUp(num_envs, lambda: rng.uniform(*work.tool_s) if slow else 0.0)
    env = LLMEnv(task, tokenizer, num_envs, work.repeats, max_turns=work.turns, tool_parser=hermes_parser)
    call, (filler, *_) = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (CALL, " so"))
    end = tokenizer.eos_token_id
    before = env.encode(task.rows[0]).count(end)

    def script(prompt: Sequence[int], g: int) -> list[int]:
        # A turn and its result end a message each.
        calls_made = (prompt.count(end) - before) // 2
        last = [*(call if calls_made < work.turns - 1 else ()), end]
        return [filler] * (lengths.randint(*work.tokens) - len(last)) + last

    return env, Decoder(work, script)


def measured(decoder: Decoder, collect: Callable[[], list]) -> dict[str, float]:
    """Measures what ``collect`` does; checks that each conversation had all its results."""
    busy_s, tokens, begun = decoder.busy_s, decoder.tokens, time.perf_counter()
    groups = collect()
    step_s = time.perf_counter() - begun
    results = {reward for group in groups for reward in group.rewards.tolist()}
    assert len(results) == 1 and results.pop() > 0, "a conversation lacks results: not the same work"
    busy_s = decoder.busy_s - busy_s
    return {"step_s": step_s, "busy": busy_s / step_s, "tokens_per_s": (decoder.tokens - tokens) / step_s}


def synchronous(work: Work, tokenizer: PreTrainedTokenizerBase, slow: bool) -> dict[str, float]:
    """Measures one collection, from its first to its last conversation's end."""
    env, decoder = make(work, tokenizer, slow, work.conversations // work.repeats)
    policy = EnginePolicy(decoder, Sampling(max_new_tokens=work.tokens[1]))
    collector = SyncCollector(env, policy, sys.maxsize)
    return measured(decoder, lambda: collector.collect())


def asynchronous(work: Work, tokenizer: PreTrainedTokenizerBase, slow: bool) -> dict[str, float]:
    """Measures the collections after the first."""
    env, decoder = make(work, tokenizer, slow, work.conversations // work.repeats // 2)
    loop, engine, weights = LoopThread(), Served(decoder), Weights()

    async def launch(number: int) -> Served:
        return engine

    fleet = Fleet(launch, size=1)
    loop.run(fleet.start())
    loop.run(fleet.admit([engine]))
    engines = FleetEngine(fleet, loop, NoTransport)
    sampling = Sampling(max_new_tokens=work.tokens[1])
    collector = AsyncCollector(env, engines, sampling, sys.maxsize, weights, max_staleness=1)

    def collect(count: int) -> list:
        groups = []
        for _ in range(count):
            groups += collector.collect()
            weights.push()
        return groups

    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        stack.callback(lambda: loop.run(fleet.close()))
        stack.callback(collector.shutdown)
        collect(1)
        return measured(decoder, lambda: collect(work.collections))


def compared(work: Work, tokenizer: PreTrainedTokenizerBase, steps: int) -> tuple[list[dict], dict[str, dict]]:
    """A row of figures for each path, and what its arms took."""
    plays = dict(zip(PATHS, (synchronous, asynchronous), strict=True))
    arms = {
        f"{path}, {name}": lambda play=play, slow=slow: play(work, tokenizer, slow)
        for path, play in plays.items()
        for name, slow in ((FAST, False), (SLOW, True))
    }
    summary = {name: harness.summarize(reports) for name, reports in harness.rounds(arms, steps).items()}
    rows = []
    for path in plays:
        fast, slow = (summary[f"{path}, {name}"]["median"] for name in (FAST, SLOW))
        rows.append(
            {
                "path": path,
                "conversations": work.conversations,
                "busy, fast tools": fast["busy"],
                "busy, slow tools": slow["busy"],
                "busy ratio": slow["busy"] / fast["busy"],
                "tokens/s, fast": fast["tokens_per_s"],
                "tokens/s, slow": slow["tokens_per_s"],
                "tokens ratio": slow["tokens_per_s"] / fast["tokens_per_s"],
                "tokens ratio allowed": work.sampled_share,
            }
        )
    return rows, summary


def main() -> None:
    args = parse()
    load = harness.require_quiet(args.force)
    from grpo_rl.policies.generation import load_tokenizer
    from grpo_rl.policies.hub import DEFAULT_MODEL, resolve_model

    tokenizer = load_tokenizer(resolve_model(DEFAULT_MODEL))
    rows, arms = [], {}
    for conversations in args.conversations:
        work = Work(conversations, step_s=args.step_ms / 1000)
        found, summary = compared(work, tokenizer, args.steps)
        rows += found
        arms |= {f"{conversations}, {name}": arm for name, arm in summary.items()}
    work = Work(0, step_s=args.step_ms / 1000)
    result = {
        "shows": f"Conversations of {work.turns} turns of {work.tokens[0]} to {work.tokens[1]} tokens, with a call in "
        f"all but the last, which takes {1000 * work.tool_s[0]:g} to {1000 * work.tool_s[1]:g} ms or answers at once. "
        f"The engine is scripted: a decoding step takes {1000 * work.step_s:g} ms and {1e6 * work.each_s:g} µs for "
        "each response. Its busy share is the time of its steps over the collection's, the figure the least ratio of "
        "those with slow and with fast tools. `tokens ratio allowed` is the share of its time in which a conversation "
        "is sampled that waits for its own tools alone. Synchronous: one collection, from its first to its last "
        "conversation's end; asynchronous: collections one after the other, half of the conversations a step, with a "
        "staleness of one.",
        "bars": [
            harness.bar(
                f"of the busy share with fast tools, {row['path']}, {row['conversations']} conversations",
                row["busy ratio"],
                at_least=BAR,
            )
            for row in rows
        ],
        "table": rows,
        "arms": arms,
        "plots": [],
        "code": harness.code("envs", "grpo_rl/cluster", "grpo_rl/collectors"),
        "machine": harness.machine(),
        **load,
    }
    harness.finish(NAME, min(row["busy ratio"] for row in rows), result, args.out)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--conversations",
        type=int,
        nargs="+",
        default=[32, 64, 128],
        help="in flight; multiples of 16, two groups of 8",
    )
    parser.add_argument("--step-ms", type=float, default=1000 * Work.step_s, help="of a decoding step")
    args = parser.parse_args()
    if any(count < 16 or count % 16 for count in args.conversations):
        parser.error("--conversations must be multiples of 16: asynchronous collections hold two steps of groups of 8")
    return args


if __name__ == "__main__":
    main()
