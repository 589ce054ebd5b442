"""Checks and measures training on one GPU, row by row: `python benchmarks/gpu.py --rows tests "whole step"`.

The rows, the most important first, each of at most 200 s: the tests marked `gpu`; our step, and TRL's with vLLM in
its process; training steps of models of 0.6B and 1.7B parameters (Qwen3's shapes, random weights) in shares of the
GPU's dense bf16 peak; shared prefixes; our head against TRL's and Liger's; the quickstart; sampling and training at the
same time on one GPU; pushes of weights. A row runs in a process of its own, within its limit and the time that rows
before it left. Where one fails or is over its limit, it is reported, and the others run on. After each row the JSON
file is written, in which rows of earlier calls stay; what its programs print is in a log next to it.

With `--toy`, or without a GPU, the same rows run at toy sizes: that shows that the program works, and no bar is
measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import gpu_rows
import gpu_training
import harness
import torch
from gpu_rows import Figures, NotAvailable, Place
from harness import Bar

MINUTES = 15
"""For all rows together, and the end of the last one's processes; rows seldom take what their limits allow."""
GRACE_S = 10
"""Seconds that a row's processes have to end once they are asked to."""
START = "spawn"
"""Start method of a row's process: CUDA does not survive a fork."""
MIN_SHARE = 0.5
"""Share of a row's limit that has to be left for the row to be started."""


@dataclass(frozen=True)
class Row:
    """Figures that are measured together.

    Args:
        function: yields them; a function of a module, as it is called in another process.
        limit_s: seconds that are kept for the row.
    """

    function: Callable[[Place], Figures]
    limit_s: float
    bars: tuple[Bar, ...]


ROWS = {
    "tests": Row(gpu_rows.tests, 190, (Bar("failed", at_most=0), Bar("passed", at_least=1))),
    "whole step": Row(gpu_rows.whole_step, 110, (Bar("push_ms", at_most=50),)),
    "TRL's step": Row(gpu_rows.trl_step, 150, (Bar("times slower than ours", at_least=2.0),)),
    "training 0.6B": Row(
        functools.partial(gpu_training.training, shape="0.6B"),
        40,
        (Bar("16,384 tokens, share of the peak", at_least=0.3), Bar("512 tokens, step_ms", at_most=40)),
    ),
    "training 1.7B": Row(
        functools.partial(gpu_training.training, shape="1.7B"),
        45,
        (Bar("16,384 tokens, share of the peak", at_least=0.4),),
    ),
    "prefix": Row(
        gpu_rows.prefix,
        40,
        tuple(Bar(f"speed-up over the token ratio, {shape}", at_least=0.8) for shape in ("512/128/8", "1024/128/16")),
    ),
    "head": Row(
        gpu_rows.head,
        105,
        (
            Bar("times faster than Liger's, H=4096", at_least=1.0),
            Bar("times faster than Liger's, H=1024", at_least=1.2),
            Bar("times faster than Liger's, H=2048", at_least=1.2),
            *(Bar(f"share of TRL's memory, H={size}", at_most=1.0) for size in (4096, 1024, 2048)),
        ),
    ),
    "quickstart": Row(
        gpu_rows.quickstart,
        110,
        (
            Bar("first 15 steps_s", at_most=20),
            Bar("longest step after the second over the median", at_most=2),
            Bar("median sync_ms", at_most=20),
        ),
    ),
    "async": Row(
        gpu_rows.asynchronous,
        120,
        (
            Bar("steps/s, async over sync", at_least=1.1),
            Bar("largest staleness, versions", at_most=gpu_rows.MAX_STALENESS),
        ),
    ),
    "push": Row(gpu_rows.push, 45, (Bar("135M, push_ms", at_most=20),)),
}  # fmt: skip
"""In the order in which they are measured: the last one is the first to be left out."""


@dataclass(frozen=True)
class Outcome:
    """The figures of a row, numbers or why there is none, and why the row ended early, if it did."""

    figures: dict[str, float | str]
    seconds: float
    ended: str | None = None
    failed: bool = False

    def figure(self, what: str) -> float | str:
        """A number, or why there is none."""
        return self.figures.get(what, self.ended or "the row gave no such figure")

    @property
    def numbers(self) -> dict[str, float]:
        return {what: figure for what, figure in self.figures.items() if not isinstance(figure, str)}


