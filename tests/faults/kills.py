"""Kills runs at writes, fsyncs, renames and process starts, and counts what is lost: `python tests/faults/kills.py`.

Short runs of a tiny model are started by one fixed command (`hydra.run.dir=X resume=auto`), die by SIGKILL at a point
of their own (kill_points.c says which there are), and are started again until they are finished. A kill is witnessed if
the process told the very point that it was to die at to a file just before, and ended by signal 9. Every start has to
go on from the newest checkpoint or to say in a line what to do, and what is left in the end is compared with a run that
no one disturbed: metrics, lineage, completions, the tensors of the last checkpoint, the exported model, and all files.
Of an async run, whose batches may be others, it is the prompts and responses of all groups, the counts of responses,
optimizer steps and pushes, the names and shapes of the checkpoint's tensors, which have to be finite, and the names of
the files.

The first kill of a run goes through the points of each kind in a random order before one comes again; up to three more
fall where they may. The exit code is 1 where fewer kills than asked for were witnessed, or something was not as it
should be.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kill_points import KINDS, Point, begin_anew_with_kill_points, folder_of_library, missing
from starts import HUNG, MODES, Mode, Start, overrides, start, undisturbed, warm, working_in

SHARES = {"sync": 45, "async": 25, "LoRA": 20, "two ranks": 10}
"""Shares of the modes in all kills, in percent."""
UNSEEN = "without a witness"
"""The kind of a kill that nothing tells of: perhaps for lack of memory."""
NONE = "none"
"""The kind of the last kill of a run that passed its point in none of its starts."""
MOST_KILLS = 20
"""Kills of one run, most of them another's, after which it is given up."""
AGAIN = 8
"""Every so many runs are started once more when they are finished."""
BAD = ("lost", "doubled", "different", "refused")
COUNTED = ("kills", "witnessed", *BAD)
"""Counts of each mode and kind of point: starts that were to die and ended by SIGKILL, whoever sent it; those of them
that told their point just before; and what was not as it should be in the end.
"""

Aim = tuple[int, int]
"""A rank, and the number of the point of its own at which it is to die."""


@dataclass
class Campaign:
    """The counts of kills and of what was lost in them."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By mode, kind of point and one of `COUNTED`."""
    faults: list[str] = field(default_factory=list)
    starts: int = 0
    runs: int = 0

    def total(self, what: str) -> int:
        """The sum of a count over all modes and kinds."""
        return sum(count for (_, _, name), count in self.counts.items() if name == what)

    def add(self, other: Campaign) -> None:
        """Adds another campaign's counts."""
        self.counts.update(other.counts)
        self.faults += other.faults
        self.starts, self.runs = self.starts + other.starts, self.runs + other.runs

    def failed(self, kills: int) -> bool:
        """True if fewer kills were witnessed than asked for, or anything was not as it should be."""
        return bool(self.faults) or any(map(self.total, BAD)) or self.total("witnessed") < kills


