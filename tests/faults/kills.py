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
from starts import HUNG, MODES, Mode, overrides, start, undisturbed, warm, working_in

SHARES = {"sync": 45, "async": 25, "LoRA": 20, "two ranks": 10}
"""Shares of the modes in all kills, in percent."""
UNSEEN = "without a witness"
"""The kind of a kill that nothing tells of: perhaps for lack of memory."""
MOST_KILLS = 20
"""Kills of one run, most of them another's, after which it is given up."""
AGAIN = 8
"""Every so many runs are started once more when they are finished."""

Aim = tuple[int, int]
"""A rank, and the number of the point of its own at which it is to die."""


@dataclass
class Campaign:
    """The kills and what was not as it should be."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Starts that were to die and ended by SIGKILL, by mode and kind of point, or `UNSEEN`."""
    faults: list[str] = field(default_factory=list)
    starts: int = 0
    runs: int = 0

    @property
    def witnessed(self) -> int:
        """The kills whose point was told just before."""
        return sum(count for (_, kind), count in self.kills.items() if kind != UNSEEN)

    def add(self, other: Campaign) -> None:
        """Adds another campaign's counts."""
        self.kills.update(other.kills)
        self.faults += other.faults
        self.starts, self.runs = self.starts + other.starts, self.runs + other.runs


def campaign(mode: Mode, kills: int, seed: int, work: Path, whole: Path, aims: list[Aim], until: float) -> Campaign:
    """Kills runs of a mode so many times, or until a time, and says what was not as it should be.

    Args:
        whole: the folder of the undisturbed run.
        aims: where runs die first, in turn; those that follow are drawn from them.
        until: by ``time.monotonic()``.
    """
    from outcome import began_wrongly, compared, newest_step

    rng, found = random.Random(seed), Campaign()
    command = overrides(mode, work)
    while found.witnessed < kills and time.monotonic() < until:
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
            died = ended.died_at
            hits.append(died.kind if died and died.number == at else UNSEEN)
            found.kills[mode.name, hits[-1]] += 1
            if hits[-1] == UNSEEN:
                faults.append(f"killed at {died}, and {at} was its point: another killed it")
            rank, at = rng.choice(aims) if len(hits) < 4 and found.witnessed < kills else (0, None)
        if ended.status == 1 and (line := refusal(ended.said)):
            faults.append(f"refused: {line}")  # nothing of a kill needs a hand
        elif ended.status:
            how = f"hung for {ended.seconds:.0f} s" if ended.status == HUNG else f"ended with {ended.status}"
            faults.append(f"lost: {how}: {ended.said[-1500:]}")
        else:
            faults += compared(folder, whole, mode.exact)
            if found.runs % AGAIN == 1:
                again = start(mode, command, folder)
                found.starts += 1
                if again.status or "is finished after" not in again.said:
                    faults.append(f"started once more it ended with {again.status}: {again.said[-1500:]}")
        for fault in faults:
            found.faults.append(f"{folder.name} ({', '.join(hits)}): {fault}")
            print(f"FAULT {found.faults[-1]}", flush=True)
        if not faults:
            for path in work.glob(f"{folder.name}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def refusal(said: str) -> str | None:
    """The one line in which a start says what is wrong; None where it ended with a traceback."""
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    return lines[0] if len(lines) == 1 and "Traceback" not in said else None


def table(found: Campaign) -> str:
    """The kills as a Markdown table."""
    rows = [(mode, kind) for mode in MODES for kind in (*KINDS, UNSEEN) if found.kills[mode, kind]]
    head = ["| mode | kill point | kills |", "| --- | --- | --- |"]
    return "\n".join([*head, *(f"| {mode} | {kind} | {found.kills[mode, kind]} |" for mode, kind in rows)])


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
        now, begun = time.monotonic(), found.witnessed
        until_of_mode, left = now + (until - now) * count / left, left - count
        aims = all_kinds_in_turn(done.passed, random.Random(seed))
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
            made = []
            for job in range(jobs):
                share, seed_of_job = count // jobs + (job < count % jobs), seed * jobs + job
                arguments = MODES[name], share, seed_of_job, work, whole, aims[job::jobs], until_of_mode
                made.append(pool.submit(campaign, *arguments))
            for one in made:
                found.add(one.result())
        print(f"{name}: {found.witnessed - begun} kills in {time.monotonic() - now:.0f} s", flush=True)
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
    took, too_few = time.monotonic() - begun, found.witnessed < options.kills
    if too_few:
        print(f"TOO FEW: {found.witnessed} of {options.kills} kills were witnessed; raise --minutes")
    print(
        f"{found.witnessed} witnessed kills in {found.runs} runs of {found.starts} starts, {took:.0f} s: "
        f"{len(found.faults)} faults"
    )
    return int(too_few or bool(found.faults))


if __name__ == "__main__":
    sys.exit(main())
