"""Groups: the way to TorchRL's layout and back, and how they are split into micro-batches."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from grpo_rl import keys
from grpo_rl.rollout import Group, micro_batches
from grpo_rl.testing import random_group


def assert_equal(a, b):
    for f in fields(Group):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, y) and x.dtype == y.dtype, f.name
        elif isinstance(x, dict):
            assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x), f.name
        else:
            assert x == y, f.name


def test_to_tensordict_and_back_is_the_same_group():
    from dataclasses import replace

    group = replace(
        random_group(lengths=[3, 1, 2], group_id=7),
        reward_parts={"a": torch.tensor([0.0, 1.0, 2.0])},
        advantages=torch.tensor([-1.0, 0.0, 1.0]),
        ref_log_probs=-torch.arange(6.0),
        trainable=torch.tensor([True, False, True, True, True, False]),
    )
    assert_equal(Group.from_tensordict(group.to_tensordict()), group)


def test_the_tensordict_has_torchrls_keys_and_shapes():
    td = random_group(prompt=4, lengths=[3, 2]).with_advantages(torch.tensor([1.0, -1.0])).to_tensordict()
    assert td.batch_size == (2,)
    assert [row[keys.TOKENS_FULL].shape[0] for row in td.unbind(0)] == [7, 6]
    first = td[0]
    assert first[keys.ASSISTANT_MASK].tolist() == [False] * 4 + [True] * 3
    assert first[keys.LOG_PROBS_FULL][:4].tolist() == [0.0] * 4
    assert first[keys.ADVANTAGE].tolist() == [[1.0]] * 7 and first[keys.REWARD].shape == (1, 1)


def test_torchrls_own_grpo_loss_accepts_the_layout():
    from torchrl.objectives.llm import GRPOLoss

    group = random_group(prompt=4, lengths=[3, 3]).with_advantages(torch.tensor([1.0, -1.0]))
    td = torch.stack([TensorDict(row.to_dict(), []) for row in group.to_tensordict().unbind(0)]).contiguous()

    class Actor(torch.nn.Module):
        """Says that the sampled tokens have the probabilities that the sampler gave them."""

        log_probs_key = ("log_probs", "full")

        def get_dist(self, td, **_):
            from torch.distributions import Distribution

            class Same(Distribution):
                mask = td[keys.ASSISTANT_MASK]

                def log_prob(self, _tokens):
                    return td[keys.LOG_PROBS_FULL]

                def entropy(self):
                    return torch.zeros_like(td[keys.LOG_PROBS_FULL])

            return Same(validate_args=False)

    loss = GRPOLoss(Actor(), entropy_bonus=False, clip_epsilon=0.2)
    # Ratios are 1 and advantages cancel over the six tokens.
    assert float(loss(td).loss_objective) == pytest.approx(0.0, abs=1e-7)


def test_rows_of_two_groups_are_refused():
    rows = [g.to_tensordict()[0] for g in (random_group(group_id=1), random_group(group_id=2))]
    from tensordict import lazy_stack

    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        Group.from_tensordict(lazy_stack(rows))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(10, 80))
def test_micro_batches_hold_every_group_once_and_keep_the_budget(lengths, budget):
    groups = [random_group(prompt=3, lengths=[n], group_id=i) for i, n in enumerate(lengths)]
    split = micro_batches(groups, budget)
    assert sorted(g.group_id for micro in split for g in micro) == list(range(len(groups)))
    for micro in split:
        assert len(micro) == 1 or sum(g.num_tokens for g in micro) <= budget


def test_a_fixed_count_gives_that_many_micro_batches():
    groups = [random_group(group_id=i) for i in range(5)]
    assert len(micro_batches(groups, 10_000, count=3)) == 3
    with pytest.raises(ValueError, match="6 micro-batches cannot be made of 5"):
        micro_batches(groups, 10_000, count=6)