def verdict(bar: Bar, figure: float | str, unmeasured: str | None = None) -> str:
    """The verdict on a figure: reached, missed, or not measured.

    Args:
        figure: a number, or why there is none.
        unmeasured: why figures of this call say nothing about the bar.

    >>> bar = Bar("sync_ms", at_most=20)
    >>> verdict(bar, 20.0), verdict(bar, 21.0), verdict(bar, "no engine"), verdict(bar, 3.0, "CPU")
    ('reached', 'missed', 'not measured (no engine)', 'not measured (CPU)')
    """
    if unmeasured or isinstance(figure, str):
        return f"not measured ({unmeasured or figure})"
    return "reached" if bar.is_met_by(figure) else "missed"


def measure(function: Callable[[Place], Figures], place: Place, limit_s: float, log: Path) -> Outcome:
    """The row's outcome, from a process of its own that is ended when the limit is over, with all that it started."""
    start = time.monotonic()
    context = multiprocessing.get_context(START)
    pipe, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, function, place, log))
    process.start()
    theirs.close()
    figures: dict[str, float | str] = {}
    ended, failed = None, True
    try:
        while True:
            if not pipe.poll(max(0.0, start + limit_s - time.monotonic())):
                ended = f"over its limit of {limit_s:.0f} s"
                break
            kind, content = pipe.recv()
            if kind == "figure":
                figures |= dict([content])
            else:
                ended, failed = content, kind == "failed"
                # Its figures are in; it is shutting down.
                process.join(min(GRACE_S, max(1.0, start + limit_s - time.monotonic())))
                break
    except (EOFError, OSError):
        process.join()
        ended = f"its process ended with exit code {process.exitcode}"
    finally:
        _end(process)
    return Outcome(figures, time.monotonic() - start, ended, failed)


def _serve(pipe, function: Callable[[Place], Figures], place: Place, log: Path) -> None:
    os.setsid()  # so that everything it starts can be ended with it
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    try:
        for figure in function(place):
            pipe.send(("figure", figure))
        pipe.send(("end", None))
    except NotAvailable as error:
        # At full size everything that is measured should be there.
        pipe.send(("end" if place.toy else "failed", str(error)))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("failed", in_a_line(error)))


def in_a_line(error: BaseException) -> str:
    """The error's kind, and the most informative line: the last one of an arm's traceback, else the first.

    >>> in_a_line(ValueError("no such model")), in_a_line(harness.ArmError("ours failed:\\nTrace\\nKeyError: 'x'"))
    ('ValueError: no such model', "ArmError: KeyError: 'x'")
    """
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1] if isinstance(error, harness.ArmError) else lines[0]}"


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """Ends a row's process and its whole group, which may outlive it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number) if _leads_a_group(process.pid) else process.kill()
        process.join(GRACE_S)
    if process.exitcode is not None:  # or it hangs in the driver, and later rows run next to it
        process.close()


def _leads_a_group(pid: int) -> bool:
    # Before its first line a row is still in our own group.
    with suppress(ProcessLookupError):
        return os.getpgid(pid) == pid
    return True  # it is gone, and what it started may be there


def run(
    rows: Mapping[str, Row], place: Place, out: Path, limit_s: float, unmeasured: str | None = None
) -> dict[str, Outcome]:
    """The outcome of every row; the table is printed and the file written as they come, with its earlier rows.

    Args:
        limit_s: of all rows together, the end of their processes included.
        unmeasured: why no bar is measured in this call.
    """
    end = time.monotonic() + limit_s
    outcomes: dict[str, Outcome] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    kept, commit = earlier(out, place.toy), harness.code()["commit"]
    known = {other: Outcome(row["figures"], 0.0).numbers for other, row in kept.items() if row["commit"] == commit}
    for name, row in rows.items():
        measured = known | {other: outcome.numbers for other, outcome in outcomes.items()}
        log = out.parent / f"{out.stem}_{re.sub(r'[^a-zA-Z0-9.]+', '_', name)}.log"
        left_s = max(0.0, end - GRACE_S - time.monotonic())
        if left_s < MIN_SHARE * row.limit_s:
            outcomes[name] = Outcome({}, 0.0, f"{left_s:.0f} s were left of the {row.limit_s:g} s that are its limit")
        else:
            own_s = min(left_s, row.limit_s)
            outcomes[name] = measure(row.function, replace(place, measured=measured), own_s, log)
        print(table(name, row, outcomes[name], unmeasured), flush=True)
        write(out, rows, outcomes, place.toy, unmeasured, kept)
    return outcomes


def table(name: str, row: Row, outcome: Outcome, unmeasured: str | None = None) -> str:
    """The row's lines: each bar with its figure and verdict, then the other figures.

    >>> row = Row(print, 1, (Bar("sync_ms", at_most=20),))
    >>> print(table("quickstart", row, Outcome({"sync_ms": 12.0, "steps": 15}, 3.0)))
    quickstart (3 s)
      sync_ms                                             12           at most 20     reached
      steps                                               15
    """
    ended = f", {outcome.ended}" if outcome.ended else ""
    lines = [f"{name} ({outcome.seconds:.0f} s{ended})"]
    for bar in row.bars:
        figure = outcome.figure(bar.what)
        shown = "-" if isinstance(figure, str) else f"{figure:.3g}"
        lines.append(f"  {bar.what:<50}  {shown:<12} {bar!s:<14} {verdict(bar, figure, unmeasured)}")
    barred = {bar.what for bar in row.bars}
    for what, figure in outcome.figures.items():
        if what not in barred:
            lines.append(f"  {what:<50}  {figure if isinstance(figure, str) else format(figure, '.4g')}")
    return "\n".join(line.rstrip() for line in lines)


def earlier(out: Path, toy: bool) -> dict[str, dict]:
    """The rows that the file has from earlier calls; those of other sizes or another accelerator don't count."""
    if not out.exists():
        return {}
    accelerator = harness.machine()["accelerator"]
    rows = json.loads(out.read_text())["rows"].items()
    return {name: row for name, row in rows if row["toy"] == toy and row["machine"]["accelerator"] == accelerator}


