"""Arms of the benchmarks get the same work, and their figures are what they say."""

from __future__ import annotations

import sys

import pytest
import torch

from grpo_rl.testing import random_group

pytestmark = pytest.mark.nightly


def test_the_token_ratio_is_counted_by_hand(script):
    shape = script("prefix").Shape
    # 16 sequences of 1152 tokens, or 1024 tokens once and 16 responses of 128.
    assert shape(1024, 128, 16).token_ratio == 18432 / 3072
    assert shape(512, 128, 1).token_ratio == 1


def test_a_repeated_prompt_means_the_same_tokens(script):
    shape = script("prefix").Shape(prompt=5, response=3, responses=4)
    (shared,), repeated = shape.shared(vocab=32), shape.repeated(vocab=32)
    assert torch.equal(torch.cat([group.response_ids for group in repeated]), shared.response_ids)
    assert all(torch.equal(group.prompt_ids, shared.prompt_ids) for group in repeated)
    assert sum(group.num_tokens for group in repeated) / shared.num_tokens == shape.token_ratio


def test_the_prompts_share_is_the_difference_that_the_prompt_makes(script):
    # A step takes 2 s and 1 s a prompt token, once; a response's token takes half a second.
    def run(groups):
        (group,) = groups
        return {"step_s": 2.0 + len(group.prompt_ids) + 0.5 * len(group.response_ids)}

    share = script("prefix").prompt_share(run, prompt=11, response=4, vocab=32, steps=2)
    assert share == {"P": 11, "R": 4, "at G=1 s": 10.0, "at G=16 s": 10.0, "ratio": 1.0}


def test_ragged_lengths_have_the_median_and_the_tail_that_are_asked_for(script):
    lengths = script("lengths").log_normal_quantiles(1001, median=50, p99_over_median=8.0, longest=10_000)
    assert lengths[500] == 50
    assert lengths[990] == pytest.approx(400, rel=0.05)
    assert max(script("lengths").log_normal_quantiles(1001, 50, 8.0, longest=300)) == 300


def test_every_length_goes_to_one_response(script):
    ragged = script("ragged")
    work = ragged.Work("", 3, 4, prompt=2, median=20, p99_over_median=8.0, longest=90, micro_batch_tokens=64)
    dealt = [length for row in work.lengths for length in row]
    assert sorted(dealt) == script("lengths").log_normal_quantiles(12, 20, 8.0, 90) and dealt != sorted(dealt)
    assert [group.lengths.tolist() for group in ragged.make_groups(work, vocab=32)] == work.lengths


def test_trl_gets_every_response_once_padded_to_the_longest_of_the_step(script):
    groups = [
        random_group(prompt=3, lengths=[1, 7], group_id=0).with_advantages(torch.tensor([1.0, -1.0])),
        random_group(prompt=4, lengths=[2, 4], group_id=1, seed=1).with_advantages(torch.tensor([2.0, -2.0])),
    ]
    batches = script("peers").trl_batches(groups, batch=2, pad_id=99)
    assert [batch["completion_ids"].shape for batch in batches] == [(2, 7), (2, 7)]
    seen = {}
    for batch in batches:
        for prompt, prompt_mask, ids, mask, advantage in zip(*batch.values(), strict=True):
            assert (ids[mask == 0] == 99).all() and mask.diff().le(0).all(), "responses are padded on the right"
            assert (prompt[prompt_mask == 0] == 99).all() and prompt_mask.diff().ge(0).all(), "prompts on the left"
            seen[float(advantage)] = (prompt[prompt_mask == 1].tolist(), ids[mask == 1].tolist())
    expected = {
        float(advantage): (group.prompt_ids.tolist(), ids.tolist())
        for group in groups
        for advantage, ids in zip(group.advantages, group.responses, strict=True)
    }
    assert seen == expected
    with pytest.raises(ValueError, match="4 responses can't be cut into batches of 3"):
        script("peers").trl_batches(groups, batch=3, pad_id=99)


