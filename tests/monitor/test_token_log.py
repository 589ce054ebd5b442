"""The log of tokens: what is written of them, why they have no gradient, and that all of it can be read back."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from transformers import AutoTokenizer

from grpo_rl.data.batching import MicroBatching
from grpo_rl.data.group import Group
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts
from grpo_rl.monitor.stored_tokens import read_step
from grpo_rl.monitor.token_log import TokenLog, TokenPieces
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group, save_tiny_model
from grpo_rl.training.micro_batches import scored_micro_batches


class Said(TrainPolicy):
    """A policy that says, of every token, the sampler's log-probability plus ``shift``, and its id as its entropy."""

    def __init__(self, shift=0.0):
        self.shift = shift

    def score(self, groups):
        log_prob = torch.cat([group.log_probs for group in groups]) + self.shift
        return log_prob.requires_grad_(), torch.cat([group.response_ids for group in groups]).float()


def group_of(group_id, lengths, advantages, **changes):
    group = random_group(lengths=lengths, group_id=group_id, seed=group_id, rewards=[float(a) for a in advantages])
    group = replace(group, reward_parts={"correct": group.rewards, "form": group.rewards * 0}, **changes)
    return group.with_advantages(torch.tensor([float(a) for a in advantages]))


def letters(ids):
    return [(chr(97 + i % 26), False) for i in ids]


def read(folder, step):
    return pd.read_parquet(folder / TOKENS_FOLDER / f"part-{step:08d}.parquet")


def log_step(run_dir, groups, updates=None, loss=None, step=1, shift=0.0, **settings):
    """Plays a collection's optimizer steps, each on the groups given, and writes it."""
    loss, batching = loss or GRPOLoss(), MicroBatching(8, skip_zero_advantage=True, **settings)
    config = {"loss": {"mask_truncated": settings.get("mask_truncated", False)}, "policy": {}}
    log = TokenLog(run_dir, config, 1, letters, loss)
    for batch in updates or [groups]:
        log.begin(batch)
        for tokens in scored_micro_batches(Said(shift), batch, batching):
            log.add(tokens, loss(tokens))
        log.end(grad_norm=1.5, lr=0.1, skipped=False)
    log.write(step, groups, kl_coef=0.0)
    return read(run_dir, step)


def test_a_row_holds_where_a_token_came_from_and_what_the_loss_made_of_it(tmp_path):
    group = group_of(7, [1, 2], [1, -1], versions=torch.tensor([3, 3, 4]))
    rows = log_step(tmp_path, [group], shift=0.5)
    assert rows[["group_id", "row", "step"]].drop_duplicates().values.tolist() == [[7, 7, 1]]
    assert rows[["response", "position", "policy_version"]].values.tolist() == [[0, 0, 3], [1, 0, 3], [1, 1, 4]]
    assert rows["token_id"].tolist() == group.response_ids.tolist()
    assert rows["advantage"].tolist() == [1, -1, -1]
    assert rows["weight"].tolist() == [0.5, 0.25, 0.25]  # a mean over each response's tokens, then over the two
    assert torch.tensor(rows["ratio"]) == pytest.approx(math.exp(0.5))
    assert (rows["log_prob"] - rows["sampler_log_prob"]).tolist() == pytest.approx([0.5] * 3, abs=1e-6)
    assert rows["clipped"].tolist() == [True, False, False]  # a ratio of 1.6: the good response's is clipped at 1.2
    assert rows[["old_log_prob", "ref_log_prob", "mask_reason"]].isna().all(axis=None)


