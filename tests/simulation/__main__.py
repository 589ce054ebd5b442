"""The command ``PYTHONPATH=tests python -m simulation``: seeds that are simulated, and what came of them."""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from simulation.simulation import Outcome, simulate

A_PROCESS = 100
"""Seeds that are worth a process."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulates seeds; 1 where one of them failed."""
    parser = argparse.ArgumentParser(prog="PYTHONPATH=tests python -m simulation", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", type=int, default=200, metavar="N", help="simulate so many seeds (200)")
    what.add_argument("--seed", type=int, metavar="K", help="replay this seed alone")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first of the seeds (0)")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # to share out tensors as small as these takes longer than to compute them
    if options.seed is not None:
        outcome = simulate(options.seed, keeps_all=options.trace)
        print(report_of(outcome, options.trace))
        return int(outcome.error is not None)
    return simulate_many(range(options.first, options.first + options.seeds))


def simulate_many(seeds: Sequence[int]) -> int:
    """Simulates seeds, reports those that fail and the sums of all; 1 where one failed."""
    start, faults, dropped = time.monotonic(), Counter[str](), Counter[str]()
    failed, trained, lives, virtual_s = 0, 0, 0, 0.0
    for outcome in outcomes(seeds):
        if outcome.error:
            failed += 1
            print(report_of(outcome, True), flush=True)
            print(f"  replay it with: PYTHONPATH=tests python -m simulation --seed {outcome.seed} --trace", flush=True)
        faults += outcome.faults
        dropped += outcome.dropped
        trained, lives, virtual_s = trained + outcome.trained, lives + outcome.lives, virtual_s + outcome.seconds
    seconds = time.monotonic() - start
    print(f"{len(seeds)} seeds in {seconds:.0f} s, {failed} failed")
    print(f"{virtual_s / 3600:.0f} virtual hours, {lives} lives of the trainer")
    print(f"groups trained on {trained}, dropped {dict(dropped)}")
    print(f"faults {faults.total()}: " + ", ".join(f"{kind} {count}" for kind, count in faults.most_common()))
    return int(failed > 0)


def outcomes(seeds: Sequence[int]) -> Iterator[Outcome]:
    """The outcomes of seeds, in their order; a process on each core simulates them where they are many."""
    processes = min(os.cpu_count() or 1, len(seeds) // A_PROCESS)
    if processes < 2:
        yield from map(simulate, seeds)
        return
    # A process has two threads again, which spin while they wait for each other.
    with multiprocessing.Pool(processes, torch.set_num_threads, (1,)) as pool:
        yield from pool.imap(simulate, seeds, chunksize=10)


def report_of(outcome: Outcome, shows_events: bool) -> str:
    """The report on a seed, in lines."""
    verdict = f"FAILED: {outcome.error}" if outcome.error else "all invariants hold"
    found = (
        f"{outcome.lives} lives in {outcome.seconds:.0f} virtual s, groups trained on {outcome.trained}, dropped "
        f"{dict(outcome.dropped)}, faults {dict(outcome.faults)}, trace {outcome.digest[:16]}"
    )
    return "\n".join([*(outcome.events if shows_events else ()), f"seed {outcome.seed}: {verdict}", f"  {found}"])


if __name__ == "__main__":
    sys.exit(main())
