"""Fuzzes readers of foreign text: `make fuzz N=1000000`; ARGS="--target calculate" for one, `--only 123` for one input.

Each input follows from the seed, the target's name and its number alone, so a failure is seen again by its number.
"""

import argparse
import faulthandler
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from random import Random

import canaries
import fuzz_targets
from fuzz_inputs import mutated

HANG_S = 60
CHUNK = 1000
"""Inputs that a worker takes at a time."""
SHOWN = 5
"""Failures of one kind that are printed."""

Broken = tuple[int, str, str]
"""The number of an input, the error and its place."""


def input_of(target: fuzz_targets.Target, seeds: list, seed: int, number: int):
    return mutated(Random(f"{seed}/{target.name}/{number}"), seeds)


def chunk(name: str, seed: int, first: int, end: int) -> list[Broken]:
    """Those of the inputs that break the target, read in a folder of their own."""
    target, found, armed, back = fuzz_targets.BY_NAME[name], [], float("-inf"), os.getcwd()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.chdir(folder)
        canaries.plant()
        seeds = fuzz_targets.seeds_read_once(target, folder)
        for number in range(first, end):
            if (now := time.monotonic()) - armed > HANG_S / 60:  # a hang that no signal ends ends the process
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                armed = now
            try:
                fuzz_targets.run(target, input_of(target, seeds, seed, number), folder)
            except Exception as error:
                where = traceback.extract_tb(error.__cause__.__traceback__)[-1] if error.__cause__ else ""
                found.append((number, f"{type(error).__name__}: {error}"[:400], str(where)))
        faulthandler.cancel_dump_traceback_later()
        found += [(first, f"one of {end - first} inputs touched {canary}", "") for canary in canaries.touched(folder)]
        os.chdir(back)
    return found


def fuzz(name: str, seed: int, first: int, count: int, processes: int) -> int:
    """Fuzzes one target; the number of broken inputs."""
    begun, found, ended = time.monotonic(), [], ""
    starts = range(first, first + count, CHUNK)
    ends = [min(start + CHUNK, first + count) for start in starts]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        chunks = pool.map(chunk, itertools.repeat(name), itertools.repeat(seed), starts, ends)
        try:
            for broken in chunks:
                found += broken
        except BrokenProcessPool:
            ended = "; a process hung or died: its stack is above, and a smaller --count finds the input"
    took = time.monotonic() - begun
    print(f"{name}: {count:,} inputs in {took:.0f} s ({count / took:,.0f}/s), {len(found)} broken{ended}", flush=True)
    kinds: dict[str, list[Broken]] = {}
    for broken in found:
        kinds.setdefault(broken[2] or broken[1][:60], []).append(broken)
    for where, of_kind in sorted(kinds.items(), key=lambda kind: -len(kind[1]))[:SHOWN]:
        number, message, _ = of_kind[0]
        print(
            f"  {len(of_kind)} as --seed {seed} --target {name!r} --only {number}: {message}\n    {where}", flush=True
        )
    return len(found) + bool(ended)


def main() -> None:
    """Fuzzes the targets that are asked for, one after the other; exit code 1 where anything broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the number of the first input, to go on with a run")
    parser.add_argument("--count", type=int, default=1_000_000, help="inputs a target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--target", action="append", choices=sorted(fuzz_targets.BY_NAME), help="all by default")
    parser.add_argument("--only", type=int, help="prints the input of this number, and runs it")
    options = parser.parse_args()
    names = options.target or list(fuzz_targets.BY_NAME)
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            canaries.plant()
            target, here = fuzz_targets.BY_NAME[names[0]], Path(folder)
            seeds = fuzz_targets.seeds_read_once(target, here)
            data = input_of(target, seeds, options.seed, options.only)
            print(repr(data)[:5000])
            fuzz_targets.run(target, data, here)
        return
    broken = sum(fuzz(name, options.seed, options.first, options.count, options.processes) for name in names)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
