"""vLLM in a process of its own: responses live through updates, tokens know their weights, deaths are named."""

import asyncio
import os
import signal
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import loop_control
import pytest
import torch
from loop_control import LoopControl
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_rl.engines.base import EngineDeadError, Sampling
from grpo_rl.testing import save_tiny_model
from grpo_rl.weights.push import WeightSync, merged_weights
from grpo_rl.weights.shared_memory import SharedMemoryTransport
from tests.engines.test_contract import expected_log_probs
from tests.helpers import left_if_killed

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7], [9, 8], list(range(10, 60)), [100]]
LONG = Sampling(max_new_tokens=300, min_new_tokens=300)
DIGITS = tuple("0123456789")


class Served:
    """An engine on an event loop in a thread, as a trainer has it."""

    def __init__(self, control):
        self.engine, self.loop, self.start = control._engine, control._loop, control._loop.start
        self.transport = SharedMemoryTransport([control], bucket_bytes=1 << 16, deadline_s=self.engine.deadline_s)

    def wait_for_tokens(self, count):
        """Waits until every response under way has so many tokens."""
        states = self.engine._llm.output_processor.request_states
        end = time.monotonic() + 60
        while not states or any(state.detokenizer.num_output_tokens() < count for state in list(states.values())):
            assert time.monotonic() < end
            time.sleep(0.002)


