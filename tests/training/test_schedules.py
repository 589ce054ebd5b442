import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_rl.policies.policy import ReferencePolicy
from grpo_rl.testing import random_group
from grpo_rl.training.schedules import AdaptiveEntropy, AdaptiveKL, RefreshRule, Schedules


def test_the_coefficient_rises_above_the_target_and_falls_below_it_by_the_clipped_error():
    kl = AdaptiveKL(1.0, target=0.1, gain=0.1)
    assert kl.update(0.3) == pytest.approx(1.02)  # error 2, clipped at 0.2
    assert kl.update(0.11) == pytest.approx(1.02 * 1.01)  # error 0.1
    assert kl.update(0.1) == pytest.approx(1.02 * 1.01)
    assert kl.update(0.0) == pytest.approx(1.02 * 1.01 * 0.98)  # error -1, clipped at -0.2
    assert kl.update(math.nan) == kl.update(math.inf) == pytest.approx(1.02 * 1.01 * 0.98)
    assert AdaptiveKL(0.1).update(5.0) == 0.1  # without a target


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
    return loss, Schedules(kl, rule, loss, reference, policy)


def test_behind_each_step_the_coefficient_moves_and_the_reference_is_renewed_when_due():
    reference = Reference()
    loss, schedules = make(reference)
    logged = [schedules.after_step({"reward/mean": 0.0, "kl/ref": kl}) for kl in (0.04, 0.018, 0.02)]
    assert [row["kl/coef"] for row in logged] == pytest.approx([0.1, 0.11, 0.1045])  # what each step was trained with
    assert [row["reference/refreshes"] for row in logged] == [0, 1, 1]
    assert reference.calls == [("the policy's model", 0.0)] and loss.kl_coef == pytest.approx(0.1045)
    for when, calls in (("never", []), ("average", [("the policy's model", 0.9)] * 3)):
        _, schedules = make(reference := Reference(), when)
        for _ in range(3):
            schedules.after_step({"reward/mean": 0.0, "kl/ref": 0.02})
        assert reference.calls == calls


def test_the_entropy_bonus_is_in_force_below_the_target_and_a_resumed_run_goes_on_with_it():
    def make_entropy():
        loss, entropy = SimpleNamespace(kl_coef=0.0, entropy_coef=0.01), AdaptiveEntropy(0.01, 0.2, 0.005, most=0.02)
        return loss, Schedules(AdaptiveKL(0.0), RefreshRule(), loss, entropy=entropy, loss=loss)

    loss, first = make_entropy()
    logged = [first.after_step({"entropy": entropy})["entropy_coef"] for entropy in (0.1, 0.1, 0.1, 0.3, 0.2)]
    # By hand: it rises to 0.015 and 0.02, stays there, and falls to 0.015, out of force; then it is 0.02 again.
    assert logged == pytest.approx([0.01, 0.015, 0.02, 0.02, 0.0]) and loss.entropy_coef == pytest.approx(0.02)
    first.after_step({"entropy": 0.3})
    loss, second = make_entropy()
    second.restore(first.state())
    assert loss.entropy_coef == 0 == second.after_step({"entropy": 0.1})["entropy_coef"]
    assert loss.entropy_coef == pytest.approx(0.02)


def test_a_resumed_run_has_the_coefficient_the_count_of_steps_and_the_reference_of_the_first():
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
def test_a_refreshed_reference_is_the_policy_and_an_average_is_summed_in_fp32(tiny_model):
    reference = ReferencePolicy.load(tiny_model, torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
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
    resumed = ReferencePolicy.load(tiny_model, torch.bfloat16)
    resumed.restore(state)
    for ours, theirs in zip(resumed.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    resumed.refresh(model, decay=0.999)
    reference.refresh(model, decay=0.999)
    assert all(torch.equal(resumed.state()[name], reference.state()[name]) for name in state)
    copy = ReferencePolicy.load(tiny_model, torch.bfloat16)
    copy.refresh(model)
    assert all(torch.equal(a, b) for a, b in zip(copy.model.parameters(), model.parameters(), strict=True))
    group = random_group(lengths=[2, 3])
    plain = ReferencePolicy(model)
    ours, theirs = (policy.add_log_probs([group], 100)[0].ref_log_probs for policy in (copy, plain))
    assert torch.equal(ours, theirs)
