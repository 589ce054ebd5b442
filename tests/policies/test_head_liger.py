"""Liger's head gives what ours gives: on a CPU by its reference, where it is installed, and by one of this file's."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from grpo_rl.data.kept import Kept
from grpo_rl.policies import head_liger
from grpo_rl.policies.head import log_prob_and_entropy
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group, save_tiny_model


class Stated:
    """Liger's function, from what its documentation says."""

    @staticmethod
    def apply(hidden, weight, target, temperature=1.0, return_entropy=False):
        assert return_entropy and target.dtype == torch.int64
        log_p = ((hidden @ weight.T).float() / temperature).log_softmax(-1)
        return -log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1).bfloat16()


@pytest.fixture(params=["stated", "installed"])
def liger(request, monkeypatch):
    """The allowed distance of a result from the exact one."""
    if request.param == "installed":
        if importlib.util.find_spec("liger_kernel") is None:
            pytest.skip("liger-kernel is not installed")
        return 1e-5
    module = SimpleNamespace(LigerFusedLinearScaledCrossEntropyFunction=Stated)
    monkeypatch.setitem(sys.modules, head_liger.MODULE, module)
    return 2e-2  # bf16 entropies


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_ours(liger, temperature):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=generator) for shape in ((7, 5), (11, 5))]
    target = torch.randint(11, (7,), generator=generator)
    up = [torch.randn(7, generator=generator) for _ in range(2)]

    def results(road):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = road(*leaves)
        return [*out, *torch.autograd.grad(sum((u * o).sum() for u, o in zip(up, out, strict=True)), leaves)]

    theirs = results(lambda h, w: head_liger.liger_log_prob_and_entropy(h, w, target, temperature))
    ours = results(lambda h, w: log_prob_and_entropy(h, w, target, temperature=temperature))
    torch.testing.assert_close(theirs, ours, rtol=liger, atol=liger)


@pytest.mark.slow
def test_a_policy_scores_with_it_and_a_tied_weight_gets_one_gradient_in_the_dtype_that_is_kept(liger, tmp_path):
    group = random_group(prompt=5, lengths=[3, 0, 4])
    gradients = []
    for by_liger in (False, True):
        policy = TrainPolicy.load(save_tiny_model(tmp_path / "model"), torch.bfloat16)
        policy.liger = by_liger
        weight = policy.model.get_output_embeddings().weight
        assert weight is policy.model.get_input_embeddings().weight
        weight.grad_dtype = torch.float32
        log_prob, entropy = policy.score([group])
        assert log_prob.dtype == entropy.dtype == torch.float32
        (log_prob.sum() + entropy.sum()).backward()
        assert weight.grad.dtype == torch.float32
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.05)


def test_kept_sets_are_no_call_of_it():
    kept, arguments = Kept.from_lists([[2, 4]]), (torch.ones(1, 5), torch.ones(11, 5), torch.tensor([4]))
    log_prob, _ = head_liger.liger_log_prob_and_entropy(*arguments, kept=kept)
    assert log_prob.exp().item() == 0.5
