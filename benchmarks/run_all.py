"""Runs all benchmarks one after the other, each to its JSON file, then renders them: `python benchmarks/run_all.py`.

One that fails does not stop the others; its old JSON file stays, and the exit code shows it. Before each, the load that
the one before has left is waited out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import harness

FOLDER = Path(__file__).parent
RUNS: dict[str, tuple[str, ...]] = {
    "head": ("head.py",),
    "prefix": ("prefix.py",),
    "memory": ("memory.py",),
    "ragged": ("ragged.py",),
    "buffer": ("buffer.py",),
    "collector": ("collector.py",),
    "drafts": ("drafts.py",),
    "dialogs": ("dialogs.py",),
    "tools": ("tools.py",),
    "trees": ("trees.py",),
    "scoring": ("scoring.py",),
    "push": ("push.py",),
    "checkpoint_stall": ("checkpoint_stall.py",),
    "step_vs_trl": ("step_vs_trl.py", "--trl-batch", "16", "32"),
}
"""Name of the JSON file -> script and arguments; the longest last."""
PATIENCE_S = 600


def wait_for_quiet(patience_s: float) -> None:
    """Returns when the load average is low enough to measure, or after so many seconds: the benchmark then decides."""
    end = time.monotonic() + patience_s
    while os.getloadavg()[0] > harness.MAX_LOAD and time.monotonic() < end:
        time.sleep(5)


def run_all(runs: Mapping[str, Sequence[str]], folder: Path, force: bool = False) -> list[str]:
    """Runs every benchmark, and returns the names of those that failed.

    Args:
        folder: of the scripts, and of their JSON files.
        force: measure on a busy machine too.
    """
    failed = []
    for name, (script, *arguments) in runs.items():
        if not force:
            wait_for_quiet(PATIENCE_S)
        print(f"=== {name}", flush=True)
        command = [sys.executable, str(folder / script), *arguments, "--out", str(folder / f"{name}.json")]
        if subprocess.run([*command, *["--force"] * force]).returncode:
            failed.append(name)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), help="run only these")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    runs = {name: run for name, run in RUNS.items() if name in args.only}
    failed = run_all(runs, FOLDER, args.force)
    rendered = subprocess.run([sys.executable, str(FOLDER / "render.py")]).returncode
    if failed:
        print(f"failed: {' '.join(failed)}; what is shown of them is from an earlier call", file=sys.stderr)
    sys.exit(bool(failed) or rendered)


if __name__ == "__main__":
    main()
