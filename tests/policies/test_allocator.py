"""Freed memory stays with the process once it is told so, and goes back when asked; each in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly

PROGRAM = """
import sys
from pathlib import Path
import torch
from grpo_rl.policies import allocator

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024  # MiB

def use():
    blocks = [torch.ones(2**23) for _ in range(8)]  # 256 MiB
    return resident()

if sys.argv[1] == "keep":
    allocator.keep_freed_memory()
before, used, after = resident(), use(), resident()
allocator.give_back()
print(used - before, after - before, resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize(("told", "kept"), [("keep", True), ("leave", False)])
def test_freed_memory_stays_until_it_is_given_back(told, kept):
    done = subprocess.run([sys.executable, "-c", PROGRAM, told], capture_output=True, text=True, check=True)
    used, after, given_back = map(int, done.stdout.split())
    assert used > 250
    assert after > 200 if kept else after < 50
    assert given_back < 50
