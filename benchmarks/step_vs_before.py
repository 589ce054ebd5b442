"""Compares the time of one GRPO step with an earlier commit's: `python benchmarks/step_vs_before.py --before REV`.

The work is that of `step_vs_trl.py`. The commit is checked out next to this one, and both take turns within one call,
each in a process of its own. A change that leaves speed alone has a figure near 1; above 1 it is slower than before.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import harness
import step_vs_trl

ROOT = Path(__file__).resolve().parent.parent
BAR = 1.05
"""The noise of medians of five on a shared machine."""


def arm(steps: harness.Steps, root: str, work: step_vs_trl.Work, overrides: list[str]) -> None:
    """Our arm of the other benchmark, from the checkout at ``root``."""
    import grpo_rl

    assert Path(grpo_rl.__file__).is_relative_to(root), f"{grpo_rl.__file__} is not of {root}"
    step_vs_trl.our_arm(steps, work, overrides)


@contextlib.contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A folder with the files of a commit.

    Raises:
        SystemExit: there is no such commit.
    """
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", revision], capture_output=True)
        if archive.returncode:
            sys.exit(f"error: --before {revision}: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder).resolve()


@contextlib.contextmanager
def importing_from(root: Path) -> Iterator[None]:
    """Processes started meanwhile import the project from ``root``: they take over this one's search path."""
    before = list(sys.path)
    sys.path[:] = [str(root), str(root / "benchmarks"), str(Path(__file__).parent), *before]
    try:
        yield
    finally:
        sys.path[:] = before


def main() -> None:
    args = parse()
    load = harness.require_quiet(args.force)
    try:
        work = step_vs_trl.asked_work(args)
    except ValueError as error:
        sys.exit(f"error: {error}")
    with contextlib.ExitStack() as stack:
        roots = {"now": ROOT, "before": stack.enter_context(checkout(args.before))}
        arms = {}
        for name, root in roots.items():
            with importing_from(root):
                started = harness.Arm(name, arm, str(root), work, args.ours)
                arms[name] = stack.enter_context(contextlib.closing(started))
        steps = {name: each.step for name, each in arms.items()}
        results = harness.rounds(steps, args.steps, warmup=step_vs_trl.WARMUP_STEPS)
    summary = {name: harness.summarize(reports) for name, reports in results.items()}
    phases = {
        name: seconds / summary["before"]["median"][name]
        for name, seconds in summary["now"]["median"].items()
        if name.endswith("_s") and "per" not in name
    }
    ratio = phases["step_s"]
    print("time now over time before: " + "  ".join(f"{name} {value:.2f}" for name, value in phases.items()))
    result = {
        "shows": f"One GRPO step now against the same step at {args.before}.",
        "bars": [harness.bar("times the step before", ratio, at_most=BAR)],
        "ratios": phases,
        "arms": summary,
        "code": harness.code(*step_vs_trl.CODE),
        "machine": harness.machine(),
        **load,
    }
    harness.finish("step_vs_before", ratio, result, args.out)


def parse():
    parser = step_vs_trl.parser(__doc__)
    parser.add_argument("--before", required=True, metavar="REV", help="the earlier commit")
    return step_vs_trl.checked(parser)


if __name__ == "__main__":
    main()