def campaign(
    mode: Mode, kills: int, seed: int, work: Path, whole: Path, aims: list[Aim], until: float, tell=print
) -> Campaign:
    """Kills runs of a mode so many times, or until a time, and says what was not as it should be.

    Args:
        whole: the folder of the undisturbed run.
        aims: where runs die first, in turn; those that follow are drawn from them.
        until: by ``time.monotonic()``.
    """
    from outcome import began_wrongly, compared, newest_step

    rng, found, done = random.Random(seed), Campaign(), 0
    command = overrides(mode, work)
    while done < kills and time.monotonic() < until:
        folder = work / f"run {mode.name} {seed} {found.runs}"
        found.runs += 1
        hits: list[str] = []
        faults: list[str] = []
        rank, at = aims[(found.runs - 1) % len(aims)]
        while True:
            newest = newest_step(folder)
            ended = start(mode, command, folder, at, rank)
            found.starts += 1
            if wrong := began_wrongly(ended.said, ended.status, newest):
                faults.append(wrong)
            if ended.status != -signal.SIGKILL or len(hits) == MOST_KILLS:
                break
            kind = note_kill(found, mode.name, ended, at)
            hits.append(kind)
            done += kind != UNSEEN
            if kind == UNSEEN:
                faults.append(f"killed at {ended.died_at}, and {at} was its point: another killed it")
            faults = [f"{fault}, killed at {ended.died_at}" for fault in faults]
            rank, at = rng.choice(aims) if len(hits) < 4 and done < kills else (0, None)
        wrong_at_the_end: dict[str, list[str]] = {}
        if ended.status == 1 and (line := refusal(ended.said)):
            wrong_at_the_end["refused"] = [line]  # nothing of a kill needs a hand
        elif ended.status:
            how = f"hung for {ended.seconds:.0f} s" if ended.status == HUNG else f"ended with {ended.status}"
            wrong_at_the_end["lost"] = [f"{how}: {ended.said[-1500:]}"]
        else:
            wrong_at_the_end = compared(folder, whole, mode.exact)
            if found.runs % AGAIN == 1:
                again = start(mode, command, folder)
                found.starts += 1
                if again.status or "is finished after" not in again.said:
                    more = f"started once more it ended with {again.status}: {again.said[-1500:]}"
                    wrong_at_the_end["different"].append(more)
        for what, of_kind in wrong_at_the_end.items():
            found.counts[mode.name, hits[-1] if hits else NONE, what] += len(of_kind)
            faults += [f"{what}: {fault}" for fault in of_kind]
        found.faults += [f"{folder.name} ({', '.join(hits)}): {fault}" for fault in faults]
        for fault in faults:
            tell(f"FAULT {folder.name}: {fault}", flush=True)
        if not faults:
            for path in work.glob(f"{folder.name}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def note_kill(found: Campaign, mode: str, ended: Start, at: int | None) -> str:
    """Counts a start that ended by SIGKILL; the kind of the point that it died at, which has to be the one aimed at."""
    seen = ended.died_at is not None and ended.died_at.number == at
    kind = ended.died_at.kind if ended.died_at and seen else UNSEEN
    found.counts[mode, kind, "kills"] += 1
    found.counts[mode, kind, "witnessed"] += seen
    return kind


def refusal(said: str) -> str | None:
    """The one line in which a start says what is wrong; None where it ended with a traceback."""
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    return lines[0] if len(lines) == 1 and "Traceback" not in said else None


def table(found: Campaign) -> str:
    """The counts as a Markdown table, and their sum."""
    lines = [f"| mode | kill point | {' | '.join(COUNTED)} with a line |", "| --- " * (len(COUNTED) + 2) + "|"]
    for mode, kind in itertools.product(MODES, [*KINDS, UNSEEN, NONE]):
        counts = [found.counts[mode, kind, what] for what in COUNTED]
        if any(counts):
            lines.append(f"| {mode} | {kind} | {' | '.join(map(str, counts))} |")
    return "\n".join([*lines, f"| all | | {' | '.join(str(found.total(what)) for what in COUNTED)} |"])


def all_kinds_in_turn(passed: list[list[Point]], rng: random.Random) -> list[Aim]:
    """The points of all ranks, one of each kind after the other, as often as it takes to have all of the rarer kinds.

    Writes are far more than all others, of which a draw from all points would hit few.
    """
    by_kind: dict[tuple[int, str], list[Aim]] = {}
    for rank, of_rank in enumerate(passed):
        for point in of_rank:
            by_kind.setdefault((rank, point.kind), []).append((rank, point.number))
    turns = max(map(len, by_kind.values()))
    for aims in by_kind.values():
        rng.shuffle(aims)
    return [aims[turn % len(aims)] for turn in range(turns) for aims in by_kind.values()]


def in_turns(kills: int, modes: list[str], seed: int, work: Path, jobs: int, until: float) -> Campaign:
    """The campaigns of all modes, each in ``jobs`` forks of this process side by side.

    Each mode has its share of the kills, rounded up, and of the time that those before it have left.
    """
    all_shares = sum(SHARES[mode] for mode in modes)
    shares = {mode: -(-kills * SHARES[mode] // all_shares) for mode in modes}
    found, left = Campaign(), sum(shares.values())
    for name, count in shares.items():
        whole, done = undisturbed(MODES[name], work)
        assert all(done.passed), f"{name} passes no point"
        kinds = Counter(point.kind for of_rank in done.passed for point in of_rank)
        points = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
        print(f"{name}: {done.seconds:.1f} s a run, {kinds.total()} points: {points}", flush=True)
        now, begun = time.monotonic(), found.total("witnessed")
        until_of_mode, left = now + (until - now) * count / left, left - count
        aims = all_kinds_in_turn(done.passed, random.Random(seed))
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
            made = [
                pool.submit(
                    campaign,
                    MODES[name],
                    count // jobs + (job < count % jobs),
                    seed * jobs + job,
                    work,
                    whole,
                    aims[job::jobs],
                    until_of_mode,
                )
                for job in range(jobs)
            ]
            for one in made:
                found.add(one.result())
        print(f"{name}: {found.total('witnessed') - begun} kills in {time.monotonic() - now:.0f} s", flush=True)
    return found


def main() -> int:
    """Prints the table; 1 where something was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--minutes", type=float, default=40, help="no run is begun after so many")
    parser.add_argument("--keep", type=Path, help="an empty folder to work in, which stays")
    options = parser.parse_args()
    if lacks := missing():
        raise SystemExit(f"error: {lacks}")
    if not (work := folder_of_library()):
        work = (options.keep or Path(tempfile.mkdtemp(prefix="kills_"))).resolve()
        work.mkdir(parents=True, exist_ok=True)
        if any(work.iterdir()):
            raise SystemExit(f"error: {work} is not empty; give another folder to --keep")
        begin_anew_with_kill_points(work)
    begun = time.monotonic()
    with working_in(work, stays=bool(options.keep)):
        warm([MODES[name] for name in options.modes], work)
        print(f"imported after {time.monotonic() - begun:.0f} s", flush=True)
        until = begun + 60 * options.minutes
        found = in_turns(options.kills, options.modes, options.seed, work, options.jobs, until)
    print(table(found))
    for fault in found.faults:
        print(f"FAULT {fault}")
    took, witnessed = time.monotonic() - begun, found.total("witnessed")
    if witnessed < options.kills:
        print(f"TOO FEW: {witnessed} of {options.kills} kills were witnessed in {took:.0f} s; raise --minutes")
    print(
        f"{witnessed} witnessed kills in {found.runs} runs of {found.starts} starts, {took:.0f} s: "
        f"{len(found.faults)} faults"
    )
    return int(found.failed(options.kills))


if __name__ == "__main__":
    sys.exit(main())
