"""A command that runs with a group of its own: at SIGTERM it has a moment to end, and then all of it is killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from grpo_rl.envs.guards.parent import ending_with_parent

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="it ends with its parent on Linux")]
ENDS_IN_ORDER = """
import signal, sys, time
def end(*_):
    print("in order", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(60)
"""
IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.mark.parametrize(("code", "said"), [(ENDS_IN_ORDER, "in order\n"), (IGNORES, "")])
def test_sigterm_gives_a_group_a_moment_to_end_in_order(code, said):
    command = ending_with_parent([sys.executable, "-c", code], with_group=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        began = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.read() == said  # to the end: no process of the group holds the pipe
        assert time.monotonic() - began < 30
