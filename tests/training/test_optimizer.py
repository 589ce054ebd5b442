"""The optimizer step against torch's own AdamW in fp32, sums of gradients, and gradients that are not finite."""

import pytest
import torch

from grpo_rl.training import optimizer
from grpo_rl.training.optimizer import GradientQueue, NonFiniteError, PolicyOptimizer, lr_factor


def linear(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2, dtype=dtype)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_steps_equal_those_of_torchs_with_clipping_warm_up_and_decay_of_the_matrix_alone(name):
    ours, plain = linear(), linear()
    stepper = PolicyOptimizer(ours, name, lr=1e-2, warmup_steps=2, clip_grad_norm=0.5, weight_decay=5.0)
    groups = [{"params": [plain.weight]}, {"params": [plain.bias], "weight_decay": 0.0}]
    betas = {"betas": (0.9, 0.95)} if name == "adamw" else {}
    theirs = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name](groups, lr=1e-2, weight_decay=5.0, **betas)
    for step in range(4):
        x = torch.full((4, 3), 1.0 + step)
        ours(x).square().sum().backward()
        plain(x).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for group in theirs.param_groups:
            group["lr"] = 1e-2 * [0.5, 1, 1, 1][step]
        theirs.step()
        theirs.zero_grad()
        assert stepper.step().grad_norm == pytest.approx(float(norm))
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_bf16_weights_are_clipped_on_their_masters():
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    stepper = PolicyOptimizer(model, name="sgd", lr=1.0, clip_grad_norm=0.5)
    model(torch.full((1, 1), 4.0, dtype=torch.bfloat16)).sum().backward()
    assert stepper.step().grad_norm == 4.0  # of which 0.5 is left
    assert model.weight.item() == 0.5


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
    assert stepper.step().grad_norm == 257.0


def test_queued_gradients_are_the_sums_in_fp32(monkeypatch):
    monkeypatch.setattr(optimizer, "HELD_BYTES", 300)
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, 5).bfloat16()) for n in (3, 40, 7)]
    masters = [param.detach().float().clone() for param in params]
    queue = GradientQueue()
    for param, master in zip(params, masters, strict=True):
        param.register_post_accumulate_grad_hook(queue.hook(master))
    expected = [torch.zeros_like(master) for master in masters]
    for _ in range(3):
        factors = [torch.randn(param.shape).bfloat16() for param in params]
        sum((param * factor).sum().float() for param, factor in zip(params, factors, strict=True)).backward()
        assert all(param.grad is None for param in params)
        for total, factor in zip(expected, factors, strict=True):
            total += factor.float()
    queue.flush()
    for master, total in zip(masters, expected, strict=True):
        assert torch.equal(master.grad, total)
    params[0].sum().backward()
    queue.clear()
    queue.flush()
    assert torch.equal(masters[0].grad, expected[0]), "what was cleared is not added"


def test_a_gradient_in_fp32_is_the_masters_at_once_and_no_copy():
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    master, queue = param.detach().float().clone(), GradientQueue()
    take = queue.hook(master)
    first = param.grad = torch.full((4,), 1 / 3)
    take(param)
    assert master.grad is first and param.grad is None
    param.grad = torch.full((4,), 1 / 5)
    take(param)
    assert torch.equal(master.grad, torch.full((4,), 1 / 3) + torch.full((4,), 1 / 5))
    queue.flush()
    assert master.grad is first, "nothing waited"


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
    model(torch.ones(1, 3)).sum().backward()
    result = stepper.step(loss_is_finite=False)  # though its gradient is
    assert result.skipped and "the loss is not finite" in result.trouble
    assert all(p.isfinite().all() for p in model.parameters())


def test_too_many_bad_steps_in_a_row_stop_the_run_and_name_the_tensor():
    model = torch.nn.Sequential(linear(), torch.nn.Linear(2, 1))
    stepper = PolicyOptimizer(model, max_bad_steps=2)

    def bad_step():
        model(torch.ones(1, 3)).sum().backward()
        model[1].bias.grad.fill_(torch.inf)
        return stepper.step()

    assert "first seen in 1.bias, 1 of 4 tensors. Weights were not touched." in bad_step().trouble
    with pytest.raises(NonFiniteError, match=r"2 steps in a row: .* in 1\.bias, 1 of 4 tensors.*optimizer\.lr"):
        bad_step()


def test_the_cause_is_sought_once_in_a_row_of_bad_steps_and_again_before_the_error():
    model, asked = linear(), []

    def explain():
        asked.append(len(asked))
        return f"Found {len(asked)}."

    def bad_step():
        (model(torch.ones(1, 3)) * torch.nan).sum().backward()
        return stepper.step(explain=explain).trouble

    stepper = PolicyOptimizer(model, max_bad_steps=3)
    assert bad_step().endswith("Found 1.") and bad_step() is None
    model(torch.ones(1, 3)).sum().backward()
    assert stepper.step(explain=explain).trouble is None and len(asked) == 1
    assert bad_step().endswith("Found 2.") and bad_step() is None
    with pytest.raises(NonFiniteError, match="Found 3"):
        bad_step()


def test_a_gradient_whose_square_overflows_does_not_poison_the_moments():
    model = linear()
    stepper = PolicyOptimizer(model, lr=1e-2, clip_grad_norm=1e30)
    (model(torch.ones(1, 3)) * 1e25).sum().backward()
    assert "too large for fp32" in stepper.step().trouble
    model(torch.ones(1, 3)).sum().backward()
    assert not stepper.step().skipped
    moments = [x for state in stepper.state_dict()["optimizer"]["state"].values() for x in state.values()]
    assert moments and all(x.isfinite().all() for x in moments)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_restored_optimizer_goes_on_bit_for_bit(device):
    def run(steps, state=None):
        model = linear(torch.bfloat16).to(device)
        stepper = PolicyOptimizer(model, lr=1e-2, warmup_steps=3, total_steps=6, schedule="cosine")
        if state:
            stepper.load_state_dict(state)
        for step in range(stepper.steps, steps):  # without a matrix product, whose bits may differ on a GPU
            sum((p - step).square().sum() for p in model.parameters()).backward()
            stepper.step()
        return model, stepper

    half = {k: v for k, v in run(3)[1].state_dict().items()}
    resumed, through = run(6, half)[0], run(6)[0]
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), through.parameters(), strict=True))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (["constant"], [0.5, 1, 1, 1, 1, 1]),
        (["linear"], [0.5, 1, 1, 0.75, 0.5, 0.25]),
        (["cosine"], [0.5, 1, 1, 0.853553, 0.5, 0.146447]),
        (["cosine", 0.1], [0.5, 1, 1, 0.868198, 0.55, 0.231802]),  # 0.1 + 0.9 of it: it ends above zero
    ],
)
def test_schedules(schedule, expected):
    assert [lr_factor(step, 2, 6, *schedule) for step in range(6)] == pytest.approx(expected, abs=1e-6)
