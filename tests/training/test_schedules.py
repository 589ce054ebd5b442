from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_rl.policies.policy import ReferencePolicy
from grpo_rl.testing import random_group, save_tiny_model
from grpo_rl.training.schedules import AdaptiveKL, GroupSizes, RefreshRule, Schedules


def test_the_coefficient_rises_above_the_target_and_falls_below_it_by_the_clipped_error():
    kl = AdaptiveKL(1.0, target=0.1, gain=0.1)
    assert kl.update(0.3) == pytest.approx(1.02)  # error 2, clipped at 0.2
    assert kl.update(0.11) == pytest.approx(1.02 * 1.01)  # error 0.1
    assert kl.update(0.1) == pytest.approx(1.02 * 1.01)
    assert kl.update(0.0) == pytest.approx(1.02 * 1.01 * 0.98)  # error -1, clipped at -0.2


def test_a_policy_that_drifts_with_less_pull_ends_near_the_target():
    # A stationary policy whose KL is inversely proportional to the coefficient: 0.04 / coef, so 0.02 at coef = 2.
    kl = AdaptiveKL(0.1, target=0.02, gain=0.5)
    for _ in range(200):
        kl.update(0.04 / kl.coef)
    assert kl.coef == pytest.approx(2.0, rel=1e-3)


def test_without_a_target_or_with_a_kl_that_is_not_finite_the_coefficient_stays():
    assert AdaptiveKL(0.1).update(5.0) == 0.1
    kl = AdaptiveKL(0.1, target=0.02)
    assert kl.update(math.nan) == kl.update(math.inf) == 0.1


def test_group_sizes_hold_from_their_step_on():
    sizes = GroupSizes(8, [(5, 4), (3, 6)])
    assert [sizes.at(step) for step in range(1, 8)] == [8, 8, 6, 6, 4, 4, 4]
    assert GroupSizes(8).at(1000) == 8


def test_the_number_of_steps_is_that_of_a_run_counted_response_by_response():
    for changes in ([], [(2, 4)], [(3, 4), (5, 16)], [(1, 2)]):
        sizes = GroupSizes(8, changes)
        for responses in (1, 23, 24, 25, 48, 49, 72, 100, 1000):
            sampled = steps = 0
            while sampled < responses:
                steps += 1
                sampled += 3 * sizes.at(steps)
            assert sizes.steps_for(responses, prompts=3) == steps, (changes, responses)


@pytest.mark.parametrize("pair", [[3], [3, 1]])
def test_what_is_no_pair_and_a_group_of_one_are_refused(pair):
    with pytest.raises(ValueError, match="train.repeats_schedule has"):
        GroupSizes(8, [pair])


def test_the_reference_is_renewed_every_so_many_steps_or_never_or_always():
    rule = RefreshRule("steps", steps=3)
    due = [rule.is_due(0.0) for _ in range(7)]
    assert due == [False, False, True, False, False, True, False]
    assert not any(RefreshRule("never", steps=1).is_due(1.0) for _ in range(5))
    rule = RefreshRule("average", steps=3)
    assert all(rule.is_due(0.0) for _ in range(5))


def test_a_plateau_is_a_window_no_better_than_the_one_before_and_both_begin_behind_a_refresh():
    rule = RefreshRule("plateau", steps=2)
    rewards = [0.0, 0.1, 0.2, 0.3, 0.3, 0.2, 0.2, 0.2, 0.2, 0.2]
    # step 6: 0.3 + 0.2 against 0.2 + 0.3 is no rise; then steps 7 and 8 against 9 and 10
    assert [step for step, reward in enumerate(rewards, 1) if rule.is_due(reward)] == [6, 10]


def test_a_resumed_rule_is_due_when_the_first_one_would_have_been():
    rule, resumed = RefreshRule("plateau", steps=2), RefreshRule("plateau", steps=2)
    for reward in (0.5, 0.5, 0.5):
        assert not rule.is_due(reward)
    resumed.rewards = list(rule.rewards)
    assert rule.is_due(0.5) and resumed.is_due(0.5)


# ---- all of one run ----


