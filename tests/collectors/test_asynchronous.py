"""The async collector hands out what the sync one would, while it samples on, and counts what it leaves out."""

import asyncio
import itertools
import threading
import time
from collections import defaultdict

import pytest
import torch

from grpo_rl.cluster.fleet import Fleet, FleetEngine
from grpo_rl.collectors.asynchronous import AsyncCollector
from grpo_rl.engines.base import EngineDeadError, Samples, Sampling
from grpo_rl.engines.loop_thread import LoopThread
from grpo_rl.envs.base import LLMEnv, Reward, ScoreError
from grpo_rl.envs.mixture import MixtureEnv
from tests.collectors import test_multi_turn, test_sync


class CountA(test_sync.CountA):
    """Pays one for each "a" in the response; the third prompt is paid the same whatever the response is."""

    rows = [{"q": "one"}, {"q": "two"}, {"q": "three"}, {"q": "four"}]

    def score(self, row, response):
        if row["q"] == "four":
            raise ZeroDivisionError("no answer is right")
        return Reward({"a": 0.0}) if row["q"] == "three" else super().score(row, response)


class Engine:
    """Response g is "a" g times, after a moment; the token that is sampled by other weights than the first says so."""

    name, version, max_model_len = "engine 0", 0, 500
    dtype, takes_adapters, proves_bytes = torch.bfloat16, False, False

    def __init__(self, tokenizer, dies_at=()):
        self._a, self._dies_at, self._calls = tokenizer("a")["input_ids"][0], set(dies_at), itertools.count()
        self.asked = []

    async def generate(self, request_id, prompt, n, sampling):
        call = next(self._calls)
        self.asked.append(request_id)
        version = self.version
        await asyncio.sleep(0.01)
        if call in self._dies_at:
            raise EngineDeadError("engine 0 (process 7) died")
        ids, log_probs = ([[x] * g for g in range(n)] for x in (self._a, -0.1))
        return Samples.from_lists(ids, log_probs, [False] * n, version)

    async def close(self):
        pass


