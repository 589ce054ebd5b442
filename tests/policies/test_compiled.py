"""Compiled norms and MLPs give what the others give, for every length, and leave nothing behind."""

from __future__ import annotations

import pytest
import torch

from grpo_rl.policies import compiled
from grpo_rl.policies.compiler import has_compiler
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group, save_tiny_model

pytestmark = pytest.mark.slow

needs_compiler = pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def scored(policy: TrainPolicy, groups: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies, and the gradient of their sum."""
    policy.model.zero_grad()
    log_prob, entropy = policy.score(groups)
    (log_prob.sum() + entropy.sum()).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])
    return torch.stack([log_prob, entropy]).detach(), gradient


@needs_compiler
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
def test_compiled_models_score_like_others_whatever_the_lengths(folder, checkpointing):
    plain = TrainPolicy.load(folder, torch.float32)
    policy = TrainPolicy.load(folder, torch.float32, gradient_checkpointing=checkpointing, compile=True)
    assert all(parameter.grad is None for parameter in policy.model.parameters()), "of the first call, none is left"
    for lengths in ([3, 1], [40, 0, 17], [200] * 4):
        groups = [random_group(prompt=5, lengths=lengths), random_group(prompt=9, lengths=[2, 2], group_id=1)]
        for ours, theirs in zip(scored(policy, groups), scored(plain, groups), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_without_a_compiler_the_model_stays_as_it_is_or_the_setting_is_refused(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    policy = TrainPolicy.load(folder, torch.float32, compile=None)
    assert all(module._compiled_call_impl is None for module in policy.model.modules())
    assert policy.compile_s is None  # and the first step is told to be like the others
    with pytest.raises(ValueError, match="train_model.compile=true can't be had: there is no C"):
        TrainPolicy.load(folder, torch.float32, compile=True)


@pytest.mark.nightly
@needs_compiler
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
def test_compiled_layers_in_fp64_equal_uncompiled_ones(folder, checkpointing):
    """The tolerance is not fp64's: the norms of transformers round to fp32 on both roads."""
    plain = TrainPolicy.load(folder, torch.float64)
    policy = TrainPolicy.load(folder, torch.float64, gradient_checkpointing=checkpointing)
    compiled.compile_layers(policy.model, with_attention=False)
    layers = [m for m in policy.model.modules() if type(m).__name__.endswith("DecoderLayer")]
    assert len(layers) == policy.model.config.num_hidden_layers and all(m._compiled_call_impl for m in layers)
    for lengths in ([3, 1], [40, 0, 17]):
        groups = [random_group(prompt=5, lengths=lengths), random_group(prompt=9, lengths=[2, 2], group_id=1)]
        for ours, theirs in zip(scored(policy, groups), scored(plain, groups), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.cases(1)
@pytest.mark.parametrize("as_layers", [False, True], ids=["norms and MLPs", "layers"])
def test_no_compilation_after_the_second_step_of_a_run_whose_lengths_vary(folder, as_layers):
    policy = TrainPolicy.load(folder, torch.bfloat16, compile=not as_layers)
    if as_layers:
        compiled.compile_layers(policy.model, with_attention=False)
    for length in (3, 20):
        groups = [random_group(prompt=length, lengths=[length, 1])]
        policy.add_log_probs(groups, 1000)
        scored(policy, groups)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (5, 64, 300):
            groups = [random_group(prompt=length, lengths=[length, 2 * length])]
            policy.add_log_probs(groups, 4000)
            scored(policy, groups)
