"""Fuzzes readers of foreign text: `make fuzz N=1000000`; ARGS="--target calculate" for one, `--only 123` for one input.

Each input follows from the seed, the target's name and its number alone, so a failure is seen again by its number.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import canaries
import fuzz_targets
from fuzz_inputs import mutated

HANG_S = 60
SHOWN = 5
"""Failures of one kind that are printed."""


def input_of(target: fuzz_targets.Target, seeds: list, seed: int, number: int):
    """The input of this number; the inputs from it on, where a call takes several."""
    inputs = [mutated(Random(f"{seed}/{target.name}/{number + i}"), seeds) for i in range(target.at_once)]
    return inputs if target.at_once > 1 else inputs[0]


def import_late(target: fuzz_targets.Target, seeds: list, folder: Path) -> None:
    """Reads the seeds unwatched: imports that a reader makes at its first call are no evaluation of its input."""
    for text in seeds:
        try:
            target.read(target.prepare(text, folder))
        except Exception:
            continue


def breaks(target: fuzz_targets.Target, seeds: list, seed: int, number: int, folder: Path) -> tuple | None:
    """The number, the error and its place where this call breaks; None if it does not."""
    try:
        fuzz_targets.run(target, input_of(target, seeds, seed, number), folder)
    except Exception as error:
        where = traceback.extract_tb(error.__cause__.__traceback__)[-1] if error.__cause__ else None
        return number, f"{type(error).__name__}: {error}"[:400], f"{where}" if where else ""
    return None


def work(name: str, seed: int, first: int, step: int, end: int, seconds: float, results) -> None:
    """The inputs first, first + step, ... in a process and a folder of its own; tells what broke, and where it ends."""
    target = fuzz_targets.BY_NAME[name]
    found, done, slowest = [], 0, (0.0, -1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        canaries.plant()
        seeds = list(target.seeds(Path(folder)))
        import_late(target, seeds, Path(folder))
        until, armed = time.monotonic() + seconds, float("-inf")
        for number in range(first, end, step):
            if (now := time.monotonic()) > until:
                end = number
                break
            if now - armed > HANG_S / 60:  # a hang that no signal ends is told by its number, with the stack
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                armed = now
            if done % (4096 * target.at_once) == 0:
                results.put(("at", number))
            begun, known = target.clock(), len(found)
            broken = breaks(target, seeds, seed, number, Path(folder))
            if broken and target.at_once > 1:  # which of them do so alone? if none does, the whole call is told
                alone, numbers = replace(target, at_once=1), range(number, number + target.at_once)
                found += [told for n in numbers if (told := breaks(alone, seeds, seed, n, Path(folder)))] or [broken]
            elif broken:
                found.append(broken)
            for broken_number, message, _ in found[known:SHOWN]:  # at once, as a hang may end this process
                told = f"  --seed {seed} --target {name!r} --only {broken_number}: {message}"
                print(told, file=sys.stderr, flush=True)
            slowest = max(slowest, (target.clock() - begun, number))
            done += target.at_once
        faulthandler.cancel_dump_traceback_later()
        touched = canaries.touched(Path(folder))
        os.chdir("/")
    results.put(("done", (done, found, touched, slowest, end)))


def messages(worker, queue) -> Iterator[tuple]:
    """Messages that a worker puts into its queue, until it has ended."""
    while True:
        alive = worker.is_alive()  # before the queue is looked at: its last message comes while it lives
        if not queue.empty():
            yield queue.get()
        elif not alive:
            return
        else:
            time.sleep(0.05)


def fuzz(name: str, seed: int, first: int, count: int, processes: int, seconds: float) -> int:
    """Fuzzes one target; the number of broken inputs."""
    begun, context = time.monotonic(), multiprocessing.get_context("fork")
    queues = [context.SimpleQueue() for _ in range(processes)]
    each, end = fuzz_targets.BY_NAME[name].at_once, first + count
    workers = [
        context.Process(target=work, args=(name, seed, first + i * each, processes * each, end, seconds, queue))
        for i, queue in enumerate(queues)
    ]
    for worker in workers:
        worker.start()
    done, found, touched, slowest, last = 0, [], [], (0.0, -1), {}
    for place, (worker, queue) in enumerate(zip(workers, queues, strict=True)):
        for kind, value in messages(worker, queue):
            if kind == "at":
                last[place] = value
                continue
            done, found, touched = done + value[0], found + value[1], touched + value[2]
            slowest, end = max(slowest, value[3]), min(end, value[4])
            break
        else:
            end = min(end, last.get(place, first))
            found.append(
                (last.get(place, first), f"its process ended with {worker.exitcode} in the 4096 calls after", "")
            )
        worker.join()
    took = time.monotonic() - begun
    print(
        f"{name}: {done:,} inputs in {took:.0f} s ({done / took:,.0f}/s), {len(found)} broken, canaries "
        f"{touched or 'untouched'}; the slowest took {slowest[0]:.2f} s (--only {slowest[1]})"
        f"{f'; it goes on with --first {end} --count {first + count - end}' * (end < first + count)}",
        flush=True,
    )
    kinds: dict[str, list] = {}
    for number, message, where in found:
        kinds.setdefault(where or message[:60], []).append((number, message))
    for where, broken in sorted(kinds.items(), key=lambda kind: -len(kind[1]))[:SHOWN]:
        number, message = broken[0]
        print(f"  {len(broken)} as --seed {seed} --target {name!r} --only {number}: {message}\n    {where}", flush=True)
    return len(found) + len(touched)


def main() -> None:
    """Fuzzes the targets that are asked for, one after the other; exit code 1 where anything broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the number of the first input, to go on with a run")
    parser.add_argument("--count", type=int, default=1_000_000, help="inputs a target")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most, a target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--target", action="append", choices=sorted(fuzz_targets.BY_NAME), help="all by default")
    parser.add_argument("--only", type=int, help="prints the input of this number, and runs it")
    options = parser.parse_args()
    names = options.target or list(fuzz_targets.BY_NAME)
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            canaries.plant()
            target, here = replace(fuzz_targets.BY_NAME[names[0]], at_once=1), Path(folder)
            seeds = list(target.seeds(here))
            import_late(target, seeds, here)
            data = input_of(target, seeds, options.seed, options.only)
            print(repr(data)[:5000])
            fuzz_targets.run(target, data, here)
        return
    given = options.seed, options.first, options.count, options.processes, options.seconds
    broken = sum(fuzz(name, *given) for name in names)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
