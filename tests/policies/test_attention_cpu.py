"""Attention on CPU where the exactness tests' short sequences can't show it: long micro-batches, many blocks, bf16."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from grpo_rl.policies import attention_cpu as two_part
from grpo_rl.policies.attention_cpu import Rules, TwoPartAttention
from grpo_rl.policies.packing import pack
from grpo_rl.testing import random_group


def attention_gradients(q, k, v, upstream, layout):
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    (TwoPartAttention.apply(q, k, v, None, layout, Rules(0.5)) * upstream).sum().backward()
    return q.grad, k.grad, v.grad


@pytest.mark.slow
def test_the_gradients_that_many_blocks_add_up_in_bf16_are_as_exact_as_those_of_one(monkeypatch):
    group = random_group(prompt=64, lengths=[64] * 32)
    layout = pack([group]).layout
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (
        torch.randn(group.num_tokens, heads, 16, generator=generator).bfloat16() for heads in (2, 1, 1, 2)
    )
    exact = attention_gradients(*(x.double() for x in (q, k, v, upstream)), layout)

    def errors() -> list[float]:
        found = attention_gradients(q, k, v, upstream, layout)
        return [((a.double() - b)[:64].norm() / b[:64].norm()).item() for a, b in zip(found, exact, strict=True)]

    few = errors()
    monkeypatch.setattr(two_part, "BLOCK_SCORES", 2 * 64 * 8)  # 256 blocks on the prompt's keys
    assert all(many <= 1.1 * one for many, one in zip(errors(), few, strict=True)), (few, errors())


def test_blocks_of_a_long_sequence_see_all_that_came_before(monkeypatch):
    monkeypatch.setattr(two_part, "BLOCK_QUERIES", 16)
    group = random_group(prompt=50, lengths=[70])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(120, 2, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    for window in (None, 10, 40, 200):
        distance = torch.arange(120)[:, None] - torch.arange(120)
        seen = (distance >= 0) & (distance < (window or 120))
        expected = scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=seen, scale=0.5)
        out = TwoPartAttention.apply(q, k, v, None, pack([group]).layout, Rules(0.5, window))
        torch.testing.assert_close(out, expected.transpose(0, 1), rtol=0, atol=1e-12)


def test_scores_are_as_exact_as_fp32_whatever_the_inputs_come_from():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, 64, 64, generator=generator) for _ in range(2))
    for dtype in (torch.float32, torch.bfloat16):  # fp32 inputs rounded to bf16 would be off by 1e-2
        inputs = q.to(dtype), k.to(dtype)
        scores, _ = two_part._scores(*inputs, Rules(0.5))
        exact = 0.5 * inputs[0].double() @ inputs[1].double().transpose(1, 2)
        torch.testing.assert_close(scores.double(), exact, rtol=0, atol=2e-5)
