"""Compilers that fail are found before the first step, and what was compiled is found by the next process."""

from __future__ import annotations

import os
import signal
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


COUNT = (
    LOAD
    + """
from torch._dynamo.utils import counters
print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"])
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""
)


@pytest.mark.nightly
@needs_compiler
def test_a_second_process_finds_all_compiled_code_in_the_cache_folder(folder, tmp_path):
    counts = []
    for _ in range(2):
        said = started(COUNT.format(folder=str(folder)), GRPO_RL_CACHE=str(tmp_path))
        counts.append([int(number) for line in said.splitlines()[-2:] for number in line.split()])
    (_, missed, _, built), (hit, missed_again, _, built_again) = counts
    assert missed > 0 and built > 0
    assert hit > 0 and missed_again == built_again == 0
    assert (tmp_path / "compiled").is_dir()


def test_a_cache_that_the_user_names_or_that_cannot_be_made_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(compiler.INDUCTOR_CACHE, "/elsewhere")
    compiler.keep_compiled_code()
    assert os.environ[compiler.INDUCTOR_CACHE] == "/elsewhere"

    pytorchs = compiler.default_cache_dir()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compiler.INDUCTOR_CACHE, pytorchs)
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path / "file"))
    compiler.keep_compiled_code()
    assert os.environ[compiler.INDUCTOR_CACHE] == pytorchs

    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path / "cache"))
    compiler.keep_compiled_code()
    assert os.environ[compiler.INDUCTOR_CACHE] == str(tmp_path / "cache" / "compiled")


KILLING = """#!/bin/sh
case "$*" in *.main.so*)
  if rm {armed} 2>/dev/null; then
    while [ "$1" != -o ]; do shift; done
    : > "$2"
    kill -9 0
  fi;;
esac
exec g++ "$@"
"""
SMALL = """
from grpo_rl.policies.compiler import keep_compiled_code, why_uncompiled
keep_compiled_code()
print(why_uncompiled("cpu"))
"""


@pytest.mark.nightly
@needs_compiler
def test_a_library_that_a_killed_process_left_unfinished_is_built_again(tmp_path):
    cxx, armed = tmp_path / "g++", tmp_path / "armed"
    cxx.write_text(KILLING.format(armed=armed))
    cxx.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != compiler.INDUCTOR_CACHE}
    env |= {"CXX": str(cxx), "GRPO_RL_CACHE": str(tmp_path / "cache")}
    assert started(SMALL, **env).splitlines()[-1] == "None"
    (library,) = (tmp_path / "cache" / "compiled").glob("*/*.main.so")
    library.unlink()
    armed.write_text("")
    killed = subprocess.run([sys.executable, "-c", SMALL], env=env, start_new_session=True, timeout=600)
    assert killed.returncode == -signal.SIGKILL and library.stat().st_size == 0
    assert started(SMALL, **env).splitlines()[-1] == "None" and library.stat().st_size > 0
