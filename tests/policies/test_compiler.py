"""Compilers that fail are found before the first step, and what was compiled is found by the next process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from grpo_rl.policies import compiler
from grpo_rl.testing import save_tiny_model

needs_compiler = pytest.mark.skipif(not compiler.has_compiler("cpu"), reason="no C++ compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def started(program: str, **variables: str) -> str:
    """The output of a Python process of its own."""
    env = {name: value for name, value in os.environ.items() if name != compiler.INDUCTOR_CACHE} | variables
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


LOAD = """
import torch
from grpo_rl.policies.compiler import why_uncompiled
from grpo_rl.policies.policy import TrainPolicy
policy = TrainPolicy.load({folder!r}, torch.float32, compile=None)
print(sum(module._compiled_call_impl is not None for module in policy.model.modules()))
print(why_uncompiled("cpu"))
"""


@pytest.mark.nightly
@needs_compiler
def test_a_compiler_without_headers_leaves_the_model_uncompiled_and_says_why(folder, tmp_path):
    failing = tmp_path / "g++"
    failing.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) exec g++ "$@";; esac\n'
        "echo 'x.cpp:1:10: fatal error: Python.h: No such file or directory' >&2\nexit 1\n"
    )
    failing.chmod(0o755)
    said = started(LOAD.format(folder=str(folder)), CXX=str(failing), GRPO_RL_CACHE=str(tmp_path / "cache"))
    assert said.splitlines()[-2:] == [
        "0",
        "compiling for cpu failed: x.cpp:1:10: fatal error: Python.h: No such file or directory",
    ]
