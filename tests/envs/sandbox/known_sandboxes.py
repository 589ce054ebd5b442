"""The sandboxes in which tests run programs, each where it is installed."""

from __future__ import annotations

import pytest

from grpo_rl.envs.sandbox.jails import COMMANDS, jails

EACH = [
    pytest.param(name, marks=pytest.mark.skipif(not jails(name), reason=f"needs {command}"))
    for name, command in COMMANDS.items()
]
