"""Memory that runs out, injected into scoring and into the backward pass: the step begins again, with its gradient."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_rl.data.batching import MicroBatching
from grpo_rl.engines.base import OutOfMemoryError, Sampling, is_out_of_memory
from grpo_rl.engines.transformers import TransformersEngine
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.policies.lora import LoRA
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.policies.routing import router_record
from grpo_rl.testing import random_group
from grpo_rl.training.micro_batches import WithinMemory, _RanOut, scored_micro_batches
from grpo_rl.training.optimizer import PolicyOptimizer
from tests.helpers import of_two_ranks

pytestmark = pytest.mark.slow

GROUPS = [
    replace(
        random_group(prompt=4, lengths=[3, 5, 2, 6], vocab=257, group_id=i, seed=i),
        advantages=torch.tensor([1.0, -0.5, 0.25, -0.75]),
    )
    for i in range(4)
]
"""Four groups of 20 tokens: a prompt of 4 and responses of 16."""


class Breaks(torch.autograd.Function):
    """The tokens' log-probabilities; going back through them takes more memory than there is."""

    @staticmethod
    def forward(ctx, log_prob):
        return log_prob.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Small(TrainPolicy):
    """A policy on a machine that has room for so many tokens in a forward, or a backward, pass."""

    room = room_back = 10**6

    def score(self, groups):
        tokens = sum(group.num_tokens for group in groups)
        if tokens > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        log_prob, entropy = super().score(groups)
        return (Breaks.apply(log_prob) if tokens > self.room_back else log_prob), entropy


def trained(model, max_tokens, dtype=torch.float32, count=None, **room):
    """The gradients of a step by WithinMemory, what it said, and what it trains with afterwards."""
    policy = Small.load(model, dtype)
    vars(policy).update(room)
    optimizer, loss, said, summed = PolicyOptimizer(policy.model, mixed_precision=True), GRPOLoss(), [], []
    within = WithinMemory(policy, MicroBatching(max_tokens, count), optimizer.clear_gradients)

    def began_again(why):
        said.append(why)
        summed.clear()

    for micro_batch in within.micro_batches(GROUPS, began_again):
        with micro_batch as tokens:
            losses = loss(tokens)
            losses["loss"].backward()
            summed.append(losses["loss"].item())
    return [master.grad.clone() for master in optimizer._masters], said, within, sum(summed)


