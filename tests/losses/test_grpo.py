"""GRPOLoss: its factors in every pair of choices, what it must do for any batch, and the edges of floating point."""

import itertools
import math
from typing import get_args

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.overrides import TorchFunctionMode
from torchrl.trainers.trainers import OptimizerHook

from grpo_rl.losses.aggregate import StepTotals, token_weights
from grpo_rl.losses.factors import AGGREGATE, KL, SURROGATE, Ratio, asks_for
from grpo_rl.losses.grpo import LOSSES, METRIC_SUMS, GRPOLoss

CORRECTIONS = ("none", "token truncate", "sequence truncate", "token mask", "sequence mask", "geometric truncate")
FACTORS = {
    # The surrogate "none" has no policy gradient, and is in test_distill.py.
    "surrogate": (*(name for name in SURROGATE.functions if name != "none"), "clipped dual"),
    "ratio": get_args(Ratio),
    # k1 is refused in the loss, and those over the full vocabulary are in tests/policies/test_divergence.py.
    "kl": ("none", *(name for name, kl in KL.functions.items() if name != "k1" and not asks_for(kl, "teacher_kl"))),
    "correction": CORRECTIONS,
    "aggregate": tuple(AGGREGATE.functions),
    "entropy_coef": (0.0, 0.3),
}
LENGTHS, SIZES = torch.tensor([2, 3, 0, 1]), torch.tensor([2, 2])


def pairwise(factors):
    """A few combinations of the factors in which every two choices of two factors come together."""
    combinations = itertools.product(*([(name, choice) for choice in of] for name, of in factors.items()))
    pairs = {chosen: set(itertools.combinations(chosen, 2)) for chosen in combinations}
    missing = set().union(*pairs.values())
    while missing:
        best = max(pairs, key=lambda chosen: len(missing & pairs[chosen]))
        missing -= pairs[best]
        yield dict(best)


def make_loss(surrogate="clipped", ratio="token", kl="none", correction="none", entropy_coef=0.0):
    surrogate, _, dual = surrogate.partition(" ")
    level, _, how = correction.rpartition(" ")
    ratio = getattr(SURROGATE.function(surrogate), "ratio", ratio)  # some are of one alone
    return GRPOLoss(
        kl_coef=0.0 if kl == "none" else 0.2, kl="k3" if kl == "none" else kl, entropy_coef=entropy_coef,
        surrogate=surrogate, ratio=ratio, dual_clip=2.0 if dual else None,
        correction=how, correction_level=level or "token",
    )  # fmt: skip


def random_tokens(aggregate="sequence_mean", seed=0, dtype=torch.float64):
    """Responses of 2, 3, 0 and 1 tokens to two prompts, one token not trained; many ratios and weights meet a bound."""
    g = torch.Generator().manual_seed(seed)
    n = int(LENGTHS.sum())
    log_prob, old, sampler, ref = (
        torch.randn(4, n, generator=g, dtype=dtype) * torch.tensor([[1.0], [0.8], [0.7], [0.5]]) - 2
    )
    trainable = torch.tensor([True, True, True, False, True, True])
    totals = StepTotals(len(LENGTHS), int(trainable.sum()), len(SIZES))
    return TensorDict(
        log_prob=log_prob,
        entropy=torch.rand(n, generator=g, dtype=dtype),
        old_log_prob=old,
        sampler_log_prob=sampler,
        ref_log_prob=ref,
        advantage=torch.randn(len(LENGTHS), generator=g, dtype=dtype).repeat_interleave(LENGTHS),
        trainable=trainable,
        weight=token_weights(LENGTHS, trainable, AGGREGATE.bound(aggregate, normalizer=4.0), totals, SIZES, dtype),
        response=torch.repeat_interleave(LENGTHS),
        covariance_rank=torch.linspace(0, 1, n, dtype=dtype),
        covariance_draw=torch.ones(n, dtype=dtype),  # Clip-Cov draws none of them
        batch_size=[n],
    )


