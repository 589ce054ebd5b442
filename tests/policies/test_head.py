"""The tiled head equals full logits, in value and gradient, and never holds them."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_rl.data.group import Kept
from grpo_rl.policies.head import log_prob_and_entropy
from grpo_rl.policies.policy import ReferencePolicy, TrainPolicy
from grpo_rl.testing import random_group


def full(hidden, weight, target, bias=None, temperature=1.0, softcap=None):
    """The definition, by all logits at once, with softmax in fp32 at least."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


SETS = ([0, 3, 9], [5], [], list(range(11)), [10, 1], [7, 2, 6, 4], [8, 0])
"""Kept sets of seven tokens out of eleven words: one word, all of them, in no order; of the third nothing is known."""


def restricted(hidden, weight, target, bias, temperature, softcap):
    """The definition, token by token: the softmax of the kept words' logits, and nothing else."""
    rows = []
    for h, t, kept in zip(hidden, target.tolist(), SETS, strict=True):
        kept = kept or list(range(len(weight)))
        logits = weight[kept] @ h + (0 if bias is None else bias[kept])
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        log_p = (logits / temperature).log_softmax(-1)
        rows.append((log_p[kept.index(t)], -(log_p.exp() * log_p).sum()))
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("tile", [(1, 1), (3, 4), (100, 3), (2, 100)])
@pytest.mark.parametrize(("road", "kept"), [(full, None), (restricted, Kept.from_lists(SETS))], ids=["full", "kept"])
def test_values_and_gradients_equal_those_of_full_logits_or_of_the_distribution_restricted_to_kept_sets(
    road, kept, temperature, with_bias, softcap, tile
):
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=g)  # noqa: E731
    inputs = [make(7, 5), make(11, 5)] + ([make(11)] if with_bias else [])
    target, up = torch.tensor([3, 5, 1, 8, 10, 2, 0]), [make(7), make(7)]

    def grads(scored, of):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = scored(*leaves)
        used = [(u * o).sum() for u, o, wanted in zip(up, out, of, strict=True) if wanted]
        return out, torch.autograd.grad(sum(used), leaves)

    for of in ((1, 1), (1, 0), (0, 1)):
        expected = grads(lambda h, w, b=None: road(h, w, target, b, temperature, softcap), of)
        found = grads(
            lambda h, w, b=None: log_prob_and_entropy(h, w, target, b, temperature, softcap, tile, kept=kept), of
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_token_outside_of_its_kept_set_has_no_probability():
    kept = Kept.from_lists([[0, 1]])
    log_prob, _ = log_prob_and_entropy(torch.ones(1, 2), torch.ones(4, 2), torch.tensor([3]), kept=kept)
    assert log_prob.item() == -torch.inf


def test_huge_logits_stay_finite():
    hidden = torch.full((2, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    log_prob, entropy = log_prob_and_entropy(hidden, weight, torch.tensor([0, 1]))
    assert log_prob.tolist() == [0.0, -2e4] and entropy.tolist() == [0.0, 0.0]
    (log_prob.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("shift", ["none", "up", "down", "either"])
def test_logits_far_from_zero_cost_no_digits_and_no_entropy_is_negative(shift):
    """The hidden states pick columns of the weight: logits are the same numbers in fp32 and fp64.

    Rows run from a flat to a nearly certain distribution, of 1e-3 nats: less than logits of 300 cost in a difference.
    """
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-1, 1.3, 12)
    logits = torch.randn(12, 5000, generator=generator) * spread[:, None]
    far = torch.where(torch.rand(5000, generator=generator) < 0.5, 300.0, -300.0)
    logits = logits + {"none": 0.0, "up": 300.0, "down": -300.0, "either": far}[shift]
    target = logits.argsort(dim=-1, descending=True)[torch.arange(12), torch.arange(12)]
    up = torch.randn(12, generator=generator)

    def results(fn, dtype):
        hidden, weight = torch.eye(12, dtype=dtype), logits.T.to(dtype, copy=True).requires_grad_()
        log_prob, entropy = fn(hidden, weight)
        by_log_prob, by_entropy = (
            torch.autograd.grad((x * up.to(dtype)).sum(), weight, retain_graph=True)[0].double()
            for x in (log_prob, entropy)
        )
        return log_prob.detach().double(), entropy.detach().double(), by_log_prob, by_entropy

    exact = results(lambda h, w: full(h, w, target), torch.float64)
    tiled = results(lambda h, w: log_prob_and_entropy(h, w, target, tile=(5, 512)), torch.float32)
    torch.testing.assert_close(tiled[:2], exact[:2], rtol=0, atol=4e-6)
    assert (tiled[1] >= 0).all()
    for result, expected in zip(tiled[2:], exact[2:], strict=True):
        assert (result - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("tile", [(2, 3), (100, 100)])
@pytest.mark.parametrize("masked", [slice(0, 4), slice(1, 9), slice(6, 11)], ids=["first", "most", "last"])
def test_words_that_a_model_masks_out_count_nothing(tile, masked):
    """Whole tiles of them too; the rest is as if the model had no such words."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 11, dtype=torch.float64, generator=generator)
    kept = [word for word in range(11) if word not in range(11)[masked]]
    target, up = torch.tensor([0, 1, 1]), torch.randn(2, 3, dtype=torch.float64, generator=generator)
    bias = torch.zeros(11, dtype=torch.float64)
    bias[masked] = -torch.inf

    def results(fn, weight):
        hidden, weight = torch.eye(3, dtype=torch.float64), weight.clone().requires_grad_()
        out = fn(hidden, weight)
        return *out, torch.autograd.grad(sum((u * x).sum() for u, x in zip(up, out, strict=True)), weight)[0]

    expected = results(lambda h, w: full(h, w, target), logits.T[kept])
    targets = torch.tensor(kept)[target]
    found = results(lambda h, w: log_prob_and_entropy(h, w, targets, bias, tile=tile), logits.T)
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[2][kept], expected[2], rtol=0, atol=1e-12)
    assert (found[2][masked] == 0).all()


def test_bf16_sums_over_many_tiles_are_about_as_near_to_fp64_as_one_product():
    """A tile's product is rounded before it is summed in fp32, one product over all words once: some 15 % are between.

    Sums in bf16 would be several times as far.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 64, generator=generator).bfloat16() for size in (96, 4096))
    weight *= 0.3
    target = torch.randint(0, 4096, (96,), generator=generator)

    def grads(h, w, fn):
        h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
        fn(h, w).sum().backward()
        return torch.stack([h.grad.double().norm(), w.grad.double().norm()]), h.grad.double(), w.grad.double()

    whole = lambda h, w: full(h, w, target)[0]  # noqa: E731
    norms, *exact = grads(hidden.double(), weight.double(), whole)
    tiled = lambda h, w: log_prob_and_entropy(h, w, target, tile=(16, 64))[0]  # noqa: E731 - 6 x 64 tiles
    plain, ours = (
        torch.stack([(a - b).norm() for a, b in zip(grads(hidden, weight, fn)[1:], exact, strict=True)]) / norms
        for fn in (whole, tiled)
    )
    assert (plain > 1e-3).all(), "bf16 rounds"
    assert (ours <= 1.25 * plain).all(), f"hidden, weight: {ours}, one product: {plain}"


def test_an_optimizer_that_keeps_fp32_gradients_gets_the_fp32_sum():
    hidden = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.nn.Parameter(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).bfloat16())
    target = torch.arange(8)

    def grad(dtype):
        weight.grad, weight.grad_dtype = None, dtype
        log_prob_and_entropy(hidden, weight, target, tile=(2, 4))[0].sum().backward()
        return weight.grad

    exact, rounded = grad(torch.float32), grad(torch.bfloat16)
    assert exact.dtype == torch.float32 and torch.equal(exact.bfloat16(), rounded)
    assert not torch.equal(exact, rounded.float()), "the sum over tiles was rounded before it was handed over"


def test_a_policy_scores_groups_with_and_without_kept_sets_in_one_micro_batch(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    whole, cut = random_group(prompt=3, lengths=[2, 4], group_id=1), random_group(prompt=5, lengths=[1, 0, 3], seed=1)
    sets = [sorted({int(token), 7, 40}) for token in cut.response_ids]
    sets[2] = []
    kept = Kept.from_lists(sets)
    cut = replace(cut, kept_ids=kept.ids, kept_counts=kept.counts)
    policy = TrainPolicy(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), temperature=0.7)
    log_probs, entropies = policy.score([whole, cut])
    expected = []
    for group, of_group in ((whole, [[]] * 6), (cut, sets)):
        rest = iter(of_group)
        for response in group.responses:
            logits = (
                model(torch.cat([group.prompt_ids, response])[None]).logits[0, len(group.prompt_ids) - 1 : -1] / 0.7
            )
            for token, of_token in zip(response.tolist(), logits, strict=True):
                words = next(rest) or list(range(len(of_token)))
                log_p = of_token[words].log_softmax(-1)
                expected.append(torch.stack([log_p[words.index(token)], -(log_p.exp() * log_p).sum()]))
    torch.testing.assert_close(torch.stack([log_probs, entropies]), torch.stack(expected, dim=1), rtol=0, atol=2e-5)
    reference = ReferencePolicy(model, temperature=0.7).add_log_probs([whole, cut], 64)
    torch.testing.assert_close(torch.cat([g.ref_log_probs for g in reference]), log_probs, rtol=0, atol=2e-5)