def test_each_reason_for_no_gradient_is_named(tmp_path):
    # Ids are what `Said` gives as entropies; of the 7 trained tokens of both groups the highest half is 19 and more.
    first = group_of(
        0, [4, 2], [1, -1],
        response_ids=torch.tensor([30, 31, 5, 32, 33, 34]),
        trainable=torch.tensor([True, False, True, True, True, True]),
        truncated=torch.tensor([False, True]),
    )  # fmt: skip
    alike = group_of(1, [2, 2], [0, 0], response_ids=torch.tensor([20, 1, 2, 19]))
    rho = torch.tensor([0.0, 0.0, 0.0, math.log(9.0), 0.0, 0.0])  # the trainer says 9 times the sampler's probability
    first = first.with_old_log_probs(first.log_probs + rho, first.response_ids.float())
    alike = alike.with_old_log_probs(alike.log_probs, alike.response_ids.float())
    rows = log_step(
        tmp_path, [first, alike], loss=GRPOLoss(correction="mask"), mask_truncated=True, top_entropy_fraction=0.5
    )
    reasons = rows.sort_values(["group_id", "response", "position"])["mask_reason"].astype(object)
    assert reasons.where(reasons.notna(), None).tolist() == [
        None, "tool", "low_entropy", "correction", "truncated", "truncated", *["zero_advantage_group"] * 4,
    ]  # fmt: skip


def test_a_group_that_was_not_scored_has_null_in_the_trainers_columns(tmp_path):
    rows = log_step(tmp_path, [group_of(0, [2, 1], [1, -1]), group_of(1, [1, 1], [0, 0])])
    skipped = rows[rows["group_id"] == 1]
    trainers = ["log_prob", "entropy", "advantage", "ratio", "correction", "weight", "clipped"]
    assert skipped[trainers].isna().all(axis=None) and skipped["sampler_log_prob"].notna().all()
    assert rows[rows["group_id"] == 0][trainers].notna().all(axis=None)


def test_epochs_and_optimizer_steps_are_told_apart(tmp_path):
    a, b = group_of(0, [1, 1], [1, -1]), group_of(1, [1, 1], [1, -1])
    rows = log_step(tmp_path, [a, b], updates=[[b], [a], [a], [b]])
    visits = rows.groupby("group_id")[["epoch", "optimizer_step"]].apply(lambda x: sorted(set(map(tuple, x.values))))
    assert visits.tolist() == [[(0, 1), (1, 2)], [(0, 0), (1, 3)]]


def test_groups_come_back_as_they_were(tmp_path):
    full = group_of(0, [2, 0, 3], [1, 0, -1], truncated=torch.tensor([True, False, False]))
    full = full.with_old_log_probs(full.log_probs + 0.1, full.log_probs * -1)
    full = replace(full, measures={"words": full.rewards + 2})
    full = replace(full, ref_log_probs=full.log_probs - 0.2)
    plain = group_of(1, [1, 2], [0.25, -0.25])
    tool = group_of(2, [2, 2], [1, -1], trainable=torch.tensor([True, False, True, True]))
    empty = group_of(3, [0, 0], [1, -1], prompt_ids=torch.zeros(0, dtype=torch.long))  # without a row for its prompt
    groups = [full, plain, replace(tool, log_probs=tool.log_probs * tool.trainable), empty]
    log_step(tmp_path, groups, updates=[groups[:2], groups[2:]], shift=0.125)
    stored = read_step(tmp_path, 1)
    assert [update.groups for update in stored.updates] == [[0, 1], [2, 3]]
    for ours, theirs in zip(groups, stored.groups, strict=True):
        for name in (f.name for f in fields(Group)):
            a, b = getattr(ours, name), getattr(theirs, name)
            if isinstance(a, dict):
                assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a), name
            elif isinstance(a, torch.Tensor):
                assert torch.equal(a, b) and a.dtype == b.dtype, name
            else:
                assert a == b, name
    log_prob, entropy = stored.updates[0].scored[1]
    assert torch.equal(log_prob, plain.log_probs + 0.125) and torch.equal(entropy, plain.response_ids.float())


def test_a_number_that_is_not_finite_comes_back_and_hides_no_other(tmp_path):
    group = group_of(0, [2, 1], [1, -1])
    group = replace(group, ref_log_probs=torch.tensor([-1.0, math.nan, -2.0]))
    group = replace(group, log_probs=torch.tensor([math.nan, -1.0, -1.0]))
    log_step(tmp_path, [group])
    (back,) = read_step(tmp_path, 1).groups
    assert torch.equal(back.ref_log_probs.nan_to_num(7.0), torch.tensor([-1.0, 7.0, -2.0]))
    assert torch.equal(back.log_probs.nan_to_num(7.0), torch.tensor([7.0, -1.0, -1.0]))


