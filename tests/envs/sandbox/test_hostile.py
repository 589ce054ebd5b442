"""Hostile programs in the sandbox: none gets out, none stays, none passes a test that it does not solve."""

import hashlib
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from grpo_rl.envs.code import Code
from grpo_rl.envs.sandbox import inside
from grpo_rl.envs.sandbox.jails import jails
from grpo_rl.envs.sandbox.sandbox import Limits, Sandbox
from tests.envs.sandbox.hostile import TEMPLATES, hostile_programs

needs_sandbox = pytest.mark.skipif(not jails(), reason="needs bubblewrap: apt-get install bubblewrap")
LIMITS = Limits(memory_mib=256, cpu_s=1, wall_s=2, output_kib=256)
END_S = LIMITS.until_killed_s + 30
"""Seconds in which a program has to end; those beyond its limit are for a machine that is busy."""
SECRET = "token-8e1fd2"


def fingerprint(folder: Path) -> str:
    """A digest of names, contents, rights, owners and times of change of all that is in a folder."""
    parts = []
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        parts.append((str(path), content, status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def running() -> set[int]:
    """Processes that run the first lines of a sandbox."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if inside.__doc__.encode() in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


@needs_sandbox
@pytest.mark.parametrize(("count", "seed"), [(14, 0), pytest.param(1000, 1, marks=pytest.mark.nightly)])
def test_hostile_programs_reach_nothing_and_pass_nothing(tmp_path, count, seed):
    canary = tmp_path / "canary"
    canary.mkdir()
    for name in ("notes.txt", "grader.py", f"{SECRET}.txt"):
        (canary / name).write_text(f"{SECRET} {name}")
    before, project = fingerprint(canary), fingerprint(Path(inside.__file__).parent)
    sandbox, random, kinds, slowest = Sandbox(limits=LIMITS), Random(seed), Counter(), 0.0
    task = Code([], time_s=1.0, memory_mib=256)
    task._sandbox = sandbox
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        port = server.getsockname()[1]
        datagrams.bind(("127.0.0.1", port))
        names = {"canary": str(canary), "file": str(canary / "notes.txt"), "grader": inside.__file__}
        names |= {"port": port, "victim": victim.pid}

        def judge(attempt: tuple[str, str, int]) -> tuple[str, float, str]:
            kind, program, wanted = attempt
            start = time.monotonic()
            # Half of them are asked for printed output, the others for what a function returns.
            rows = {"tests": [{"input": "1", "output": f"{wanted}"}]}
            if wanted % 2:
                rows = {"tests": [f"assert solve(1) == {wanted}", f"assert math.isclose(solve(2), {wanted})"]}
            reward = task.score(rows, f"```python\n{program}\n```")
            assert reward.parts["tests"] == 0, f"{kind} passed: {program}"
            told = sandbox.run(program).stdout if wanted % 2 == 0 else ""
            return kind, time.monotonic() - start, told

        attempts = [(*pair, random.randrange(10**8, 10**9)) for pair in hostile_programs(count, seed, names)]
        with ThreadPoolExecutor(4) as threads:
            for (kind, program, _), (_, took, told) in zip(attempts, threads.map(judge, attempts), strict=True):
                kinds[kind] += 1
                slowest = max(slowest, took)
                named = SECRET in program  # not by the canary's own name
                assert named or SECRET not in told, f"{kind} read a canary: {program}"
        for listener in (server, datagrams):
            listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
        with pytest.raises(BlockingIOError):
            datagrams.recv(1)
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    assert fingerprint(canary) == before and fingerprint(Path(inside.__file__).parent) == project
    left, until = running(), time.monotonic() + END_S  # other tests run programs, too, which end in this time
    while left and time.monotonic() < until:
        time.sleep(0.1)
        left &= running()
    assert not left
    assert slowest < 2 * END_S
    print(f"{count} programs of {len(kinds)} kinds, the slowest took {slowest:.1f} s: {dict(kinds)}")
    assert sum(kinds.values()) == count and kinds.keys() == TEMPLATES.keys()