class HeldStopGradients(TorchFunctionMode):
    """A value that was detached in a first evaluation stays the same in the next ones, as the gradient takes it to be.

    Otherwise a finite difference would move the weights and values that have no gradient by definition.
    """

    def __init__(self):
        super().__init__()
        self._held, self._at = [], None

    def from_the_start(self):
        self._at = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.detach:
            return func(*args, **(kwargs or {}))
        if self._at is None:
            self._held.append(func(*args).clone())
            return self._held[-1]
        self._at += 1
        return self._held[self._at - 1]


PAIRS = list(pairwise(FACTORS))


@pytest.mark.parametrize("components", [["loss"], LOSSES])
def test_a_torchrl_trainer_that_is_told_the_loss_or_its_terms_counts_it_once(components):
    log_prob = random_tokens(dtype=torch.float32)["log_prob"].requires_grad_()
    losses = make_loss(kl="k3", entropy_coef=0.3)(random_tokens(dtype=torch.float32).set("log_prob", log_prob))
    (expected,) = torch.autograd.grad(losses["loss"], log_prob, retain_graph=True)
    before = log_prob.detach().clone()
    hook = OptimizerHook(torch.optim.SGD([log_prob], lr=1.0), loss_components=components)
    hook(losses, clip_grad_norm=True, clip_norm=1e9, index=0)
    torch.testing.assert_close(before - log_prob.detach(), expected)


