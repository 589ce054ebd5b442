"""The log of tokens: what is written of them, why they have no gradient, and that all of it can be read back."""

import math
from dataclasses import fields, replace

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tiny_runs import same

from grpo_rl.data.batching import MicroBatching
from grpo_rl.data.group import Group
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts
from grpo_rl.monitor.stored_tokens import read_step
from grpo_rl.monitor.token_log import TokenLog, token_pieces
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group
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
    log.write(step, groups, coefs={})
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


def test_epochs_and_optimizer_steps_are_told_apart(tmp_path):
    a, b = group_of(0, [1, 1], [1, -1]), group_of(1, [1, 1], [1, -1])
    rows = log_step(tmp_path, [a, b], updates=[[b], [a], [a], [b]])
    visits = rows.groupby("group_id")[["epoch", "optimizer_step"]].apply(lambda x: sorted(set(map(tuple, x.values))))
    assert visits.tolist() == [[(0, 1), (1, 2)], [(0, 0), (1, 3)]]


def test_groups_come_back_as_they_were(tmp_path):
    full = group_of(0, [2, 0, 3], [1, 0, -1], truncated=torch.tensor([True, False, False]))
    full = full.with_old_log_probs(full.log_probs + 0.1, full.log_probs * -1)
    full = replace(full, ref_log_probs=full.log_probs - 0.2, sessions=torch.tensor([4, 4, 7]))
    plain = group_of(1, [1, 2], [0.25, -0.25])
    tool = group_of(2, [2, 2], [1, -1], trainable=torch.tensor([True, False, True, True]))
    groups = [full, plain, replace(tool, log_probs=tool.log_probs * tool.trainable)]
    log_step(tmp_path, groups, updates=[groups[:2], groups[2:]], shift=0.125)
    stored = read_step(tmp_path, 1)
    assert [update.groups for update in stored.updates] == [[0, 1], [2]]
    for ours, theirs in zip(groups, stored.groups, strict=True):
        for name in (f.name for f in fields(Group)):
            assert same(getattr(ours, name), getattr(theirs, name)), name
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


def test_groups_that_were_not_scored_or_not_taken_are_stored_with_null_in_the_trainers_columns(tmp_path):
    trained, alike = group_of(0, [1, 1], [1, -1]), group_of(1, [0, 1], [0, 0])
    left, empty = group_of(2, [2, 1], [1, -1]), group_of(3, [0, 0], [1, -1])
    rows = log_step(tmp_path, [trained, alike, left, empty], updates=[[trained, alike, empty]])
    trainers = ["log_prob", "entropy", "advantage", "ratio", "correction", "weight", "clipped"]
    assert rows.groupby("group_id")[trainers].count().max(axis=1).tolist() == [2, 0, 0]
    assert rows["sampler_log_prob"].notna().all() and rows[rows["group_id"] == 2]["epoch"].isna().all()
    stored = read_step(tmp_path, 1)
    assert torch.equal(stored.groups[2].response_ids, left.response_ids) and stored.groups[3].size == 2
    assert stored.updates[0].groups == [0, 1, 3]


def test_a_file_that_was_changed_is_refused_by_name(tmp_path):
    log_step(tmp_path, [group_of(0, [1, 2], [1, -1])])
    parts = StepParts(tmp_path / TOKENS_FOLDER)
    parts.write(1, parts.read(1).slice(0, 2))
    with pytest.raises(ValueError, match="part-00000001.parquet is not as it was written"):
        read_step(tmp_path, 1)


def test_without_lineage_the_text_of_the_group_that_was_scored_first_is_recorded_once(tmp_path):
    left_out, group, other = (random_group(lengths=[1, 2], group_id=i) for i in (4, 5, 6))
    group = replace(group, response_ids=torch.tensor([0, 1, 2]), trainable=torch.tensor([True, True, False]))
    log = TokenLog(tmp_path, {"policy": {}, "loss": {"mask_truncated": False}}, 1, letters)
    for first in (0.0, -10.0):
        log.begin([left_out, group, other])
        ids = torch.tensor([group_id for group_id in (6, 5) for _ in range(3)])
        numbers = first - torch.arange(6.0)
        log.add(TensorDict(group_id=ids, log_prob=numbers, entropy=-numbers, batch_size=[6]), None)
    log.write(3, [left_out, group, other], {})
    found = read(tmp_path, 3)
    assert found[["step", "group_id", "epoch"]].drop_duplicates().to_numpy().tolist() == [[3, 5, 0]]
    assert found["text"].tolist() == ["a", "b", "c"]
    assert found["sampler_log_prob"].isna().tolist() == [False, False, True]  # no one sampled what a tool wrote
    assert found["log_prob"].tolist() == [-3.0, -4.0, -5.0] and found["entropy"].tolist() == [3.0, 4.0, 5.0]
    log.begin([group])
    log.write(4, [group], {})  # all of this step had zero variance
    assert read(tmp_path, 4)["log_prob"].isna().all() and len(read(tmp_path, 4)) == 3


@given(st.lists(st.integers(1, 255), max_size=40))
def test_the_pieces_of_a_response_are_the_response(tokenizer, ids):
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    found = token_pieces(tokenizer, ids)
    assert len(found) == len(ids) and "".join(piece for piece, special in found if not special) == text
