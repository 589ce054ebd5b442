"""The loss of SFT against transformers' own on padded sequences, and TorchRL's; and that splits don't change it."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives.llm import sft as torchrl_sft
from transformers import LlamaForCausalLM

from grpo_rl.data.batching import MicroBatching
from grpo_rl.envs.demonstrations import Demonstrations
from grpo_rl.envs.prompt_response import PromptResponse
from grpo_rl.losses.sft import SFTLoss, sft_loss
from grpo_rl.policies.generation import load_tokenizer
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.training.micro_batches import scored_micro_batches
from tests.helpers import to_fp64

# One system message and one long question for most, so that beginnings are shared; lengths differ, one is a letter.
BEGINNING = "Count the letters of this word: "
ROWS = [
    {"prompt": "a", "reference": "b"},
    {"prompt": f"{BEGINNING}letters", "reference": "It has 7 letters."},
    {"prompt": f"{BEGINNING}one", "reference": "3"},
    {"prompt": BEGINNING, "reference": "none at all"},
]


@pytest.fixture(scope="module")
def groups(tiny_model):
    task = PromptResponse(ROWS, completion_column="reference", system_prompt="You count letters, and say how many.")
    rows = Demonstrations(task, load_tokenizer(tiny_model), [0], 200, 50)
    return rows.take(len(ROWS))


def fp64_model(tiny_model):
    return to_fp64(LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="sdpa"))


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def of_ours(tiny_model, groups, **batching):
    model = fp64_model(tiny_model)
    policy, loss, total = TrainPolicy(model), SFTLoss(), 0.0
    for tokens in scored_micro_batches(policy, groups, MicroBatching(aggregate="token_mean", **batching)):
        losses = loss(tokens)
        losses["loss"].backward()
        total += losses["loss_sft"].item()
    return total, gradients(model)


def of_transformers(tiny_model, groups):
    """The mean over the labels of a padded batch, in one forward pass, by transformers itself."""
    model = fp64_model(tiny_model)
    longest = max(group.num_tokens for group in groups)
    ids, mask = torch.zeros(2, len(groups), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, group in enumerate(groups):
        start, end = len(group.prompt_ids), group.num_tokens
        ids[i, :start], ids[i, start:end] = group.prompt_ids, group.response_ids
        labels[i, start:end], mask[i, :end] = group.response_ids, 1
    logits = model(input_ids=ids, attention_mask=mask).logits
    # Its own loss function, which casts to fp32, on logits in fp64.
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    with torch.no_grad():
        own = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(own.double(), loss.detach(), rtol=1e-6, atol=0)
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.slow
def test_loss_and_gradient_are_those_of_transformers_on_padded_sequences_however_the_step_is_split(tiny_model, groups):
    expected, by_name = of_transformers(tiny_model, groups)
    assert max(grad.abs().max() for grad in by_name.values()) > 1e-3
    for split in ({"max_tokens": 10**6}, {"max_tokens": 1}, {"max_tokens": 10**6, "count": 2}):
        loss, grads = of_ours(tiny_model, groups, **split)
        assert loss == pytest.approx(expected, abs=1e-9)
        for name, grad in by_name.items():
            torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-9, msg=name)


def test_a_token_weighs_the_same_in_a_long_and_in_a_short_response_and_an_untrained_one_nothing():
    log_prob = torch.tensor([-1.0, -2.0, -6.0, float("nan")], requires_grad=True)
    trainable = torch.tensor([True, True, True, False])
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0]) / 3
    loss = sft_loss(log_prob, trainable, weight)
    loss.backward()
    assert loss.item() == pytest.approx(3.0)
    assert log_prob.grad is not None and log_prob.grad.tolist() == pytest.approx([-1 / 3, -1 / 3, -1 / 3, 0.0])


def test_the_loss_is_torchrls_sum_over_responses_by_the_number_of_tokens():
    generator = torch.Generator().manual_seed(0)
    responses = [-torch.rand(n, generator=generator) for n in (1, 5, 3)]
    summed = torch.stack([response.sum() for response in responses])
    tokens = TensorDict(
        log_prob=torch.cat(responses), entropy=torch.arange(9.0), trainable=torch.ones(9, dtype=torch.bool),
        weight=torch.full((9,), 1 / 9), batch_size=[9],
    )  # fmt: skip
    losses = SFTLoss()(tokens)
    torch.testing.assert_close(losses["loss"], torchrl_sft.sft_loss(summed, "sum") / 9)
    assert (losses["tokens"].item(), losses["entropy"].item()) == (9, 36)
