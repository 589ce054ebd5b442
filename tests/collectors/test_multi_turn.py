"""Conversations advance one by one; what was sampled is trained on as it was; a failing one is dropped alone."""

import time
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from grpo_rl.collectors.engine_policy import EnginePolicy, write
from grpo_rl.collectors.groups import group_of_trajectories, trajectory_of
from grpo_rl.collectors.sync import SyncCollector
from grpo_rl.data import keys
from grpo_rl.data.group import NO_ROUTE, Trajectory
from grpo_rl.engines.base import Samples, Sampling
from grpo_rl.envs.base import LLMEnv, Reward, ScoreError, Task
from grpo_rl.testing import ScriptedEngine
from tests.engines.test_contract import engine_of

SAMPLING = Sampling(max_new_tokens=8)


class Echo(Task):
    """Row: how the world answers "q". The conversation is worth the number of its replies."""

    reward_parts = ("replies",)

    def __init__(self, *rows: dict) -> None:
        self.rows = list(rows)

    def prompt(self, row):
        return [{"role": "user", "content": row.get("prompt", "p")}]

    def reply(self, row, messages):
        text = messages[-1]["content"]
        if text == "boom":
            raise OSError("the tool is broken")
        if text.startswith("slow"):
            time.sleep(row["seconds"])
        return None if text == "end" else [{"role": "user", "content": f"[{text}]"}]

    def score(self, row, response):
        raise AssertionError("conversations are judged whole")

    def score_dialog(self, row, messages):
        return Reward({"replies": sum(message["role"] == "user" for message in messages) - 1.0})


class Recording(ScriptedEngine):
    def __init__(self, script, **settings):
        super().__init__(script, **settings)
        self.seen, self.calls = [], []

    def generate(self, prompts, n, sampling):
        self.calls.append((time.monotonic(), n * len(prompts)))
        self.seen += [(list(prompt), sampling.max_new_tokens) for prompt in prompts]
        return super().generate(prompts, n, sampling)


def collector(tokenizer, task, turns, repeats=2, max_turns=4, deadline_s=60.0, failed=1.0, max_model_len=1000):
    """A collector whose engine says ``turns[g]`` one after the other in conversation g, each ended."""
    guard = {"score_timeout_s": deadline_s, "max_failed_fraction": failed}
    env = LLMEnv(task, tokenizer, 1, repeats, max_turns=max_turns, **guard)
    end = tokenizer.eos_token_id
    started: dict[tuple, int] = {}
    queues = [iter(turn) for turn in turns]
    order = iter(range(len(turns)))

    def script(prompt, g):
        # A conversation is known again by what it has seen of its own first response; a new one takes the next script.
        mine = next((started[key] for key in started if tuple(prompt[: len(key)]) == key), None)
        if mine is None:
            mine = next(order)
        said = next(queues[mine])
        response = [*tokenizer(said.removesuffix("…"))["input_ids"], *([] if said.endswith("…") else [end])]
        if mine not in started.values():
            started[(*prompt, *response)] = mine
        return response

    engine = Recording(script, max_model_len=max_model_len)
    return SyncCollector(env, EnginePolicy(engine, SAMPLING), total_dialog_turns=1000), engine, env


def test_the_engine_sees_what_is_trained_on_and_replies_are_not_trained_on(tokenizer):
    collect, engine, _ = collector(tokenizer, Echo({}), [["ab", "c", "end"], ["xyz", "end"]])
    (group,) = collect.collect()
    first, second = (tokenizer.decode(ids) for ids in group.responses)
    assert (first, second) == ("ab<end>[ab]<end>>c<end>[c]<end>>end<end>", "xyz<end>[xyz]<end>>end<end>")
    masks = group.trainable.split(group.lengths.tolist())
    chosen = [tokenizer.decode(ids[mask]) for ids, mask in zip(group.responses, masks, strict=True)]
    assert chosen == ["ab<end>c<end>end<end>", "xyz<end>end<end>"]
    assert group.rewards.tolist() == [2.0, 1.0] and not group.truncated.any()
    prompts = [prompt for prompt, _ in engine.seen]
    whole = [[*group.prompt_ids.tolist(), *ids.tolist()] for ids in group.responses]
    assert len(prompts) == 5 and all(any(w[: len(p)] == p for w in whole) for p in prompts)
    assert group.log_probs[~group.trainable].eq(0).all() and len(group.versions) == len(group.response_ids)


