"""The soak: a planted leak of each kind is found, a steady process is not, and nothing is left unseen."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import signal

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

STEADY = "import time\nwhile True: time.sleep(0.02)"
LEAKY = """
import threading, time
kept, begun = [], time.monotonic()
while True:
    kept.append((bytearray(b"x" * 200_000), open("/dev/null")))
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    time.sleep(0.02)
"""
LEAVING = """
import os, signal, subprocess, sys, time
open("/dev/shm/soak_test_kept", "w").write("x" * 5000)
kept = [open("/dev/shm/soak_test_kept"), open("/dev/shm/sem.soak_test", "w")]
subprocess.Popen(["sh", "-c", "sleep 61 &"], start_new_session=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(3)
"""


@pytest.mark.parametrize(("code", "creeping"), [(STEADY, set()), (LEAKY, {"memory", "open files", "threads"})])
def test_a_planted_leak_is_found_and_a_steady_process_is_none(script, code, creeping):
    findings, left, wrong, series = script("soak").soak([sys.executable, "-c", code], 5.0, 0.1)
    assert {finding.name for finding in findings if finding.creeps} == creeping, [str(f) for f in findings]
    assert (left, wrong) == ([], []) and len(series["at_s"]) > 12
    assert {finding.name: finding.mean for finding in findings}["processes"] == 1


def test_what_outlives_the_command_is_named_and_what_others_have_is_not(script, tmp_path):
    others = Path("/dev/shm") / f"other_{os.getpid()}"
    ours = [Path("/dev/shm") / name for name in ("soak_test_kept", "sem.soak_test")]
    try:
        others.write_text("x")
        _, left, _, series = script("soak").soak([sys.executable, "-c", LEAVING], 3.0, 0.1, grace_s=0.2)
    finally:
        for path in (others, *ours):
            path.unlink(missing_ok=True)
    assert left[0].endswith(": sleep 61") and left[1:] == [f"semaphore {ours[1]}", f"shared memory {ours[0]}"]
    assert series["samples"]["semaphores"][-1] == series["samples"]["shared-memory entries"][-1] == 1.0
    assert series["samples"]["processes"][-1] == 2.0


def test_noise_and_a_step_at_the_beginning_are_no_creep_and_a_slow_leak_in_noise_is(script):
    judged, rng, at = script("soak").judged, np.random.default_rng(0), np.arange(0.0, 1800.0, 5.0)
    alike = signal.lfilter([1.0], [1.0, -0.9], rng.normal(size=len(at)))  # each sample resembles the one before it
    curves = {
        "noise": 1000 + alike,
        "a step": 1000 + 50.0 * (at > 600),
        "a warm-up": 1000 * (1 - np.exp(-at / 30)),
        "a leak": 1000 + alike + at / 60,
        "seen more often": (rng.random(len(at)) < 0.6 + at / 4500).astype(float),  # an entry that comes and goes
        "one in ten minutes": at // 600,
        "memory": 1000 + at / 1800,  # a MiB in half an hour, of which a fifth is not judged
    }
    samples = [{name: float(curve[i]) for name, curve in curves.items()} for i in range(len(at))]
    found = {finding.name: finding for finding in judged(at, samples, 1800.0)}
    assert {name for name, finding in found.items() if finding.creeps} == {"a leak", "one in ten minutes"}
    assert found["seen more often"].an_hour.low > 0, "it would have been taken for one"
    assert found["a leak"].an_hour.low < 60 < found["a leak"].an_hour.high