class Holding(Engine):
    """Responses to the third prompt wait until the engine lets go."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.let_go, self._decode = threading.Event(), tokenizer.decode

    async def generate(self, request_id, prompt, n, sampling):
        while "three" in self._decode(prompt) and not self.let_go.is_set():
            await asyncio.sleep(0.01)
        return await super().generate(request_id, prompt, n, sampling)


@pytest.fixture
def loop():
    thread = LoopThread()
    yield thread
    thread.close()


class NoTransport:
    """Sends nothing: weights are no matter here."""

    dtype, takes_adapters, on_lost = torch.bfloat16, False, None

    def __init__(self, engines): ...
    def close(self): ...


class Weights:
    """A version that pushes raise, in the engine too."""

    def __init__(self, engine, version=0):
        self.engine, self.version, self.listeners = engine, version, []

    def subscribe(self, listener):
        self.listeners.append(listener)

    def push(self):
        self.version += 1
        self.engine.version = self.version
        for listener in self.listeners:
            listener(self.version)


def fleet_of(engine, loop):
    async def launch(number):
        return engine

    fleet = Fleet(launch, size=1)
    loop.run(fleet.start())
    loop.run(fleet.admit([engine]))
    fleet_engine = FleetEngine(fleet, loop, NoTransport)
    fleet_engine.on_new_engine = lambda: loop.run(fleet.admit([engine]))
    return fleet_engine


def made(tokenizer, loop, rows=2, total=12, engine=None, max_failed_fraction=1.0, version=0, **settings):
    task = CountA()
    task.rows = CountA.rows[:rows]
    env = LLMEnv(task, tokenizer, num_envs=2, repeats=3, max_failed_fraction=max_failed_fraction)
    engine = engine or Engine(tokenizer)
    weights = Weights(engine, version)
    return AsyncCollector(env, fleet_of(engine, loop), Sampling(), total, weights, 1, **settings), engine, weights


def collections(collector, weights):
    out = []
    while groups := collector.collect():
        out.append(groups)
        weights.push()
    collector.staleness.check()
    collector.shutdown()
    return out


def test_it_hands_out_whole_collections_until_all_responses_are_sampled(tokenizer, loop):
    collector, _, weights = made(tokenizer, loop)
    out = collections(collector, weights)
    assert [len(groups) for groups in out] == [2, 2] and collector.collected == 12
    for group in itertools.chain.from_iterable(out):
        assert group.rewards.tolist() == [0.0, 1.0, 2.0] and group.lengths.tolist() == [0, 1, 2]
    assert sorted(g.group_id for g in itertools.chain.from_iterable(out)) == [0, 1, 2, 3]


def test_the_next_collection_is_sampled_while_one_is_trained_on_and_no_more_than_the_bound_allows(tokenizer, loop):
    collector, engine, weights = made(tokenizer, loop, total=60)
    collector.collect()
    loop.run(asyncio.sleep(0.1))
    # Two a step, one step ahead, beside the two that are trained on.
    assert len(engine.asked) == 4
    weights.push()
    loop.run(asyncio.sleep(0.1))
    assert len(engine.asked) == 6
    ages = [collector.staleness.version - int(group.versions.min()) for group in collector.collect()]
    assert ages == [1, 1]
    collector.shutdown()


def test_groups_of_an_engine_that_died_are_sampled_again(tokenizer, loop):
    collector, engine, weights = made(tokenizer, loop, engine=Engine(tokenizer, dies_at=[0]))
    out = collections(collector, weights)
    assert sorted(g.group_id for g in itertools.chain.from_iterable(out)) == [0, 1, 2, 3]
    assert engine.asked.count("group-0-0-0") == 1 and "group-0-1-0" in engine.asked


def test_it_tells_when_which_engine_sampled_each_group_once(tokenizer, loop):
    collector, _, weights = made(tokenizer, loop, total=6, engine=Engine(tokenizer, dies_at=[0]))
    begun_s = time.perf_counter()
    collections(collector, weights)
    sampled = collector.take_sampled()
    # The engine died with group 0 in its hands, which was sampled again.
    assert sorted(group.group_id for group in sampled) == [0, 0, 1]
    assert all(group.engine == "engine 0" and group.version == 0 for group in sampled)
    for group in sampled:  # generating sleeps 0.01 s
        assert begun_s <= group.begun_s and group.ended_s - group.begun_s >= 0.009
        assert group.ended_s <= time.perf_counter()
    assert collector.take_sampled() == []


def test_groups_that_teach_nothing_or_have_no_rewards_are_dropped_and_counted(tokenizer, loop):
    collector, _, weights = made(tokenizer, loop, rows=4, total=24, drops_zero_variance=True)
    out = list(itertools.chain.from_iterable(collections(collector, weights)))
    account = collector.metrics()
    assert len(out) == 4 and account["groups/dropped_alike"] == 2 and account["groups/dropped_unrewarded"] == 2
    assert collector.collected == 24 and collector.staleness.started == 8


def test_what_was_sampled_and_left_out_counts_as_sampled_also_after_a_checkpoint(tokenizer, loop):
    engine = Holding(tokenizer)
    first, _, weights = made(tokenizer, loop, engine=engine, rows=3, total=18, drops_zero_variance=True)
    assert first.collect()
    sampled = [*first.sampled]
    weights.push()
    assert not first.state_dict()["zero_variance"]
    engine.let_go.set()  # the third is sampled, and left out, between two collections
    until = time.monotonic() + 60
    while not (state := first.state_dict())["zero_variance"] and time.monotonic() < until:
        time.sleep(0.01)
    assert state["zero_variance"]
    first.shutdown()
    second, engine, weights = made(
        tokenizer, loop, rows=3, total=18, drops_zero_variance=True, version=weights.version, collected=first.collected
    )
    engine.version = weights.version
    second.load_state_dict(state)
    while second.collect():
        sampled += second.sampled
        weights.push()
    sampled += second.sampled  # those that were left out last, with the empty collection
    second.shutdown()
    assert len(sampled) == 6 and sum(group.rewards.sum() == 0 for group in sampled) == 2


def test_too_many_failures_end_the_run_in_the_thread_that_waits(tokenizer, loop):
    collector, _, weights = made(tokenizer, loop, rows=4, total=600, max_failed_fraction=0.0)
    with pytest.raises(ScoreError, match="ZeroDivisionError"):
        while collector.collect():
            weights.push()
    collector.shutdown()


def test_a_collector_goes_on_where_another_stopped_and_keeps_what_was_sampled(tokenizer, loop):
    first, engine, weights = made(tokenizer, loop, total=30)
    handed_out = first.collect()
    loop.run(asyncio.sleep(0.1))  # two more are sampled meanwhile
    weights.push()
    state = first.state_dict()
    first.shutdown()
    waiting = [saved for saved in state["open"] if saved["group"] is not None]
    in_flight = [saved["prompt"]["group_id"] for saved in state["open"] if saved["group"] is None]
    assert [saved["version"] for saved in waiting] == [0, 0] and len(in_flight) == 2

    second, engine, weights = made(tokenizer, loop, total=30, version=1, collected=6)
    engine.version = 1
    second.load_state_dict(state)
    assert second.collected == 6 and second.staleness.started == 4
    out = list(itertools.chain.from_iterable(collections(second, weights)))
    assert sorted(group.group_id for group in [*handed_out, *out]) == list(range(10))
    kept = {group.group_id: group for group in out}[waiting[0]["prompt"]["group_id"]]
    assert kept.versions.unique().tolist() == [0] and kept.rewards.tolist() == [0.0, 1.0, 2.0]
    assert not any(f"group-{saved['prompt']['group_id']}-0-0" in engine.asked for saved in waiting), (
        "nothing is asked twice"
    )
    assert second.metrics()["groups/started"] == second.metrics()["groups/trained"] == 10


def test_engines_that_were_replaced_before_a_checkpoint_are_counted_after_it(tokenizer, loop):
    counts, state = [], None
    for _ in range(2):
        collector, _, _ = made(tokenizer, loop, total=30, engine=Engine(tokenizer, dies_at=[0]))
        if state:
            collector.load_state_dict(state)
        before = counts[-1] if counts else 0
        while collector.collect() and collector.metrics()["engines/replaced"] == before:
            pass  # the other engine was faster than the replacement
        counts.append(collector.metrics()["engines/replaced"])
        state = collector.state_dict()
        collector.shutdown()
    assert counts == [1, 2], "one in each run"


class Turns(test_multi_turn.Echo):
    """The world says back what was said; a conversation is worth what was said in its turns."""

    reward_parts = ("turns",)

    def score_dialog(self, row, messages):
        return Reward({"turns": sum(message["role"] == "assistant" for message in messages)})


ROWS = {"prompt": "one"}, {"prompt": "two"}


class Speaks(Engine):
    """Says one word a turn; the second conversation of a group says "boom" in its second turn."""

    def __init__(self, tokenizer):
        self._tokenizer, self.asked = tokenizer, defaultdict(list)

    async def generate(self, request_id, prompt, n, sampling):
        await asyncio.sleep(0.01)
        *group, conversation, turn = request_id.split("-")
        self.asked["-".join([*group, conversation])].append(list(prompt))
        text = "boom" if (conversation, turn) == ("1", "1") else "hm"
        ids = [*self._tokenizer(text)["input_ids"], self._tokenizer.eos_token_id]
        return Samples.from_lists([ids] * n, [[-0.1] * len(ids)] * n, [False] * n, self.version)


def test_conversations_go_on_turn_by_turn_and_what_was_sampled_is_what_is_trained_on(tokenizer, loop):
    env = LLMEnv(Turns(*ROWS), tokenizer, num_envs=2, repeats=3, max_turns=3, max_failed_fraction=1.0)
    engine = Speaks(tokenizer)
    weights = Weights(engine)
    collector = AsyncCollector(env, fleet_of(engine, loop), Sampling(max_new_tokens=20), 6, weights, max_staleness=1)
    groups = collector.collect()
    collector.shutdown()
    end = tokenizer.eos_token_id
    said = [*tokenizer("hm")["input_ids"], end]
    for group in groups:
        assert group.rewards.tolist() == [3.0, 3.0], "the one whose tool broke is dropped alone"
        for start, stop in itertools.pairwise(group.offsets.tolist()):
            ids, chosen = group.response_ids[start:stop], group.trainable[start:stop]
            assert ids[chosen].tolist() == said * 3 and ids[: len(said)].tolist() == said
            prompts = engine.asked[f"group-{group.group_id}-0-0"]
            # Each turn's prompt is what was there before, token for token, and what was heard.
            assert prompts[2][: len(prompts[1])] == prompts[1] and prompts[1][: len(prompts[0])] == prompts[0]
            assert prompts[2] == [*group.prompt_ids.tolist(), *ids.tolist()][: len(prompts[2])]
    assert env.guard.failed["error"] == 2


def test_tasks_of_one_turn_and_of_several_go_together_and_their_rewards_reach_the_curriculum(tokenizer, loop):
    class Says(CountA):
        rows = CountA.rows[:3]

        def score(self, row, response):
            return Reward({"a": float(response == "hm")})

    settings = {"num_envs": 2, "repeats": 3, "max_turns": 3, "max_failed_fraction": 1.0}
    envs = {
        "turns": LLMEnv(Turns(*ROWS), tokenizer, **settings),
        "says": LLMEnv(Says(), tokenizer, **settings, curriculum={"passing": 1.0, "rest": 100}),
    }
    env, engine = MixtureEnv(envs, {"turns": 1, "says": 1}, 4, 3), Speaks(tokenizer)
    weights = Weights(engine)
    collector = AsyncCollector(env, fleet_of(engine, loop), Sampling(max_new_tokens=20), 48, weights, max_staleness=0)
    out = list(itertools.chain.from_iterable(collections(collector, weights)))
    by_task = env.by_task([env.task.rows[group.row] for group in out])
    assert sorted(map(len, by_task.values()))[0] > 2 and len(out) == 16
    assert all(out[i].reward_parts["turns/turns"].tolist() == [3.0, 3.0] for i in by_task["turns"])
    assert all(out[i].reward_parts["says/a"].tolist() == [1.0] * 3 for i in by_task["says"])
    counts = env.metrics()
    assert counts["failed/turns"] == len(by_task["turns"]) and "failed/says" not in counts
    assert counts["curriculum/says/too_easy"] == 3 and counts["curriculum/says/whole_epochs"] > 0
