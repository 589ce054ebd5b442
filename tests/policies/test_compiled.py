"""Compiled norms and MLPs give what the others give, for every length, and leave nothing behind."""

import os
import subprocess
import sys

import pytest
import torch

from grpo_rl.policies.compiler import INDUCTOR_CACHE, has_compiler
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group

pytestmark = pytest.mark.slow

needs_compiler = pytest.mark.skipif(not has_compiler("cpu"), reason="no C++ compiler")


def scored(policy: TrainPolicy, groups: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies, and the gradient of their sum."""
    policy.model.zero_grad()
    log_prob, entropy = policy.score(groups)
    (log_prob.sum() + entropy.sum()).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])
    return torch.stack([log_prob, entropy]).detach(), gradient


@needs_compiler
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
def test_compiled_models_score_like_others_whatever_the_lengths(tiny_model, checkpointing):
    plain = TrainPolicy.load(tiny_model, torch.float32)
    policy = TrainPolicy.load(tiny_model, torch.float32, gradient_checkpointing=checkpointing, compile=True)
    assert all(parameter.grad is None for parameter in policy.model.parameters()), "of the first call, none is left"
    for lengths in ([3, 1], [40, 0, 17], [200] * 4):
        groups = [random_group(prompt=5, lengths=lengths), random_group(prompt=9, lengths=[2, 2], group_id=1)]
        for ours, theirs in zip(scored(policy, groups), scored(plain, groups), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_without_a_compiler_the_model_stays_as_it_is_or_the_setting_is_refused(tiny_model, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    policy = TrainPolicy.load(tiny_model, torch.float32, compile=None)
    assert all(module._compiled_call_impl is None for module in policy.model.modules())
    assert policy.compile_s is None  # and no note says that the first step takes longer
    with pytest.raises(ValueError, match="train_model.compile=true can't be had: there is no C"):
        TrainPolicy.load(tiny_model, torch.float32, compile=True)


@needs_compiler
def test_no_compilation_after_the_second_step_of_a_run_whose_lengths_vary(tiny_model):
    policy = TrainPolicy.load(tiny_model, torch.bfloat16, compile=True)
    for length in (3, 20):
        groups = [random_group(prompt=length, lengths=[length, 1])]
        policy.add_log_probs(groups, 1000)
        scored(policy, groups)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (5, 64, 300):
            groups = [random_group(prompt=length, lengths=[length, 2 * length])]
            policy.add_log_probs(groups, 4000)
            scored(policy, groups)


LOAD = """
import torch
from grpo_rl.policies.compiler import why_uncompiled
from grpo_rl.policies.policy import TrainPolicy
policy = TrainPolicy.load({tiny_model!r}, torch.float32, compile=None)
print(sum(module._compiled_call_impl is not None for module in policy.model.modules()))
print(why_uncompiled("cpu"))
"""


@pytest.mark.nightly
@needs_compiler
def test_a_compiler_without_headers_leaves_the_model_uncompiled_with_the_reason(tiny_model, tmp_path):
    (failing := tmp_path / "g++").write_text(
        '#!/bin/sh\ncase "$*" in *--version*) exec g++ "$@";; esac\n'
        "echo 'x.cpp:1:10: fatal error: Python.h: No such file or directory' >&2\nexit 1\n"
    )
    failing.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != INDUCTOR_CACHE}
    env |= {"CXX": str(failing), "GRPO_RL_CACHE": str(tmp_path / "cache")}
    program = [sys.executable, "-c", LOAD.format(tiny_model=str(tiny_model))]
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=True)
    reason = "compiling for cpu failed: x.cpp:1:10: fatal error: Python.h: No such file or directory"
    assert done.stdout.splitlines()[-2:] == ["0", reason]
