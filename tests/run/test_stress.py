"""Hostile rewards and odd batches through the real policy, loss and optimizer: all that is written is finite."""

import gc
import math
import os
import threading
from dataclasses import replace
from itertools import pairwise, product
from statistics import median

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM

from grpo_rl.data.advantages import AdvantageEstimator
from grpo_rl.data.batching import MicroBatching
from grpo_rl.data.buffer import GroupBuffer
from grpo_rl.data.group import Group
from grpo_rl.engines.base import Sampling
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.monitor.step_record import StepRecord
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import ScriptedEngine, random_group
from grpo_rl.training.micro_batches import WithinMemory, scored_micro_batches
from grpo_rl.training.optimizer import PolicyOptimizer

END = 0
"""The tiny model's end of sequence, which is its padding too."""
LOSSES = {"grpo": {}, "gspo": {"ratio": "sequence"}}
LOSSES |= {name: {"surrogate": name} for name in ("cispo", "sapo", "plain")}


def train(policy, optimizer, groups, advantage="zscore", loss=None, **batching):
    """One optimizer step on all groups; its result and the sum of the losses."""
    buffer, loss, total = GroupBuffer(len(groups), len(groups)), loss or GRPOLoss(), 0.0
    buffer.extend(AdvantageEstimator(advantage)(groups))
    for batch in buffer.batches():
        for tokens in scored_micro_batches(policy, batch, MicroBatching(**{"max_tokens": 64, **batching})):
            losses = loss(tokens)
            summed = losses["loss"]
            summed.backward()
            total += summed.item()
    return optimizer.step(math.isfinite(total)), total


# ---- odd batches: gradients against a plain forward pass of each response by itself ----


def plain_gradients(model, groups, rewards_to_advantages):
    """Gradients of the on-policy loss -sum w A log pi, by transformers' own attention, a response at a time."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    responses = sum(group.size for group in groups)
    for group in groups:
        for ids, advantage in zip(group.responses, rewards_to_advantages(group.rewards), strict=True):
            if not len(ids):
                continue
            prompt = len(group.prompt_ids)
            full = torch.cat([group.prompt_ids, ids])[None]
            log_probs = plain(full, attention_mask=torch.ones_like(full)).logits[0, prompt - 1 : -1].log_softmax(-1)
            chosen = log_probs.gather(1, ids[:, None])
            (-advantage * chosen.mean() / responses).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def no_std(rewards):
    return rewards - rewards.mean()


def our_gradients(model, groups, loss):
    policy = TrainPolicy.load(model, torch.float32)
    with torch.no_grad():
        groups = [replace(g, log_probs=policy.score([g])[0]) for g in groups]
    groups = [g.with_advantages(no_std(g.rewards)) for g in groups]
    for tokens in scored_micro_batches(policy, groups, MicroBatching(4096)):
        losses = loss(tokens)
        losses["loss"].backward()
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


def ending(group: Group) -> Group:
    """The same with an end of sequence as the last token of every response."""
    ids = group.response_ids.clone()
    ids[group.offsets[1:] - 1] = END
    return replace(group, response_ids=ids)


ENDED = ending(random_group(prompt=5, lengths=[3, 1, 4], vocab=257, rewards=[0.0, 1.0, 5.0]))
ODD = {
    "one-token responses": [random_group(lengths=[1, 1, 1], vocab=257, rewards=[0.0, 1.0, 2.0])],
    # An end of sequence inside the prompt, too: a mask made by comparing with the padding would hide both.
    "pad is eos": [replace(ENDED, prompt_ids=ENDED.prompt_ids.index_fill(0, torch.tensor([0, 2]), END))],
    "very long responses": [random_group(lengths=[1500, 2, 700], vocab=257, rewards=[0.0, 1.0, 3.0])],
    "empty responses": [
        random_group(lengths=[0, 3, 0, 2], vocab=257, rewards=[1.0, 0.0, 0.0, 2.0]),
        random_group(lengths=[0, 0], vocab=257, rewards=[0.0, 1.0], group_id=1),
    ],
}
"""Batches that have broken trainers, with rewards that differ."""


@pytest.mark.parametrize("kind", ODD)
def test_gradients_of_odd_batches_equal_those_of_plain_forward_passes(tiny_model, kind):
    groups = ODD[kind]
    ours, plain = our_gradients(tiny_model, groups, GRPOLoss()), plain_gradients(tiny_model, groups, no_std)
    assert ours.keys() == plain.keys()
    for name in plain:
        scale = plain[name].abs().max().item()
        torch.testing.assert_close(ours[name], plain[name], rtol=0, atol=1e-4 * scale)


def masked(group: Group) -> Group:
    return replace(group, trainable=torch.zeros_like(group.trainable))


@pytest.mark.cases(10)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("groups", "batching"),
    [
        pytest.param([masked(random_group(lengths=[3, 2]))], {}, id="all masked"),
        pytest.param([replace(random_group(lengths=[3, 2]), truncated=torch.tensor([True, True]))],
                     {"mask_truncated": True}, id="all truncated and left out"),
        pytest.param([random_group(lengths=[0, 0])], {}, id="all empty"),
        pytest.param([random_group(lengths=[3, 2], rewards=[0.7, 0.7]), random_group(lengths=[1, 4], rewards=[0.1, 0.1],
                     group_id=1)], {}, id="zero variance"),
        pytest.param([random_group(lengths=[3, 2], rewards=[0.7, 0.7])], {"skip_zero_advantage": True}, id="skipped"),
    ],
)  # fmt: skip
def test_a_batch_without_anything_to_learn_from_changes_no_bit(tiny_model, groups, batching, loss):
    policy = TrainPolicy.load(tiny_model, torch.bfloat16)
    optimizer = PolicyOptimizer(policy.model, lr=1e-2)
    before = [p.clone() for p in policy.model.parameters()]
    result, total = train(policy, optimizer, groups, loss=GRPOLoss(**LOSSES[loss]), **batching)
    assert total == 0 and result.grad_norm == 0 and optimizer.bad_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))


def test_log_ratios_of_a_bf16_policy_are_fp32(tiny_model):
    policy, group = TrainPolicy.load(tiny_model, torch.bfloat16), random_group(lengths=[3, 2], vocab=257)
    with torch.no_grad():
        group = replace(group, log_probs=policy.score([group])[0] - 1e-4).with_advantages(torch.tensor([1.0, -1.0]))
    (tokens,) = scored_micro_batches(policy, [group], MicroBatching(4096))
    # Log-probabilities around -5 are 0.03 apart in bf16, and 5e-7 in fp32.
    assert tokens["log_prob"].dtype == torch.float32
    torch.testing.assert_close(GRPOLoss().terms(tokens)["log_ratio"], torch.full((5,), 1e-4), rtol=0, atol=2e-6)


# ---- a long run does not creep ----


@pytest.fixture
def frozen():
    """Objects of earlier tests are frozen: `gc.get_objects` skips them, so freeing them changes no count."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def held():
    """Counts of what this process holds: objects and tensors since `frozen`; all open files and threads."""
    gc.collect()
    objects = gc.get_objects()
    return {
        "objects": len(objects),
        # Fake tensors, which compiling leaves behind in this process, hold no memory.
        "tensors": sum(isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) for x in objects),
        "files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "threads": threading.active_count(),
    }