def test_turns_and_tokens_are_bounded(tokenizer):
    collect, _, _ = collector(tokenizer, Echo({}), [["a"] * 9, ["b…" + "b" * 20] * 9], max_turns=3)
    (group,) = collect.collect()
    # Three turns and two replies; and a turn that met max_new_tokens ends its conversation, without a reply.
    assert tokenizer.decode(group.responses[0]) == "a<end>[a]<end>>a<end>[a]<end>>a<end>"
    assert len(group.responses[1]) == SAMPLING.max_new_tokens
    assert group.truncated.tolist() == [False, True]


def test_a_conversation_ends_where_the_context_does(tokenizer):
    # Prompt "p<end>>" has 3 tokens, "a<end>" 2, a reply "[a]<end>>" 5.
    collect, engine, _ = collector(tokenizer, Echo({}), [["a"] * 9, ["end"]], max_model_len=12)
    (group,) = collect.collect()
    assert tokenizer.decode(group.responses[0]) == "a<end>[a]<end>>a<end>" and group.truncated.tolist() == [True, False]
    assert [room for _, room in engine.seen] == [8, 8, 2]


@pytest.mark.alone
def test_a_reply_that_fails_or_hangs_drops_its_conversation_alone(tokenizer):
    task = Echo({"seconds": 5})
    turns = [["boom"], ["slow"], ["a", "end"], ["end"]]
    collect, _, env = collector(tokenizer, task, turns, repeats=4, deadline_s=0.5)
    start = time.monotonic()
    (group,) = collect.collect()
    assert time.monotonic() - start < 4
    assert group.rewards.tolist() == [1.0, 0.0] and group.lengths.tolist() == [11, 4]
    assert env.guard.failed == {"error": 1, "timeout": 1}
    assert "Echo.reply failed on row 0, turn 1: OSError: the tool is broken" in env.guard.examples["error"]


def test_where_fewer_than_two_conversations_are_left_the_group_is_dropped_and_the_next_prompts_taken(tokenizer):
    turns = [["boom"], ["end"], ["a", "end"], ["end"]]
    collect, _, _ = collector(tokenizer, Echo({}, {"prompt": "q"}), turns)
    (group,) = collect.collect()
    assert group.rewards.tolist() == [1.0, 0.0] and collect.dropped_groups == 1 and collect.collected == 4


def test_too_many_broken_replies_stop_the_run(tokenizer):
    collect, _, _ = collector(tokenizer, Echo({}), [["boom"], ["end"]], failed=0.0)
    with pytest.raises(ScoreError, match="the tool is broken"):
        collect.collect()


@pytest.mark.slow
def test_a_slow_reply_holds_up_nobody_else(tokenizer):
    """One tool takes 2 s; the other conversations have had all their turns by then."""
    turns = [["slow", "end"], *[[f"{g}a", f"{g}b", "end"] for g in range(7)]]
    collect, engine, _ = collector(tokenizer, Echo({"seconds": 2.0}), turns, repeats=8)
    start = time.monotonic()
    (group,) = collect.collect()
    assert group.rewards.tolist() == [1.0, *[2.0] * 7]
    # First turns, second and third ones of the others, and the slow one's second, alone.
    times = [at for at, _ in engine.calls]
    assert times[-1] - start > 2.0 and all(at - start < 1.5 for at in times[:-1])


def test_turns_of_a_batch_do_not_depend_on_whose_reply_is_first(tokenizer):
    """A resumed run samples what it would have sampled, on a busy machine too."""
    turns = [["slow", "end"], ["a", "end"], ["b", "end"]]
    collect, engine, _ = collector(tokenizer, Echo({"seconds": 0.2}), turns, repeats=3)
    engine.in_rounds = True
    (group,) = collect.collect()
    assert group.rewards.tolist() == [1.0] * 3 and [responses for _, responses in engine.calls] == [3, 3]
    assert ["slow" in tokenizer.decode(ids) for ids, _ in engine.seen[1:]] == [True, False, False]


class Chatty(Echo):
    """Replies twice to whatever is said."""

    def reply(self, row, messages):
        return [{"role": "user", "content": f"and {len(messages)}?"}] if len(messages) < 5 else None