@pytest.mark.parametrize("choices", PAIRS, ids=lambda choices: "-".join(map(str, choices.values())))
def test_gradients_are_those_of_finite_differences(choices):
    choices = dict(choices)
    tokens = random_tokens(choices.pop("aggregate"))
    loss, held = make_loss(**choices), HeldStopGradients()

    def evaluate(log_prob, entropy):
        return loss(tokens.clone(recurse=False).update({"log_prob": log_prob, "entropy": entropy}))["loss"]

    with held:
        evaluate(tokens["log_prob"], tokens["entropy"])

    def again(*inputs):
        held.from_the_start()
        with held:
            return evaluate(*inputs)

    inputs = [tokens[name].clone().requires_grad_() for name in ("log_prob", "entropy")]
    assert torch.autograd.gradcheck(again, inputs, eps=1e-6, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("choices", PAIRS, ids=lambda choices: "-".join(map(str, choices.values())))
def test_the_loss_is_the_weighted_sum_of_its_terms(choices):
    choices = dict(choices)
    tokens = random_tokens(choices.pop("aggregate"))
    loss = make_loss(**choices)
    out, terms = loss(tokens), loss.terms(tokens)
    assert terms.batch_size == tokens.batch_size
    assert torch.equal(out["loss"], torch.stack([out[name] for name in LOSSES]).sum())
    for name, coef in (("objective", 1.0), ("kl", loss.kl_coef), ("entropy", -loss.entropy_coef)):
        torch.testing.assert_close(out[f"loss_{name}"], coef * (tokens["weight"] * terms[name]).sum())
    for name in ("clip_low", "clip_high", "corrected"):
        if name in out.keys():
            assert out[name] == (terms[name] & tokens["trainable"]).sum()
    assert set(METRIC_SUMS) < set(out.keys()) and set(loss.in_keys) <= set(tokens.keys())


CHOICES = st.fixed_dictionaries({name: st.sampled_from(FACTORS[name]) for name in ("surrogate", "ratio", "correction")})


@pytest.mark.slow
@given(CHOICES, st.integers(0, 2**32))
def test_fresh_weights_give_the_policy_gradient_whatever_the_surrogate(choices, seed):
    tokens = random_tokens(seed=seed)
    log_prob = tokens["log_prob"].clone().requires_grad_()
    tokens["old_log_prob"] = tokens["sampler_log_prob"] = log_prob.detach()
    make_loss(**choices)(tokens.update({"log_prob": log_prob}))["loss"].backward()
    expected = -tokens["weight"] * tokens["advantage"]
    torch.testing.assert_close(log_prob.grad, expected, rtol=1e-9, atol=1e-12)


def test_correction_and_ratio_are_taken_apart_as_worked_out_by_hand():
    # Sampler 1/8, trainer before the update 1/2, now 3/4: the weight 4 is truncated to 3, the ratio is 3/2, and of a
    # good response (A = 2) it counts as 1.2. Without a correction the ratio is 6, which counts as 1.2 too.
    tokens = TensorDict(
        log_prob=torch.tensor([0.75]).log(), old_log_prob=torch.tensor([0.5]).log(),
        sampler_log_prob=torch.tensor([0.125]).log(), entropy=torch.zeros(1), advantage=torch.tensor([2.0]),
        trainable=torch.tensor([True]), weight=torch.ones(1), batch_size=[1],
    )  # fmt: skip
    loss = GRPOLoss(correction="truncate", correction_high=3.0)
    terms, out = loss.terms(tokens), loss(tokens)
    assert (terms["ratio"].item(), terms["correction"].item()) == pytest.approx((1.5, 3.0))
    assert out["loss_objective"].item() == pytest.approx(-3 * 1.2 * 2)
    assert (out["correction"].item(), out["correction_squared"].item(), out["corrected"].item()) == (3.0, 9.0, 1.0)
    plain = GRPOLoss()
    assert plain.terms(tokens)["ratio"].item() == pytest.approx(6.0)
    assert plain(tokens)["loss_objective"].item() == pytest.approx(-2.4)
    # The effective sample size is of the sampler's tokens, whatever the ratio is to.
    assert out["ratio"].item() == plain(tokens)["ratio"].item() == pytest.approx(6.0)


def test_the_kls_importance_weight_is_to_the_sampler_whatever_the_surrogates_ratio_is_to():
    # pi is 6 times the sampler's and 3/2 of the trainer's before; the reference is at pi/2: k3 = 1/2 + ln 2 - 1.
    tokens = random_tokens()[[0]]
    log_prob = torch.tensor([0.75], dtype=torch.float64).log()
    tokens["log_prob"], tokens["ref_log_prob"] = log_prob, log_prob - math.log(2)
    tokens["old_log_prob"], tokens["sampler_log_prob"] = log_prob - math.log(1.5), log_prob - math.log(6)
    for correction in ("none", "truncate"):
        terms = GRPOLoss(kl_coef=1.0, kl="k3_is", correction=correction).terms(tokens)
        assert terms["kl"].item() == pytest.approx(6 * (math.log(2) - 0.5))


EXTREME = st.sampled_from([0.0, -1e-8, 1.0, -30.0, 89.0, -89.0, 800.0, -1e4, 1e4, 1e30, math.inf, -math.inf])


@pytest.mark.slow
@given(
    CHOICES,
    st.lists(EXTREME, min_size=6, max_size=6),
    st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=4, max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_a_finite_loss_has_a_finite_gradient_however_far_the_ratios_are(choices, log_ratios, advantages, dtype):
    """Otherwise the loss shows it: the optimizer refuses such a step by name."""
    # Sampler and trainer can't both be at infinity, where their difference is nothing.
    assume(choices["correction"] == "none" or not any(map(math.isinf, log_ratios)))
    tokens = random_tokens(dtype=torch.float64)
    log_prob = tokens["log_prob"].to(dtype).requires_grad_()
    old = log_prob.detach() - torch.tensor(log_ratios, dtype=torch.float64).to(dtype)
    tokens.update({"log_prob": log_prob, "old_log_prob": old, "sampler_log_prob": old})
    tokens["advantage"] = torch.tensor(advantages, dtype=dtype).repeat_interleave(LENGTHS)
    loss = make_loss(**choices)(tokens)["loss"]
    loss.backward()
    assert not loss.isfinite() or log_prob.grad.isfinite().all()
    if choices["surrogate"] in ("sapo", "clipped dual") and choices["ratio"] == "token":
        assert loss.isfinite()  # their losses are bounded
    assert not loss.isfinite() or log_prob.grad[~tokens["trainable"]].eq(0).all()


def test_log_ratios_are_taken_in_fp32_where_the_log_probabilities_are_rounded():
    tokens = random_tokens(dtype=torch.float32)
    rounded = {name: tokens[name].bfloat16() for name in ("log_prob", "sampler_log_prob", "entropy")}
    terms = GRPOLoss().terms(tokens.update(rounded))
    expected = rounded["log_prob"].float() - rounded["sampler_log_prob"].float()
    assert torch.equal(terms["log_ratio"], torch.where(tokens["trainable"], expected, 0.0))


@pytest.mark.parametrize("choices", PAIRS[:20], ids=lambda choices: "-".join(map(str, choices.values())))
@pytest.mark.parametrize("masked", ["all", "no token"])
def test_a_batch_with_nothing_to_train_on_has_a_loss_of_zero(choices, masked):
    choices = dict(choices)
    tokens = random_tokens(choices.pop("aggregate"))
    if masked == "no token":
        tokens = tokens[:0]
    # Whatever stands on tokens that are not trained on is not read.
    garbage = torch.full_like(tokens["log_prob"], math.nan)
    tokens.update(dict.fromkeys(("sampler_log_prob", "old_log_prob", "ref_log_prob", "entropy", "advantage"), garbage))
    tokens["trainable"] = torch.zeros_like(tokens["trainable"])
    tokens["weight"] = torch.zeros_like(tokens["weight"])
    log_prob = tokens["log_prob"].clone().requires_grad_()
    loss = make_loss(**choices)
    out = loss(tokens.update({"log_prob": log_prob}))
    out["loss"].backward()
    assert all(value.eq(0).all() for value in out.values()) and log_prob.grad.eq(0).all()


@pytest.mark.parametrize("ratio", get_args(Ratio))
def test_a_response_of_many_tokens_is_as_exact_as_a_short_one(ratio):
    # 200,000 tokens with a ratio of 1.1 each: the response's geometric mean is 1.1 too, and the loss -1.1.
    n = 200_000
    log_prob = torch.full((n,), math.log(1.1)).requires_grad_()
    trainable = torch.ones(n, dtype=torch.bool)
    tokens = TensorDict(
        log_prob=log_prob, sampler_log_prob=torch.zeros(n), entropy=torch.zeros(n), advantage=torch.ones(n),
        trainable=trainable, response=torch.zeros(n, dtype=torch.long),
        weight=token_weights(torch.tensor([n]), trainable, "sequence_mean", StepTotals(1, n, 1), torch.tensor([1])),
        batch_size=[n],
    )  # fmt: skip
    loss = GRPOLoss(ratio=ratio)(tokens)["loss"]
    loss.backward()
    assert loss.item() == pytest.approx(-1.1, rel=1e-5)
    torch.testing.assert_close(log_prob.grad, torch.full((n,), -1.1 / n), rtol=1e-5, atol=0)


def test_the_reference_is_told_of_without_a_kl_in_the_loss():
    tokens = random_tokens()
    out = GRPOLoss()(tokens)
    assert out["loss_kl"] == 0 and out["kl_ref"] > 0
    del tokens["ref_log_prob"]
    assert "kl_ref" not in GRPOLoss()(tokens).keys()


def test_an_entry_that_is_missing_is_named_with_who_writes_it():
    tokens = random_tokens()
    del tokens["old_log_prob"]
    with pytest.raises(ValueError, match=r"old_log_prob, which is missing; .*TrainPolicy\.add_log_probs"):
        GRPOLoss(correction="mask")(tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kl", ["none", "k3"])
def test_the_loss_is_the_sum_of_its_terms_and_so_is_its_gradient_bit_for_bit(kl, dtype):
    def gradient(reduce):
        tokens = random_tokens(dtype=dtype)
        leaves = [tokens[name].requires_grad_() for name in ("log_prob", "entropy")]
        value = reduce(make_loss(kl=kl, entropy_coef=0.3)(tokens))
        value.backward()
        return [value.detach(), *(leaf.grad for leaf in leaves)]

    ours, by_terms = (
        gradient(reduce) for reduce in (lambda x: x["loss"], lambda x: torch.stack([x[n] for n in LOSSES]).sum())
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, by_terms, strict=True)) and ours[1].abs().max() > 0