WINDOW = 10
"""Steps from one count to the next."""


# Behind many other tests in one process the count of objects fell by 97 in each window; the cause was not found.
@pytest.mark.alone
@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("leak", [None, "tensors"])
def test_200_steps_hold_no_more_than_50(tiny_model, leak, tmp_path):
    policy, kept = TrainPolicy.load(tiny_model, torch.bfloat16), []
    optimizer, loss, metrics = PolicyOptimizer(policy.model, lr=1e-4), GRPOLoss(), MetricsLog(tmp_path)
    engine = ScriptedEngine(lambda prompt, g: [5, 6, END][g:])
    within, counts = WithinMemory(policy, MicroBatching(64), optimizer.clear_gradients), []
    last = 100 if leak else 200  # a leak is seen as well in fewer steps
    for step in range(1, last + 1):
        if step >= 50 and step % WINDOW == 0:
            counts.append(held())
        record = StepRecord()
        (samples,) = engine.generate([[3, 4, 5]], 2, Sampling())
        group = random_group(prompt=3, lengths=samples.offsets.diff().tolist(), vocab=257, group_id=step, seed=step)
        buffer = GroupBuffer(1, 1)
        buffer.extend(AdvantageEstimator("no_std")([replace(group, rewards=torch.tensor([0.0, 1.0]))]))
        for batch in buffer.batches():
            record.begin(batch)
            for micro_batch in within.micro_batches(batch, print):
                with micro_batch as tokens:
                    losses = loss(tokens)
                    losses["loss"].backward()
                    record.add(tokens, losses)
            record.complete()
            record.add_result(optimizer.step(record.loss_is_finite))
        metrics.log(step, record.metrics(sampled_tokens=5, step_s=1.0))
        if leak:
            kept.append(torch.ones(3))
    # Caches of libraries and threads of earlier tests change the counts in a few windows only; a leak adds to most: one
    # object or more every second step is found.
    grown = {name: median(b[name] - a[name] for a, b in pairwise(counts)) for name in counts[0]}
    bound = WINDOW / 2
    assert (grown["objects"] >= bound) == bool(leak), (grown, counts)
    assert (grown["tensors"] >= bound) == bool(leak), (grown, counts)
    for name in ("files", "threads"):
        first, last = ([count[name] for count in part] for part in (counts[:3], counts[-3:]))
        assert min(last) <= max(first), counts


REWARDS = (
    [1e30, -1e30, 1e30, -1e30],
    [1e-30, 0.0, 2e-30, 1e-38],
    [1.0, 1.0, 1.0, 1.0],
    [1.0, -1.0, 1.0, -1.0],
    [1e30, 0.0, 0.0, 0.0],
    [-1e30, -1e30, -1e30, -1e30],
)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_steps_of_hostile_rewards_never_write_what_is_not_finite(tiny_model, dtype):
    torch.manual_seed(0)
    policy, taken = TrainPolicy.load(tiny_model, dtype), []
    optimizer = PolicyOptimizer(policy.model, lr=1e-2, max_bad_steps=1000)
    start = [p.clone() for p in policy.model.parameters()]
    for step, (advantage, rewards) in enumerate(5 * list(product(("zscore", "no_std"), REWARDS))):
        group = random_group(prompt=6, lengths=[4, 1, 0, 7], vocab=257, group_id=step, seed=step)
        with torch.no_grad():
            group = replace(group, rewards=torch.tensor(rewards), log_probs=policy.score([group])[0])
        result, _ = train(policy, optimizer, [group], advantage)
        taken.append(not result.skipped)
        state = optimizer.state_dict()
        moments = [x for of_weight in state["optimizer"]["state"].values() for x in of_weight.values()]
        written = [*policy.model.parameters(), *state["masters"].values(), *moments]
        assert all(x.isfinite().all() for x in written), f"step {step}"
    assert any(taken) and not all(taken)  # without a std, advantages of 1e30 have gradients that are beyond fp32
    assert not any(torch.equal(a, b) for a, b in zip(start, policy.model.parameters(), strict=True))
