"""The optimizer step against torch's own AdamW in fp32, and what happens when a gradient is not finite."""

from __future__ import annotations

import pytest
import torch

from grpo_rl.optimizer import NonFiniteError, PolicyOptimizer, lr_factor


def linear(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2, dtype=dtype)


def test_steps_equal_those_of_plain_adamw_with_clipping_and_warm_up():
    ours, plain = linear(), linear()
    stepper = PolicyOptimizer(ours, lr=1e-2, warmup_steps=2, clip_grad_norm=0.5, weight_decay=0.1)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(4):
        x = torch.full((4, 3), 1.0 + step)
        ours(x).square().sum().backward()
        plain(x).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = 1e-2 * [0.5, 1, 1, 1][step]
        adamw.step()
        adamw.zero_grad()
        assert stepper.step().grad_norm == pytest.approx(float(norm))
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_masters_keep_updates_that_bf16_weights_would_lose():
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    stepper = PolicyOptimizer(model, name="sgd", lr=1e-4, clip_grad_norm=1e9)
    for _ in range(100):
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        stepper.step()
    # 100 steps of 1e-4; bf16 has nothing between 1 and 0.996, so each alone would round back to 1.
    assert model.weight.item() == torch.tensor(0.99).bfloat16().item()
    assert stepper.state_dict()["masters"]["weight"].item() == pytest.approx(0.99, abs=1e-5)


def test_micro_batches_are_summed_in_fp32():
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    stepper = PolicyOptimizer(model, clip_grad_norm=1e9)
    for x in (256.0, 1.0):  # 257 is no bf16 number
        model(torch.full((1, 1), x, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is None
    assert stepper.step().grad_norm == 257.0


def test_a_step_that_is_not_finite_is_skipped_and_counted():
    model = linear()
    before = [p.clone() for p in model.parameters()]
    stepper = PolicyOptimizer(model, lr=1.0)
    (model(torch.ones(1, 3)) * torch.nan).sum().backward()
    result = stepper.step()
    assert result.skipped and stepper.bad_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model(torch.ones(1, 3)).sum().backward()
    assert not stepper.step().skipped
    assert all(p.isfinite().all() for p in model.parameters())


def test_too_many_bad_steps_in_a_row_stop_the_run_and_name_the_tensor():
    model = torch.nn.Sequential(linear(), torch.nn.Linear(2, 1))
    stepper = PolicyOptimizer(model, max_bad_steps=2)

    def bad_step():
        model(torch.ones(1, 3)).sum().backward()
        model[1].bias.grad.fill_(torch.inf)
        stepper.step()

    bad_step()
    with pytest.raises(NonFiniteError, match=r"2 steps in a row; first seen in 1\.bias, 1 of 4 tensors"):
        bad_step()


def test_a_restored_optimizer_goes_on_bit_for_bit():
    def run(steps, state=None):
        model = linear(torch.bfloat16)
        stepper = PolicyOptimizer(model, lr=1e-2, warmup_steps=3, total_steps=6, schedule="cosine")
        if state:
            stepper.load_state_dict(state)
        for step in range(stepper.steps, steps):
            model(torch.full((2, 3), step + 1.0, dtype=torch.bfloat16)).square().sum().backward()
            stepper.step()
        return model, stepper

    half = {k: v for k, v in run(3)[1].state_dict().items()}
    resumed, through = run(6, half)[0], run(6)[0]
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), through.parameters(), strict=True))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_schedules(schedule, expected):
    assert [lr_factor(step, 2, 6, schedule) for step in range(6)] == pytest.approx(expected, abs=1e-6)


def test_decay_can_end_above_zero():
    assert [lr_factor(step, 2, 6, "cosine", 0.1) for step in (1, 4, 6, 9)] == pytest.approx([1, 0.55, 0.1, 0.1])


@pytest.mark.parametrize("wrong", [{"name": "adam"}, {"schedule": "step"}, {"lr": -1.0}, {"clip_grad_norm": 0.0}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="optimizer"):
        PolicyOptimizer(linear(), **wrong)