def plain(model, max_tokens, dtype=torch.float32):
    """The gradients of a step in which nothing looks after memory."""
    policy, loss = TrainPolicy.load(model, dtype), GRPOLoss()
    optimizer = PolicyOptimizer(policy.model, mixed_precision=True)
    for tokens in scored_micro_batches(policy, GROUPS, MicroBatching(max_tokens)):
        loss(tokens)["loss"].backward()
    return [master.grad.clone() for master in optimizer._masters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_fits_has_the_same_gradient_to_the_bit(tiny_model, dtype):
    ours, said, _, _ = trained(tiny_model, 40, dtype)
    assert said == [] and all(map(torch.equal, ours, plain(tiny_model, 40, dtype)))


@pytest.mark.cases(2)
@pytest.mark.parametrize("place", ["room", "room_back"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_began_again_has_the_gradient_of_the_smaller_split_to_the_bit(tiny_model, place, dtype):
    ours, said, within, loss = trained(tiny_model, 80, dtype, **{place: 40})
    assert len(said) == 1 and "4 groups and 80 tokens" in said[0] and "micro-batches of 40" in said[0]
    assert "Tried to allocate 2.00 GiB" in said[0]
    assert within.batching.max_tokens == 40
    assert all(map(torch.equal, ours, plain(tiny_model, 40, dtype)))
    if dtype is torch.float32:  # and that of the whole, to rounding
        whole, _, _, loss_of_whole = trained(tiny_model, 80)
        assert loss == pytest.approx(loss_of_whole, abs=1e-6)
        for a, b in zip(ours, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_step_that_began_again_draws_the_same_dropout(tiny_model):
    def gradients(**room):
        policy = Small.load(tiny_model, torch.float32, lora=LoRA(rank=2, dropout=0.5))
        vars(policy).update(room)
        torch.nn.init.ones_(next(p for n, p in policy.model.named_parameters() if "_B" in n))
        torch.manual_seed(3)
        within = WithinMemory(policy, MicroBatching(80 if room else 40), policy.model.zero_grad)
        for micro_batch in within.micro_batches(GROUPS, lambda why: None):
            with micro_batch as tokens:
                GRPOLoss()(tokens)["loss"].backward()
        return [param.grad for param in policy.model.parameters() if param.requires_grad]

    ours, plain = gradients(room_back=40), gradients()
    assert all(map(torch.equal, ours, plain)) and any(grad.any() for grad in ours)


def test_it_halves_until_it_fits_and_keeps_the_size(tiny_model):
    _, said, within, _ = trained(tiny_model, 1000, room=20)
    assert [text.partition("micro-batches of ")[2].split()[0] for text in said] == ["40", "20"]
    assert within.max_tokens == within.batching.max_tokens == 20, "the size that fits is the one that scoring uses"
    again = []
    for micro_batch in within.micro_batches(GROUPS, again.append):
        with micro_batch as tokens:
            GRPOLoss()(tokens)["loss"].backward()
    assert again == []


def test_a_given_number_of_micro_batches_gives_way_and_the_advice_says_so(tiny_model):
    _, said, within, _ = trained(tiny_model, 30, count=1, room=40)
    assert len(said) == 1 and (within.batching.count, within.batching.max_tokens) == (None, 40)
    assert within.max_tokens == 30, "scoring must not take more memory than before"
    assert "train.micro_batch_tokens=40 and train.gradient_accumulation_steps=null saves the attempt" in said[0]
    # With what was advised memory does not run out; with the number still set, the size would count for nothing.
    assert trained(tiny_model, 40, count=None, room=40)[1] == [] != trained(tiny_model, 40, count=1, room=40)[1]
    _, said, _, _ = trained(tiny_model, 80, room=40)
    assert "accumulation" not in said[0]


def test_the_size_is_kept_in_a_checkpoint_unless_another_was_configured_since(tiny_model):
    policy = TrainPolicy.load(tiny_model, torch.float32)

    def restored(state, max_tokens, count=None):
        within = WithinMemory(policy, MicroBatching(max_tokens, count), lambda: None)
        within.restore(state)
        return within.batching.max_tokens, within.batching.count

    _, _, within, _ = trained(tiny_model, 80, count=1, room=40)
    state = json.loads(json.dumps(within.state()))
    assert restored(state, 80, 1) == (40, None)
    assert restored(state, 60, 1) == (60, 1) and restored(state, 80) == (80, None)
    assert restored(WithinMemory(policy, MicroBatching(80), lambda: None).state(), 80) == (80, None)


def test_routers_count_only_what_was_trained_on(tmp_path):
    config = Qwen3MoeConfig(
        vocab_size=257, hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "mixture")

    def counted(room_back, max_tokens):
        policy = Small.load(tmp_path / "mixture", torch.float32)
        within, record = WithinMemory(policy, MicroBatching(max_tokens), lambda: None), router_record(policy.model)
        for groups, policy.room_back in ((GROUPS[:2], 10**6), (GROUPS, room_back)):  # two steps of one collection
            for micro_batch in within.micro_batches(groups, lambda why: None):
                with micro_batch as tokens:
                    GRPOLoss()(tokens)["loss"].backward()
        return record.take()

    ours, plain = counted(room_back=20, max_tokens=40), counted(room_back=10**6, max_tokens=40)
    assert sorted(ours) == [0, 1]
    for layer in ours:
        tokens = 6 * 20  # two groups, then four
        assert ours[layer][4] == plain[layer][4] == tokens and ours[layer][:4].sum() == 2 * tokens


def test_a_group_that_does_not_fit_alone_ends_the_run_with_its_tokens(tiny_model):
    with pytest.raises(OutOfMemoryError, match="group 0 with its 20 tokens does not fit into memory alone"):
        trained(tiny_model, 80, room=19)


def step_of_two_ranks(model, max_tokens, room=10**6):
    """The gradients of both ranks of a step, what they said, and the groups that each scored; one has little room."""
    policies = [Small.load(model, torch.float32) for _ in range(2)]

    def train(peers):
        policy, said, scored, cleared, gather = policies[peers.rank], [], [], [], peers.gather
        policy.peers, policy.room = peers, room if peers.rank else 10**6
        optimizer = PolicyOptimizer(policy.model)

        def clear():
            cleared.append(True)
            optimizer.clear_gradients()

        def gather_when_cleared(mine):
            # It makes room before it tells the others, which takes memory, too.
            assert cleared or not isinstance(mine, _RanOut)
            return gather(mine)

        peers.device, peers.gather = torch.device("cpu"), gather_when_cleared
        for micro_batch in WithinMemory(policy, MicroBatching(max_tokens), clear).micro_batches(GROUPS, said.append):
            with micro_batch as tokens:
                GRPOLoss()(tokens)["loss"].backward()
                scored.append(len(set(tokens["group_id"].tolist())))
        return [param.grad.clone() for param in policy.model.parameters()], said, scored

    return list(zip(*of_two_ranks(train), strict=True))


def test_all_ranks_begin_again_where_one_ran_out_with_the_gradient_of_the_smaller_split(tiny_model):
    gradients, said, scored = step_of_two_ranks(tiny_model, 40, room=20)
    # Of two micro-batches of 40 each rank has one, of four of 20 two; the rank without room scored none of 40.
    assert scored == ([2, 1, 1], [1, 1])
    assert said[0] == said[1] and len(said[0]) == 1 and "with micro-batches of 20 tokens" in said[0][0]
    smaller, nothing, _ = step_of_two_ranks(tiny_model, 20)
    assert nothing == ([], [])
    for rank in range(2):
        assert all(map(torch.equal, gradients[rank], smaller[rank]))
    for ours, theirs, whole in zip(*gradients, plain(tiny_model, 80), strict=True):
        torch.testing.assert_close(ours + theirs, whole, rtol=1e-4, atol=1e-6)


def test_ranks_that_wait_for_each_other_within_a_pass_end_with_the_setting(tiny_model):
    policy = Small.load(tiny_model, torch.float32)
    policy.room = 20
    policy.peers = SimpleNamespace(rank=0, size=1, in_step=True, gather=lambda mine: [mine])
    for batching, setting in (
        (MicroBatching(40), "train.micro_batch_tokens=20$"),
        (MicroBatching(10**6, 2), "train.micro_batch_tokens=20 and train.gradient_accumulation_steps=null$"),
    ):
        with pytest.raises(OutOfMemoryError, match=f"parallel=fsdp.*set {setting}"):
            for micro_batch in WithinMemory(policy, batching, lambda: None).micro_batches(GROUPS, print):
                with micro_batch:
                    pass


@pytest.mark.parametrize(
    "message",
    [
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "MPS backend out of memory (MPS allocated: 18.09 GB, max allowed: 18.13 GB)",
    ],
)
def test_every_backends_message_is_known(message):
    assert is_out_of_memory(RuntimeError(message))


def test_the_engine_samples_fewer_at_a_time_and_names_a_group_it_has_no_room_for(tiny_model, monkeypatch, capsys):
    engine, sizes = TransformersEngine(tiny_model, 64, dtype="float32"), []
    generate = engine._model.generate

    def limited(input_ids, **settings):
        sizes.append(len(input_ids) * settings["generation_config"].num_return_sequences)
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return generate(input_ids=input_ids, **settings)

    monkeypatch.setattr(engine._model, "generate", limited)
    asked = [[5, 6, 7 + i] for i in range(6)], 1, Sampling(temperature=0.0, max_new_tokens=4)
    samples = engine.generate(*asked)
    assert sizes == [6, 3, 1, 1, 1, 1, 1, 1] and engine.out_of_memory == 2
    again = TransformersEngine(tiny_model, 64, dtype="float32")
    again.restore(engine.state())
    monkeypatch.setattr(again._model, "generate", limited)
    sizes.clear()
    again.generate(*asked)
    assert sizes == [1] * 6 and again.out_of_memory == 2
    alone = TransformersEngine(tiny_model, 64, dtype="float32").generate(*asked)
    for ours, theirs in zip(samples, alone, strict=True):
        assert torch.equal(ours.response_ids, theirs.response_ids)
    assert "goes on with 3" in capsys.readouterr().err
    with pytest.raises(OutOfMemoryError, match="4 responses of at most 4 tokens to a prompt of 3 do not fit"):
        engine.generate([[5, 6, 7]], 4, Sampling(max_new_tokens=4))