class Reference:
    def __init__(self):
        self.calls, self.weights = [], 0.0

    def refresh(self, model, decay):
        self.calls.append((model, decay))
        self.weights = 1.0

    def state(self):
        return {"w": torch.tensor(self.weights)}

    def restore(self, state):
        self.weights = float(state["w"])


def make(reference, when="steps", target=0.02):
    loss = SimpleNamespace(kl_coef=0.1)
    policy = SimpleNamespace(model="the policy's model")
    rule, kl = RefreshRule(when, steps=2, decay=0.9), AdaptiveKL(0.1, target, gain=0.5)
    return loss, Schedules(GroupSizes(8, [(3, 4)]), kl, rule, loss, reference, policy)


def test_behind_each_step_the_coefficient_moves_and_the_reference_is_renewed_when_due():
    reference = Reference()
    loss, schedules = make(reference)
    logged = [schedules.after_step({"reward/mean": 0.0, "kl/ref": kl}) for kl in (0.04, 0.018, 0.02)]
    assert [row["kl/coef"] for row in logged] == pytest.approx([0.1, 0.11, 0.1045])  # what each step was trained with
    assert [row["reference/refreshes"] for row in logged] == [0, 1, 1]
    assert reference.calls == [("the policy's model", 0.0)] and loss.kl_coef == pytest.approx(0.1045)


def test_a_moving_average_keeps_its_share_of_itself_in_every_step():
    reference = Reference()
    _, schedules = make(reference, when="average")
    for _ in range(3):
        schedules.after_step({"reward/mean": 0.0, "kl/ref": 0.02})
    assert reference.calls == [("the policy's model", 0.9)] * 3


def test_a_plateau_is_of_all_that_was_sampled_not_of_what_dynamic_sampling_kept():
    reference = Reference()
    _, schedules = make(reference, when="plateau")
    for sampled in (0.1, 0.2, 0.3, 0.4):
        schedules.after_step({"reward/mean": 0.5, "reward/sampled_mean": sampled, "kl/ref": 0.02})
    assert reference.calls == []


def test_a_resumed_run_has_the_coefficient_the_window_and_the_reference_of_the_first():
    _, first = make(Reference())
    first.after_step({"reward/mean": 0.0, "kl/ref": 0.04})
    assert first.state()["reference"] is None  # it is still what training began with
    first.after_step({"reward/mean": 0.0, "kl/ref": 0.04})
    reference = Reference()
    loss, second = make(reference)
    second.restore(first.state())
    assert loss.kl_coef == pytest.approx(0.1 * 1.1**2) and reference.weights == 1.0
    assert second.after_step({"reward/mean": 0.0, "kl/ref": 0.02})["reference/refreshes"] == 1


@pytest.mark.slow
def test_a_refreshed_reference_is_the_policy_and_an_average_is_summed_in_fp32(tmp_path):
    folder = save_tiny_model(tmp_path)
    reference = ReferencePolicy.load(folder, torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    before = {name: parameter.float().clone() for name, parameter in reference.model.named_parameters()}
    target = {name: parameter.float() for name, parameter in model.named_parameters()}
    for _ in range(100):
        reference.refresh(model, decay=0.999)  # a step of a thousandth, which bfloat16 would round away
    state = reference.state()
    for name, start in before.items():
        expected = target[name] + (start - target[name]) * 0.999**100
        torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-4)
    resumed = ReferencePolicy.load(folder, torch.bfloat16)
    resumed.restore(state)
    for ours, theirs in zip(resumed.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    resumed.refresh(model, decay=0.999)
    reference.refresh(model, decay=0.999)
    assert all(torch.equal(resumed.state()[name], reference.state()[name]) for name in state)
    copy = ReferencePolicy.load(folder, torch.bfloat16)
    copy.refresh(model)
    assert all(torch.equal(a, b) for a, b in zip(copy.model.parameters(), model.parameters(), strict=True))
    group = random_group(lengths=[2, 3])
    plain = ReferencePolicy(model)
    ours, theirs = (policy.add_log_probs([group], 100)[0].ref_log_probs for policy in (copy, plain))
    assert torch.equal(ours, theirs)