def test_heads_whose_gradients_differ_are_not_compared(script):
    same = {"grad_hidden_norm": 1.0, "grad_weight_norm": 2.0}
    script("head").check_agreement({"grpo_rl": same, "trl_fused": same | {"grad_weight_norm": 2.01}})
    with pytest.raises(SystemExit, match="grad_weight_norm is 2 with grpo_rl and 4 with trl_fused"):
        script("head").check_agreement({"grpo_rl": same, "trl_fused": same | {"grad_weight_norm": 4.0}})


def test_training_gets_an_fp32_weight_gradient_and_every_head_is_as_exact_as_bf16_allows(script):
    head = script("head")
    pytest.importorskip("trl")
    shape = head.Shape(8, 16, 64, memory_bar=1.0)
    inputs = head.make_inputs(shape, "cpu")
    dtypes = {name: head.gradients_of(name)(inputs, False)[1].dtype for name in (head.OURS, head.OURS_FP32)}
    assert dtypes == {head.OURS: torch.bfloat16, head.OURS_FP32: torch.float32}
    for row in head.errors(shape, True, "cpu"):
        for error in (row["hidden gradient's error"], row["weight gradient's error"]):
            assert 1e-5 < error < 2 * torch.finfo(torch.bfloat16).eps, row


@pytest.mark.parametrize("name", ["grpo_rl", "trl_fused", "naive"])
@pytest.mark.parametrize("entropy_counts", [False, True])
def test_every_head_makes_the_same_gradients(script, name, entropy_counts):
    head = script("head")
    if name in head.PEERS:
        pytest.importorskip("trl")
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(5, 8, generator=generator),
        torch.randn(11, 8, generator=generator),
        torch.randint(11, (5,), generator=generator),
        torch.randn(5, generator=generator),
    ]
    hidden, weight = (leaf.double().requires_grad_() for leaf in inputs[:2])
    log_p = (hidden @ weight.T).log_softmax(-1)
    loss = -(log_p[range(5), inputs[2]] * inputs[3]).mean()
    if entropy_counts:
        loss = loss + head.ENTROPY_COEF * (log_p.exp() * log_p).sum(-1).mean()
    loss.backward()
    gradients = head.forward_backward(head.HEADS[name](), inputs, entropy_counts)
    for gradient, leaf in zip(gradients, (hidden, weight), strict=True):
        torch.testing.assert_close(gradient.double(), leaf.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("memory", ["--tokens", "256"], "--tokens needs at least two"),
        ("ragged", ["--p99-over-median", "1"], "--p99-over-median must be above 1"),
        ("step_vs_trl", ["--data", "x", "--repeats", "3"], "--repeats 3 is odd"),
        ("step_vs_trl", ["--data", "x", "--prompt-tokens", "512"], "unrecognized arguments: --prompt-tokens"),
        ("head", ["--shape", "0", "1", "2"], "0 is below 1"),
        ("collector", ["--data", "x", "--steps", "0"], "0 is below 1"),
    ],
)
def test_settings_that_measure_nothing_are_refused(script, monkeypatch, capsys, name, arguments, complaint):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit):
        script(name).parse()
    assert complaint in capsys.readouterr().err


def test_our_step_is_tried_before_the_minutes_that_trls_settings_take(script, monkeypatch):
    trl, harness, made = script("step_vs_trl"), script("harness"), []

    def broken(name, *_):
        made.append(name)
        raise harness.ArmError(f"{name} failed:\nKeyError: 'task'")

    monkeypatch.setattr(harness, "Arm", broken)
    monkeypatch.setattr(trl, "asked_work", lambda args: trl.Work("", ([],), (1,), repeats=8, response=8))
    monkeypatch.setattr(sys, "argv", ["step_vs_trl.py", "--data", "x", "--force"])
    with pytest.raises(SystemExit, match="grpo_rl failed:\nKeyError: 'task'"):
        trl.main()
    assert made == [trl.OURS]