@pytest.mark.slow
def test_with_vllm_the_engine_sees_the_ids_that_are_trained_on_token_for_token(tiny_model, tokenizer):
    with engine_of("vllm", tiny_model, 256) as engine:
        computed: list[list[int]] = []
        add = engine._llm.llm_engine.add_request
        engine._llm.llm_engine.add_request = lambda i, prompt, params, **more: (
            computed.append(list(prompt["prompt_token_ids"])), add(i, prompt, params, **more)
        )  # fmt: skip
        env = LLMEnv(Chatty({}, {"prompt": "q"}), tokenizer, 2, 3, max_turns=4)
        # Turns that meet no limit of tokens: the tiny model rarely ends one by itself, so most conversations are cut.
        groups = SyncCollector(env, EnginePolicy(engine, Sampling(max_new_tokens=40)), total_dialog_turns=6).collect()
        assert not engine._llm.llm_engine.has_unfinished_requests()
    wholes = [[*g.prompt_ids.tolist(), *ids.tolist()] for g in groups for ids in g.responses]
    assert len(wholes) == 6 and len(computed) >= 6
    assert all(any(whole[: len(prompt)] == prompt for whole in wholes) for prompt in computed)
    for group in groups:
        assert group.log_probs[group.trainable].lt(0).any() and group.log_probs[~group.trainable].eq(0).all()


@pytest.mark.nightly
def test_aborted_requests_leave_vllm_and_the_engine_goes_on(tiny_model):
    with engine_of("vllm", tiny_model, 128) as engine:
        engine.submit(7, [5, 6, 7], Sampling(max_new_tokens=100, min_new_tokens=100))
        assert engine.step() == []
        engine.abort()
        assert not engine._llm.llm_engine.has_unfinished_requests() and engine.step() == []
        engine.submit(8, [5, 6, 7], Sampling(max_new_tokens=2, min_new_tokens=2))
        finished = []
        while not finished:
            finished = engine.step()
        ((request, samples),) = finished
        assert request == 8 and len(samples.response_ids) == 2 and samples.truncated.tolist() == [True]


def test_a_conversations_routes_are_those_of_its_last_turn_which_read_all_before_it():
    def samples(ids, prompt_routes):
        one = Samples.from_lists([ids], [[0.0] * len(ids)], [False], 0)
        own = torch.full((len(ids), 1, 1), 7, dtype=torch.int8)
        own[-1] = NO_ROUTE
        return replace(one, routes=own, prompt_routes=torch.tensor(prompt_routes, dtype=torch.int8).view(-1, 1, 1))

    def turn(prompt, ids, prompt_routes):
        row = TensorDict({keys.TOKENS_PROMPT: torch.tensor(prompt), "next": TensorDict({})})
        write([row], samples(ids, prompt_routes), 100)
        return row

    first = trajectory_of([turn([1, 2], [5, 6], [0, 1]), turn([1, 2, 5, 6, 8], [9, 9], [0, 1, 2, 3, 4])])
    second = trajectory_of([turn([1, 2], [5, 6], [0, 1])])
    second.read(torch.tensor([8]))  # which the policy never read
    group = group_of_trajectories(0, 0, torch.tensor([1, 2]), [first, second])
    assert group.prompt_routes.flatten().tolist() == [0, 1]
    assert group.routes.flatten().tolist() == [2, 3, 4, 7, NO_ROUTE, 7, NO_ROUTE, NO_ROUTE]


def test_a_reply_has_no_kept_sets_between_those_of_two_turns():
    def conversation(*turns):
        trajectory = Trajectory()
        for turn in turns:
            trajectory.sampled(turn.response_ids, turn.log_probs, turn.versions, turn.kept)
            trajectory.read(torch.tensor([8, 9]))
        return trajectory

    cut = Samples.from_lists([[5, 6]], [[-0.5, -0.1]], [False], 3, [[[5, 7], [6]]])
    whole = Samples.from_lists([[4]], [[-1.0]], [False], 3)
    prompt = 0, 0, torch.tensor([1])
    group = group_of_trajectories(*prompt, [conversation(cut, cut), conversation(whole)])
    assert group.kept_ids.tolist() == [5, 7, 6, 5, 7, 6]
    assert group.kept_counts.tolist() == [2, 1, 0, 0, 2, 1, 0, 0] + [0, 0, 0]
    assert group_of_trajectories(*prompt, [conversation(whole)] * 2).kept is None
