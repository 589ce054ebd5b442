"""A whole optimizer step: the same gradient however it is split, ordered or shared out; and what masks leave out."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from grpo_rl.data.batching import MicroBatching
from grpo_rl.data.group import Group
from grpo_rl.losses.aggregate import StepTotals
from grpo_rl.losses.factors import AGGREGATE
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group
from grpo_rl.training.micro_batches import scored_micro_batches, step_totals, top_entropy_floor
from tests.helpers import to_fp64

AGGREGATES = ("sequence_mean", "token_mean", "constant", "prompt_mean")
LOSS_SETTINGS = (
    {"kl_coef": 0.1, "entropy_coef": 0.05},
    {"ratio": "sequence", "clip_low": 0.1, "clip_high": 0.1},
    {"surrogate": "cispo", "correction": "truncate", "kl": "k3_is", "kl_coef": 0.1},
    {"surrogate": "sapo", "correction": "mask", "correction_level": "sequence"},
    {"surrogate": "gmpo", "correction": "truncate", "correction_level": "geometric", "off_policy_bound": 0.1},
    {"surrogate": "kl_cov", "kl_cov_fraction": 0.3},
    {"surrogate": "clip_cov", "clip_cov_fraction": 0.1},
)
MASKS = ({}, {"mask_truncated": True, "top_entropy_fraction": 0.4})


class Table(TrainPolicy):
    """A policy whose log-probabilities and entropies are parameters, one for each token: its gradient is the loss's."""

    def __init__(self, groups):
        generator = torch.Generator().manual_seed(1)

        def noisy(group, x):
            return (x + 0.5 * torch.randn(len(x), generator=generator, dtype=torch.float64)).requires_grad_()

        self.log_prob = {group.group_id: noisy(group, group.old_log_probs) for group in groups}
        self.entropy = {group.group_id: noisy(group, group.old_entropies) for group in groups}

    def score(self, groups):
        return tuple(torch.cat([of[group.group_id] for group in groups]) for of in (self.log_prob, self.entropy))

    def gradient(self):
        parameters = [of[i] for of in (self.log_prob, self.entropy) for i in sorted(of)]
        return torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])


def complete_group(lengths, seed, **fields):
    """A group of fp64 numbers with everything written that a loss may ask for; a third of its tokens are a tool's."""
    group = random_group(lengths=lengths, group_id=seed, seed=seed)
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(4, len(group.response_ids), generator=g, dtype=torch.float64)
    sampler = group.log_probs.double()
    return replace(
        group,
        log_probs=sampler,
        old_log_probs=sampler + 0.3 * noise[0],
        ref_log_probs=sampler + 0.5 * noise[1],
        old_entropies=noise[2].abs(),
        trainable=noise[3] > -0.4,
        advantages=torch.randn(group.size, generator=g, dtype=torch.float64),
        truncated=torch.rand(group.size, generator=g) < 0.3,
        **fields,
    )


def whole_step():
    """Seven groups of different sizes, with empty responses, responses of one token, and one zero-variance group."""
    lengths = [[3, 5], [1, 0, 4], [2, 2, 2, 2], [7], [1, 1], [0, 0], [6, 1, 3]]
    groups = [complete_group(n, seed) for seed, n in enumerate(lengths)]
    return [*groups[:-1], groups[-1].with_advantages(torch.zeros(3, dtype=torch.float64))]


def gradient(groups, loss, share=None, totals=None, **settings):
    """Gradient by every log-probability and entropy, of the groups' own loss or of the share that ``share`` names."""
    settings["aggregate"] = AGGREGATE.bound(settings.get("aggregate", "sequence_mean"), normalizer=9.0)
    policy, loss, batching = Table(groups), GRPOLoss(**loss), MicroBatching(**settings, covariance=(-0.5, 1.0))
    for tokens in scored_micro_batches(policy, groups if share is None else share, batching, totals):
        loss(tokens)["loss"].backward()
    return policy.gradient()


@pytest.mark.parametrize("masks", MASKS, ids=["all", "masked"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("loss", LOSS_SETTINGS, ids=["kl", "gspo", "cispo", "sapo", "gmpo", "kl_cov", "clip_cov"])
def test_neither_splits_nor_orders_nor_shares_of_a_step_change_its_gradient(loss, aggregate, masks):
    groups, settings = whole_step(), {"loss": loss, "aggregate": aggregate, **masks}
    expected = gradient(groups, max_tokens=10**6, **settings)
    assert expected.abs().max() > 1e-3
    for split in ({"max_tokens": 1}, {"max_tokens": 25}, {"max_tokens": 10**6, "count": 3}):
        for order in (groups, groups[::-1]):
            got = gradient(groups, share=order, **split, **settings)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    # As of two ranks: four groups and three, of other lengths, each scored under the totals of the step.
    totals = step_totals(groups, MicroBatching(1, **masks, covariance=(-0.5, 1.0)))
    shares = [gradient(groups, share=groups[rank::2], totals=totals, max_tokens=30, **settings) for rank in range(2)]
    torch.testing.assert_close(sum(shares), expected, rtol=0, atol=1e-12)


def tokens_of(groups, **settings):
    (tokens,) = scored_micro_batches(Table(groups), groups, MicroBatching(10**6, **settings))
    return tokens


def test_a_group_whose_responses_were_all_cut_is_not_computed():
    groups = [complete_group([2, 3], 0), complete_group([1, 4], 1)]
    groups[0] = replace(groups[0], truncated=torch.tensor([True, True]))
    groups[1] = replace(groups[1], truncated=torch.tensor([True, False]), trainable=torch.ones(5, dtype=torch.bool))
    tokens = tokens_of(groups, mask_truncated=True)
    assert tokens["group_id"].unique().tolist() == [1]
    assert not list(scored_micro_batches(Table(groups), groups[:1], MicroBatching(10**6, mask_truncated=True)))


def test_responses_that_were_cut_are_left_out_of_the_loss_and_of_its_counts():
    group = complete_group([2, 3, 1], 0)
    chosen = torch.tensor([True, True, True, True, False, True])
    group = replace(group, trainable=chosen, truncated=torch.tensor([False, True, False]))
    tokens = tokens_of([group], aggregate="token_mean", mask_truncated=True)
    assert tokens["trainable"].tolist() == [True, True, False, False, False, True]
    assert tokens["weight"].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 0, 0, 1 / 3])
    # In a mean over responses the cut one counts as one that costs nothing, as in TRL.
    by_responses = tokens_of([group], aggregate="sequence_mean", mask_truncated=True)
    assert by_responses["weight"].tolist() == pytest.approx([1 / 6, 1 / 6, 0, 0, 0, 1 / 3])
    assert tokens_of([group])["trainable"].tolist() == chosen.tolist()