@contextmanager
def served_engine(folder, **settings):
    from grpo_rl.engines.vllm.asynchronous import AsyncVLLMEngine

    engine = AsyncVLLMEngine(folder, max_model_len=400, name="engine 0", **settings)
    with loop_control.served(engine) as control, closing((made := Served(control)).transport):
        yield made


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [save_tiny_model(tmp_path_factory.mktemp(f"model{seed}"), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def served(folders):
    with served_engine(folders[0], sampling=Sampling(stop=DIGITS)) as made:  # with a tokenizer, otherwise as without
        yield made


@pytest.mark.nightly
def test_its_process_leaves_nothing_in_shared_memory_if_it_is_killed(served):
    assert [left_if_killed(pid) for pid in served.engine.pids] == [set()]


def models(folders):
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for folder in folders]


@pytest.mark.nightly
def test_answers_live_through_an_update_and_every_token_is_of_the_weights_it_says(served, folders):
    old, new = models(folders)
    sync = WeightSync(old, served.transport, served.engine.version)
    first = sync.push()
    answers = [served.start(served.engine.generate(f"long {i}", p, 2, LONG)) for i, p in enumerate(PROMPTS)]
    served.wait_for_tokens(40)
    sync = WeightSync(new, served.transport, first)
    second = sync.push()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        samples = answer.result(60)
        assert samples.version == second and samples.offsets.tolist() == [0, 300, 600]  # whole, none lost
        for response, said, versions in zip(
            samples.responses, samples.log_probs.split(300), samples.versions.split(300), strict=True
        ):
            switch = int((versions == first).sum())
            assert 40 <= switch < 300 and versions.tolist() == [first] * switch + [second] * (300 - switch)
            by_old, by_new = (expected_log_probs(model, prompt, response) for model in (old, new))
            assert (said - by_old)[:switch].abs().max() < 0.1 < (said - by_old)[switch:].abs().mean()
            assert (said - by_new)[switch:].abs().max() < 0.1 < (said - by_new)[:switch].abs().mean()
            # A switch that is off by a token would be seen: on either side of it the two differ.
            assert (by_old - by_new)[switch - 3 : switch + 3].abs().max() > 0.2


class Overtaken(LoopControl):
    """Every other part of an update comes after the one behind it, as calls over Ray may."""

    def submit(self, method, *args):
        if method != "update_weights" or args[0]["number"] % 2:
            return super().submit(method, *args)

        async def late():
            await asyncio.sleep(0.05)
            await self._engine.update_weights(*args)

        return self._loop.start(late())


@pytest.mark.nightly
def test_parts_of_an_update_that_overtake_each_other_are_taken_in_their_order(served, folders):
    for version, model in enumerate(models(folders), served.engine.version + 1):
        transport = SharedMemoryTransport([Overtaken(served.engine, served.loop)], bucket_bytes=1 << 15)
        sync = WeightSync(model, transport, version - 1)
        assert sync.push() == version
        sync.verify()
        transport.close()


@pytest.mark.nightly
def test_ids_go_on_where_they_were_and_what_comes_in_a_pause_is_answered_after_it(served, folders):
    old, new = models(folders)
    greedy = Sampling(temperature=0.0, max_new_tokens=200, min_new_tokens=200)
    version = WeightSync(old, served.transport, served.engine.version).push()
    alone = served.start(served.engine.generate("alone", PROMPTS[0], 1, greedy)).result(60)
    through = served.start(served.engine.generate("through", PROMPTS[0], 1, greedy))
    served.wait_for_tokens(20)
    served.start(served.engine.pause()).result(60)
    state = next(iter(served.engine._llm.output_processor.request_states.values()))
    tokens = state.detokenizer.num_output_tokens()
    late = served.start(served.engine.generate("late", PROMPTS[1], 1, LONG))
    time.sleep(0.3)
    assert state.detokenizer.num_output_tokens() == tokens and not late.done()
    WeightSync(new, served.transport, version).push()
    samples = through.result(60)
    switch = int((samples.versions == version).sum())
    assert switch == tokens
    assert torch.equal(samples.response_ids[:switch], alone.response_ids[:switch])
    assert set(late.result(60).versions.tolist()) == {version + 1}


@pytest.mark.nightly
def test_a_response_that_a_stop_string_ends_has_versions_and_kept_sets_of_all_its_tokens(served, folders):
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    sampling = Sampling(temperature=2.0, top_k=200, stop=DIGITS, max_new_tokens=300)
    samples = served.start(served.engine.generate("stops", PROMPTS[0], 8, sampling)).result(60)
    assert len(samples.versions) == len(samples.kept.counts) == len(samples.response_ids)
    sets = samples.kept.ids.split(samples.kept.counts.tolist())
    assert all(token in kept for token, kept in zip(samples.response_ids, sets, strict=True))
    assert {len(kept) for kept in sets} <= {200, 201, 202, 203} and not samples.truncated.all()
    for response, truncated in zip(samples.responses, samples.truncated.tolist(), strict=True):
        text = tokenizer.decode(response, skip_special_tokens=True)
        assert not set(text[:-1]) & set(DIGITS)
        assert truncated == (text[-1:] not in DIGITS and response[-1] != tokenizer.eos_token_id)


@pytest.mark.nightly
def test_with_the_cache_kept_what_is_asked_for_in_a_pause_reads_nothing_that_older_weights_made(
    served, folders, monkeypatch
):
    old, new = models(folders)
    prompt = list(range(10, 210))  # six of vLLM's blocks, and a rest
    short = Sampling(max_new_tokens=20, min_new_tokens=20)
    monkeypatch.setattr(served.engine, "_keep_cache", True)  # vLLM's process is the same without it
    first = WeightSync(old, served.transport, served.engine.version).push()
    served.start(served.engine.generate("fills the cache", prompt, 1, short)).result(60)
    served.start(served.engine.pause()).result(60)
    within = served.start(served.engine.generate("within", prompt, 1, short))
    time.sleep(0.3)
    assert WeightSync(new, served.transport, first).push() == first + 1
    after = served.start(served.engine.generate("after", prompt, 1, short))
    for answer in (within, after):
        samples = answer.result(60)
        assert set(samples.versions.tolist()) == {first + 1}
        by_new = expected_log_probs(new, prompt, samples.response_ids)
        assert (samples.log_probs - by_new).abs().max() < 0.1


def test_an_engine_that_hangs_is_killed_before_its_fleet_gives_up():
    from grpo_rl.cluster.engine_actors import CLOSE_S
    from grpo_rl.engines.vllm.asynchronous import AsyncVLLMEngine

    waits = []
    for deadline_s in (120.0, 3.0):
        engine = object.__new__(AsyncVLLMEngine)
        engine._llm, engine.deadline_s = SimpleNamespace(shutdown=waits.append), deadline_s
        asyncio.run(engine.close())
    assert waits == [10.0, 3.0] and max(waits) < CLOSE_S


@pytest.mark.nightly
def test_an_aborted_request_says_so_and_the_others_go_on(served):
    one, other = (served.start(served.engine.generate(name, PROMPTS[0], 2, LONG)) for name in ("one", "other"))
    served.wait_for_tokens(10)
    served.start(served.engine._core.abort("one")).result(60)
    with pytest.raises(RuntimeError, match="one was aborted on engine 0"):
        one.result(60)
    assert len(other.result(60).response_ids) == 600


@pytest.mark.nightly
def test_adapters_alone_are_pushed_in_the_middle_of_an_answer(folders):
    pytest.importorskip("peft")
    from grpo_rl.policies.loading import target_names
    from grpo_rl.policies.lora import LoRA
    from grpo_rl.policies.policy import TrainPolicy
    from tests.weights.test_sources import randomize

    lora = LoRA(rank=4, alpha=8, targets=["q_proj", "v_proj", "down_proj"])
    policy = TrainPolicy.load(folders[0], torch.bfloat16, lora=lora)

    with served_engine(folders[0], adapter_rank=4, adapter_targets=target_names(folders[0], lora)) as served:
        sync = WeightSync(policy.model, served.transport)
        sync.push()
        answer = served.start(served.engine.generate("long", PROMPTS[0], 1, LONG))
        served.wait_for_tokens(40)
        randomize(policy, seed=1)
        sync.push()
        assert served.transport.sent_bytes == 2 * sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
        sync.verify()
        samples = answer.result(60)
        switch = int((samples.versions == 1).sum())
        assert 40 <= switch < 300 and samples.versions.tolist() == [1] * switch + [2] * (300 - switch)
        merged = models(folders)[0]
        merged.load_state_dict({n: w.to(torch.bfloat16) for n, w in merged_weights(policy.model)}, strict=False)
        by_new = expected_log_probs(merged, PROMPTS[0], samples.response_ids)
        assert (samples.log_probs - by_new)[switch:].abs().max() < 0.1
        assert (samples.log_probs - by_new)[:switch].abs().mean() > 0.1


@pytest.mark.nightly
def test_an_engine_that_hangs_and_one_that_dies_are_named_within_the_deadline(served, folders):
    """Kills the engine that the tests share: it has to stay the last one here."""
    served.engine.deadline_s = served.transport.deadline_s = 3.0
    (pid,) = served.engine.pids
    sync = WeightSync(models(folders)[0], served.transport, served.engine.version)
    sync.push()
    answer = served.start(served.engine.generate("hangs", PROMPTS[0], 1, LONG))
    served.wait_for_tokens(10)
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"engine 0 \(process {pid}\) did not answer a health check within 3 s"):
        answer.result(60)
    assert time.monotonic() - start < 2 * 3.0 + 1
    with pytest.raises(EngineDeadError, match="engine 0 .*did not answer .*within 3 s"):
        sync.push()
    os.kill(pid, signal.SIGCONT)
    answer = served.start(served.engine.generate("dies", PROMPTS[0], 1, LONG))
    served.start(served.engine.resume()).result(10)
    served.wait_for_tokens(10)
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"engine 0 \(process {pid}\) died"):
        answer.result(60)
    with pytest.raises(EngineDeadError, match=rf"engine 0 \(process {pid}\) died during .*a pause for new weights"):
        sync.push()
    assert time.monotonic() - start < 3.0
