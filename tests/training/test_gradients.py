"""Gradients that wait for one another give the same sums as gradients that are added one at a time."""

from __future__ import annotations

import torch

from grpo_rl.training import gradients
from grpo_rl.training.gradients import GradientQueue


def test_queued_gradients_are_the_sums_in_fp32(monkeypatch):
    monkeypatch.setattr(gradients, "HELD_BYTES", 300)
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