def test_a_step_of_which_every_response_was_cut_has_no_gradient():
    group = replace(complete_group([2, 3], 0), truncated=torch.tensor([True, True]))
    for aggregate in AGGREGATES:
        settings = {"aggregate": aggregate, "mask_truncated": True, "top_entropy_fraction": 0.5}
        assert gradient([group], {"kl_coef": 0.1, "entropy_coef": 0.1}, max_tokens=99, **settings).eq(0).all()


def test_only_the_tokens_of_highest_entropy_of_the_whole_step_carry_the_policy_gradient():
    # Ten trained tokens in two groups; the 70 % quantile lies between 0.6 and 0.7. What a tool wrote doesn't count.
    entropies = [torch.tensor([0.1, 0.9, 0.2, 0.3]), torch.tensor([0.8, 0.0, 5.0, 5.0, 0.4, 0.7, 0.5, 0.6])]
    groups = [
        replace(complete_group(lengths, i), old_entropies=e, trainable=e < 5)
        for i, (lengths, e) in enumerate(zip(([4], [2, 6]), entropies, strict=True))
    ]
    settings = {"top_entropy_fraction": 0.3, "max_tokens": 1}
    scored = scored_micro_batches(Table(groups), groups, MicroBatching(**settings))
    kept = [tokens["advantage"].ne(0).tolist() for tokens in scored]
    assert [[i for i, token in enumerate(tokens) if token] for tokens in sorted(kept, key=len)] == [[1], [0, 2, 3, 5]]
    # KL and entropy bonus are of all tokens that are trained on.
    both = gradient(groups, {"kl_coef": 0.1, "entropy_coef": 0.1}, **settings)
    trained = torch.cat([group.trainable for group in groups]).repeat(2)
    assert torch.equal(both.ne(0), trained)


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@pytest.mark.parametrize("fraction", [0.05, 0.237, 0.5, 0.99])
def test_the_entropy_floor_keeps_the_tokens_that_the_quantile_keeps(count, fraction):
    entropies = torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    kept = entropies >= torch.quantile(entropies, 1 - fraction)
    assert torch.equal(entropies >= top_entropy_floor(entropies, fraction), kept)


def test_totals_count_empty_responses_and_not_what_is_masked():
    groups = whole_step()
    totals = step_totals(groups, MicroBatching(1))
    assert totals == StepTotals(17, sum(int(group.trainable.sum()) for group in groups), 7)
    masked = step_totals(groups, MicroBatching(1, mask_truncated=True))
    assert masked.sequences == 17 and 0 < masked.tokens < totals.tokens


@pytest.fixture(scope="module")
def model(tiny_model):
    return to_fp64(LlamaForCausalLM.from_pretrained(tiny_model))


def sampled_groups() -> list[Group]:
    return [random_group(lengths=n, group_id=i, seed=i, vocab=200) for i, n in enumerate(([3, 5], [1, 0, 4], [2, 2]))]


@pytest.mark.parametrize("max_tokens", [1, 10**6])
def test_the_policy_adds_what_it_says_before_it_is_trained(model, max_tokens):
    groups, policy = sampled_groups(), TrainPolicy(model, temperature=0.7)
    for group, before in zip(policy.add_log_probs(groups, max_tokens), groups, strict=True):
        log_prob, entropy = policy.score([before])
        assert not group.old_log_probs.requires_grad
        torch.testing.assert_close(group.old_log_probs, log_prob.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(group.old_entropies, entropy.detach(), rtol=0, atol=1e-12)
        assert group.log_probs is before.log_probs and group.ref_log_probs is None


def test_in_a_single_step_a_correction_needs_no_old_log_probs(model):
    groups = [g.with_advantages(torch.randn(g.size, dtype=torch.float64)) for g in sampled_groups()]
    policy = TrainPolicy(model)
    gradients = []
    for batch, settings in ((groups, {"on_policy": True}), (policy.add_log_probs(groups, 10**6), {})):
        model.zero_grad()
        for tokens in scored_micro_batches(policy, batch, MicroBatching(20, **settings)):
            GRPOLoss(correction="truncate")(tokens)["loss_objective"].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
    assert gradients[0].abs().max() > 1e-3