def write(
    out: Path,
    rows: Mapping[str, Row],
    outcomes: Mapping[str, Outcome],
    toy: bool,
    unmeasured: str | None,
    kept: Mapping[str, dict],
) -> None:
    """Writes all that was measured so far, whole or not at all; a row without figures leaves those that it had."""
    result = {
        "rows": dict(kept)
        | {
            name: {
                "toy": toy,
                "commit": harness.code()["commit"],
                "machine": harness.machine(),
                "seconds": outcome.seconds,
                "ended": outcome.ended,
                "figures": outcome.figures,
                "bars": [
                    {
                        "what": bar.what,
                        "bar": str(bar),
                        "figure": outcome.figure(bar.what),
                        "verdict": verdict(bar, outcome.figure(bar.what), unmeasured),
                    }
                    for bar in rows[name].bars
                ],
            }
            for name, outcome in outcomes.items()
            if outcome.figures or name not in kept
        },
    }
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    partial.replace(out)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    on_gpu = torch.cuda.is_available()
    toy = args.toy or not on_gpu
    unmeasured = None if not toy else "toy sizes" if on_gpu else "CPU"
    rows = {name: row for name, row in ROWS.items() if name in args.rows}
    with tempfile.TemporaryDirectory(prefix="gpu_rows_", ignore_cleanup_errors=True) as folder:
        place = Place(toy, "cuda" if on_gpu else "cpu", Path(folder))
        outcomes = run(rows, place, args.out, 60 * args.minutes, unmeasured)
    bars = [verdict(bar, outcomes[name].figure(bar.what), unmeasured) for name, row in rows.items() for bar in row.bars]
    failed = [name for name, outcome in outcomes.items() if outcome.failed]
    reached, missed = bars.count("reached"), bars.count("missed")
    print(
        f"{reached} reached, {missed} missed, {len(bars) - reached - missed} not measured, of {len(bars)} bars; all "
        f"figures: {args.out}"
    )
    if failed:
        print(f"failed: {', '.join(failed)}; their logs lie next to the file", file=sys.stderr)
    return int(bool(failed))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--toy", action="store_true", help="toy sizes, as without a GPU; no bar is measured")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="run only these rows")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="limit of all rows together")
    parser.add_argument("--out", type=Path, default=Path("outputs", "gpu.json"), help="write all figures here, as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