def test_a_group_that_no_optimizer_step_took_is_stored_too(tmp_path):
    trained, left = group_of(0, [1, 1], [1, -1]), group_of(1, [2, 1], [1, -1])
    rows = log_step(tmp_path, [trained, left], updates=[[trained]])
    assert rows[rows["group_id"] == 1]["epoch"].isna().all()
    stored = read_step(tmp_path, 1)
    assert torch.equal(stored.groups[1].response_ids, left.response_ids) and stored.updates[0].groups == [0]


def test_a_whole_run_is_read_at_once_and_a_step_that_is_not_stored_is_refused(tmp_path):
    for step in (1, 2, 3):
        log_step(tmp_path, [group_of(step, [1, 2], [1, -1])], step=step)
    assert pd.read_parquet(tmp_path / TOKENS_FOLDER)["step"].tolist() == [1] * 3 + [2] * 3 + [3] * 3
    StepParts(tmp_path / TOKENS_FOLDER).truncate(1)
    with pytest.raises(ValueError, match="has no lineage of step 2: it has steps 1 to 1"):
        read_step(tmp_path, 2)


def scored(*groups):
    ids = torch.tensor([group.group_id for group in groups for _ in group.response_ids])
    count = torch.arange(len(ids), dtype=torch.float32)
    return TensorDict(group_id=ids, log_prob=-count, entropy=10 + count, batch_size=[len(ids)])


def few_groups(folder, count):
    return TokenLog(folder, {"policy": {}, "loss": {"mask_truncated": False}}, count, letters)


def test_tokens_of_the_first_scored_group_are_recorded_with_both_log_probs(tmp_path):
    left_out, group, other = (random_group(lengths=[1, 2], group_id=i) for i in (4, 5, 6))
    group = replace(
        group,
        log_probs=torch.tensor([-0.5, -0.25, -9.0]),
        trainable=torch.tensor([True, True, False]),
        versions=torch.tensor([2, 2, 3]),
        response_ids=torch.tensor([0, 1, 2]),
    )
    log = few_groups(tmp_path, 1)
    log.begin([left_out, group, other])
    log.add(scored(other, group), None)
    log.write(3, [left_out, group, other], 0.0)
    found = read(tmp_path, 3)
    assert found[["step", "group_id"]].drop_duplicates().to_numpy().tolist() == [[3, 5]]
    assert found["response"].tolist() == [0, 1, 1] and found["position"].tolist() == [0, 0, 1]
    assert found["text"].tolist() == ["a", "b", "c"] and found["token_id"].tolist() == [0, 1, 2]
    assert found["sampler_log_prob"].fillna(7).tolist() == [-0.5, -0.25, 7]  # no one sampled what a tool wrote
    assert found["log_prob"].tolist() == [-3.0, -4.0, -5.0] and found["entropy"].tolist() == [13.0, 14.0, 15.0]
    assert found["policy_version"].tolist() == [2, 2, 3] and found["trainable"].tolist() == [True, True, False]


def test_the_first_visit_of_a_group_counts_and_no_number_goes_over_to_the_next_step(tmp_path):
    group = random_group(lengths=[2, 1], group_id=5)
    log = few_groups(tmp_path, 2)
    log.begin([group])
    log.add(scored(group), None)
    later = scored(group)
    later["log_prob"] -= 1
    log.begin([group])
    log.add(later, None)
    log.write(1, [group], 0.0)
    assert read(tmp_path, 1)["log_prob"].tolist() == [0.0, -1.0, -2.0]
    log.begin([group])
    log.write(2, [group], 0.0)  # all of this step had zero variance
    assert read(tmp_path, 2)["log_prob"].isna().all() and len(read(tmp_path, 2)) == 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("model")))


@given(st.lists(st.integers(1, 255), max_size=40))
def test_the_pieces_of_a_response_are_the_response(tokenizer, ids):
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    found = TokenPieces(tokenizer)(ids)
    assert len(found) == len(ids) and "".join(piece for piece, special in found if not special) == text
