"""Runs a command for so many minutes, and reports whether its resources grow, and what it leaves.

    python benchmarks/soak.py --minutes 30 python sota/grpo.py +experiment=quickstart train.total_dialog_turns=128000

Every few seconds it reads from /proc, of the command and all processes that it started, also those whose parent has
ended: memory (PSS, which shares a page's bytes out among those that have it), open files, threads, processes, and the
POSIX semaphores, shared-memory entries (/dev/shm, System V) that they have. The first fifth of the time is a warm-up.
Then SIGINT ends the command, and what is still there counts as left over.

A slope comes with a 95 % interval of :func:`trend`: neighbouring samples resemble one another. Something
creeps if the whole interval is above zero, the last third of the samples lies above the second (a step up at the
beginning is none), and memory has grown by more than 1 MiB, a count by more than half of one. An entry of /dev/shm is
the job's if one of its processes was seen to have it mapped or open, or if it is named by the number of one: those of
other jobs do not count, nor does one that no one had at a sample. Needs Linux. The exit code is 1 if something creeps,
is left over, or the command ended by itself, or by another signal than SIGINT.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy import stats

from grpo_rl.intervals import LEVEL, Estimate

PROC, SHM = Path("/proc"), Path("/dev/shm")
WARM_UP = 0.2
"""Share of the time that is not judged."""
BLOCKS, FEWEST_BLOCKS = 10, 5
UNITS = {"memory": "MiB", "shared memory": "MiB"}
"""Units of what is no count."""
NEGLIGIBLE_MIB, NEGLIGIBLE_COUNT = 1.0, 0.5
"""Rises over the whole time that are none: PSS also grows when others end that share a process's libraries, and who has
left one thing behind has one more, not half of one: what comes and goes is only seen more often."""
PR_SET_CHILD_SUBREAPER = 36


def trend(at: Sequence[float], values: Sequence[float], blocks: int = 10) -> Estimate:
    """The slope of samples over time, with a 95 % interval that holds where neighbouring samples resemble one another.

    The line goes through the means of ``blocks`` equal numbers of consecutive samples, which are nearly independent
    where the resemblance is shorter than a block; the interval is Student's t of these few points. The lag-1
    correlation r that is left between blocks widens it by sqrt((1 + r) / (1 - r)). As that of n residuals of a line is
    too low by about (2 + 4r) / n (Kendall 1954, Marriott and Pope 1954), so much is added.

    Raises:
        ValueError: there are fewer than two samples a block, or fewer than four blocks.

    >>> trend(range(40), [0.5 * t for t in range(40)]).ci95
    [0.5, 0.5]
    """
    if blocks < 4 or len(at) < 2 * blocks or len(at) != len(values):
        raise ValueError(f"{len(at)} times and {len(values)} values give no slope by {blocks} blocks of 2 or more")
    x, y = (np.array([part.mean() for part in np.array_split(np.asarray(v, float), blocks)]) for v in (at, values))
    if np.ptp(y) == 0:
        return Estimate(0.0, 0.0, 0.0)  # and not what rounding makes of it
    x = x - x.mean()
    slope = float(x @ y / (x @ x))
    rest = y - y.mean() - slope * x
    spread = float(rest @ rest)
    if spread <= 1e-18 * float(y @ y):  # a line, but for rounding
        return Estimate(slope, slope, slope)
    r = float(rest[1:] @ rest[:-1]) / spread
    r = min(max(r + (2 + 4 * r) / blocks, 0.0), 0.9)
    error = math.sqrt(spread / (blocks - 2) / float(x @ x) * (1 + r) / (1 - r))
    half = float(stats.t.ppf((1 + LEVEL) / 2, blocks - 2)) * error
    return Estimate(slope, slope - half, slope + half)


@dataclass
class Job:
    """A command with all that it starts: processes whose parents end become this process's children."""

    command: Sequence[str]
    process: subprocess.Popen = field(init=False)
    pids: set[int] = field(default_factory=set)
    """Numbers of all processes that were seen."""
    entries: set[str] = field(default_factory=set)
    """Names in /dev/shm that were the job's."""

    def start(self) -> None:
        """Starts the command."""
        _adopt(True)
        self._before = _names()
        self._beside = set(descendants(os.getpid()))
        # A shell's background jobs ignore Ctrl-C, and so would what they start.
        self.process = subprocess.Popen(self.command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    def alive(self) -> list[int]:
        """The numbers of its processes, without those that only wait to be asked how they ended."""
        self.process.poll()
        found = [pid for pid in descendants(os.getpid()) if pid not in self._beside]
        for pid in found:
            if pid != self.process.pid:  # adopted
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return [pid for pid in found if state(pid) not in ("Z", None)]

    def sample(self) -> dict[str, float]:
        """The amounts of what the job uses now, by name."""
        found: dict[str, float] = {"memory": 0.0, "open files": 0.0, "threads": 0.0, "processes": 0.0}
        for pid in self.alive():
            self.pids.add(pid)
            with suppress(OSError):  # it has ended
                found["memory"] += memory_bytes(pid) / 2**20
                found["threads"] += len(os.listdir(PROC / str(pid) / "task"))
                found["open files"] += len(os.listdir(PROC / str(pid) / "fd"))
                found["processes"] += 1
                self.entries |= entries_of(pid) - self._before
        left = self.left_entries()
        semaphores = [name for name in left if name.startswith("sem.")]
        memory = [name for name in left if not name.startswith("sem.")]
        system_v = self._system_v()
        found["semaphores"] = float(len(semaphores))
        found["shared-memory entries"] = float(len(memory) + len(system_v))
        found["shared memory"] = (sum(map(_size, memory)) + sum(system_v.values())) / 2**20
        return found

    def left_entries(self) -> set[str]:
        """Its entries of /dev/shm that are there."""
        now = _names() - self._before
        numbers = {name for name in now if {int(n) for n in re.findall(r"\d+", name)} & self.pids}
        self.entries |= numbers
        return now & self.entries

    def _system_v(self) -> dict[int, int]:
        """The bytes of its System V segments, by their numbers."""
        lines = (PROC / "sysvipc" / "shm").read_text().splitlines()[1:] if (PROC / "sysvipc" / "shm").exists() else []
        rows = [line.split() for line in lines]  # key shmid perms size cpid ...
        return {int(row[1]): int(row[3]) for row in rows if int(row[4]) in self.pids}

    def end(self, patience_s: float, grace_s: float) -> tuple[list[str], int | None]:
        """Ends the command with SIGINT; what is left over, each in a line, and the exit code; None: it lived on."""
        self.process.send_signal(signal.SIGINT)
        left, code = [], None
        try:
            code = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            left.append(f"the command itself, {patience_s:g} s after SIGINT")
        end = time.monotonic() + grace_s
        while self.alive() and time.monotonic() < end:
            time.sleep(0.1)
        for pid in self.alive():
            if pid != self.process.pid:
                left.append(f"process {pid}: {command_of(pid)}")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        _adopt(False)
        kinds = {True: "semaphore", False: "shared memory"}
        left += [f"{kinds[name.startswith('sem.')]} {SHM / name}" for name in sorted(self.left_entries())]
        return left + [f"System V shared memory {number}" for number in self._system_v()], code


def _adopt(orphans: bool) -> None:
    """Has processes below this one become its children when their parents end, or init's."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """The processes below one, zombies included."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the command's name: state, parent, ...; None: it has ended."""
    with suppress(OSError):
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return None


def state(pid: int) -> str | None:
    """The state of a process, Z for a zombie; None: there is none."""
    fields = _stat(pid)
    return fields[0] if fields else None


def command_of(pid: int) -> str:
    """The command line of a process."""
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    return "it has ended"


def memory_bytes(pid: int) -> int:
    """The PSS of a process; its RSS where the kernel gives no PSS."""
    with suppress(OSError, StopIteration):
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    pages = int((PROC / str(pid) / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def entries_of(pid: int) -> set[str]:
    """The names in /dev/shm that a process has mapped or open."""
    folder = PROC / str(pid)
    found = set(re.findall(rf"{SHM}/(\S+)$", (folder / "maps").read_text(errors="replace"), flags=re.MULTILINE))
    for descriptor in (folder / "fd").iterdir():
        with suppress(OSError):
            target = os.readlink(descriptor)
            if target.startswith(f"{SHM}/"):
                found.add(target.removeprefix(f"{SHM}/").partition("/")[0])
    return found


def _names() -> set[str]:
    return set(os.listdir(SHM)) if SHM.is_dir() else set()


def _size(name: str) -> int:
    with suppress(OSError):
        return (SHM / name).stat().st_size
    return 0


@dataclass(frozen=True)
class Finding:
    """The mean of one of the things that are sampled, and its slope an hour."""

    name: str
    mean: float
    an_hour: Estimate
    creeps: bool

    def __str__(self) -> str:
        slope, verdict = self.an_hour, "creeps" if self.creeps else "within noise of zero"
        unit = f" {UNITS[self.name]}" if self.name in UNITS else ""
        interval = f"{slope.mean:+.3g} ({slope.low:+.3g} to {slope.high:+.3g}){unit} an hour"
        return f"{self.name}: {self.mean:.1f}{unit}, {interval}: {verdict}"


def judged(at: Sequence[float], samples: Sequence[dict[str, float]], seconds: float) -> list[Finding]:
    """The slope of each thing after the warm-up.

    Args:
        at: seconds since the start, of each sample.
        seconds: of the whole run.

    Raises:
        ValueError: there are too few samples.

    >>> samples = [{"threads": 2.0 + i / 60} for i in range(100)]
    >>> print(judged(range(100), samples, 100)[0])
    threads: 3.0, +60 (+60 to +60) an hour: creeps
    """
    kept = [i for i, second in enumerate(at) if second >= WARM_UP * seconds]
    blocks = min(BLOCKS, len(kept) // 2)
    if blocks < FEWEST_BLOCKS:
        raise ValueError(f"{len(kept)} samples after the warm-up are too few for a slope; raise --minutes")
    found = []
    for name in samples[0]:
        values = np.array([samples[i][name] for i in kept])
        hour = trend([at[i] / 3600 for i in kept], values.tolist(), blocks)
        _, second, last = (part.mean() for part in np.array_split(values, 3))
        rise = hour.mean * (at[kept[-1]] - at[kept[0]]) / 3600
        negligible = NEGLIGIBLE_MIB if name in UNITS else NEGLIGIBLE_COUNT
        creeps = hour.low > 0 and last > second and rise > negligible
        found.append(Finding(name, float(values.mean()), hour, bool(creeps)))
    return found


def soak(
    command: Sequence[str], seconds: float, every_s: float, patience_s: float = 120.0, grace_s: float = 10.0
) -> tuple[list[Finding], list[str], list[str], dict]:
    """The findings, what is left over, what went wrong, and the samples."""
    job, at, samples, wrong = Job(command), [], [], []
    job.start()
    begun = time.monotonic()
    try:
        while (now := time.monotonic() - begun) < seconds:
            if job.process.poll() is not None:
                wrong.append(f"the command ended by itself after {now:.0f} s, with exit code {job.process.returncode}")
                break
            samples.append(job.sample())
            at.append(now)
            time.sleep(max(0.0, min(every_s * (len(at)) - (time.monotonic() - begun), seconds - now)))
    finally:
        left, code = job.end(patience_s, grace_s)
    if not wrong and code is not None and code < 0 and code != -signal.SIGINT:
        wrong.append(f"the command was asked to end and died of {signal.Signals(-code).name}")
    findings: list[Finding] = []
    try:
        findings = judged(at, samples, time.monotonic() - begun if wrong else seconds)
    except ValueError as error:
        wrong.append(str(error))
    series = {name: [round(sample[name], 3) for sample in samples] for name in (samples[0] if samples else {})}
    return findings, left, wrong, {"at_s": [round(second, 1) for second in at], "samples": series, "exit_code": code}


def main() -> int:
    """Prints a line for each thing; 1 if something creeps or is left over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="between samples")
    parser.add_argument(
        "--patience", type=float, default=120.0, metavar="SECONDS", help="until SIGINT has to be obeyed"
    )
    parser.add_argument("--out", type=Path, help="write all samples here, as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    options = parser.parse_args()
    if not options.command or sys.platform != "linux":
        parser.error("give a command, on Linux")
    findings, left, wrong, series = soak(options.command, 60 * options.minutes, options.every, options.patience)
    lines = [*map(str, findings), *(f"LEFT OVER: {what}" for what in left), *(f"FAILED: {what}" for what in wrong)]
    creeping = [finding.name for finding in findings if finding.creeps]
    bad = [*(f"{name} creeps" for name in creeping), *(["something is left over"] if left else []), *wrong]
    verdict = "; ".join(bad) or "nothing creeps or is left"
    code = "none" if series["exit_code"] is None else series["exit_code"]
    lines.append(f"soak of {options.minutes:g} minutes, {len(series['at_s'])} samples, exit code {code}: {verdict}")
    print("\n".join(lines), flush=True)
    if options.out:
        found = {
            f.name: {"mean": f.mean, "an_hour": f.an_hour.mean, "ci95": f.an_hour.ci95, "creeps": f.creeps}
            for f in findings
        }
        result = {"command": options.command, "found": found, "left": left, "wrong": wrong, **series}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
