"""Kills runs at writes, fsyncs, renames and process starts, and counts what is lost: `python tests/faults/kills.py`.

Short runs of a tiny model are started by one fixed command (`hydra.run.dir=X resume=auto`), die by SIGKILL at a point
of their own (kill_points.c says which there are), and are started again until they are finished. A kill is witnessed if
the process told the very point that it was to die at to a file just before, and ended by signal 9. Every start has to
go on from the newest checkpoint or to say in a line what to do, and what is left in the end is compared with a run that
nobody disturbed: metrics, lineage, completions, the tensors of the last checkpoint, the exported model, and all files.
Of an async run, whose batches may be others, it is the prompts and responses of all groups, the counts of responses,
optimizer steps and pushes, the names and shapes of the checkpoint's tensors, which have to be finite, and the names of
the files.

The first kill of a run goes through the points of each kind in a random order before one comes again; up to three more
fall where they may. The exit code is 1 where fewer kills than asked for were witnessed, or something was not as it
should be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kill_points import KINDS, Point, begin_anew_with_kill_points, folder_of_library, missing
from starts import GROUPS, HUNG, MODES, STEPS, Mode, Start, overrides, start, warm

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
class Row:
    """Counts of one mode and one kind of point.

    Args:
        kills: starts that were to die and ended by SIGKILL, whoever sent it.
        witnessed: those of them that told their point just before.
    """

    kills: int = 0
    witnessed: int = 0
    lost: int = 0
    doubled: int = 0
    different: int = 0
    refused: int = 0


@dataclass
class Campaign:
    """The counts of kills and of what was lost in them."""

    rows: dict[str, Row] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    starts: int = 0
    runs: int = 0
    broken: bool = False
    """The harness itself failed."""

    @property
    def witnessed(self) -> int:
        """The kills that were witnessed."""
        return sum(row.witnessed for row in self.rows.values())

    def row(self, mode: str, kind: str) -> Row:
        """The counts of a mode and a kind of point."""
        return self.rows.setdefault(f"{mode}\t{kind}", Row())

    def add(self, other: Campaign) -> None:
        """Adds another campaign's counts."""
        for key, row in other.rows.items():
            mine = self.row(*key.split("\t"))
            for name, count in asdict(row).items():
                setattr(mine, name, getattr(mine, name) + count)
        self.faults += other.faults
        self.starts, self.runs = self.starts + other.starts, self.runs + other.runs
        self.broken = self.broken or other.broken


NONE = "none"
"""The kind of the last kill of a run that passed its point in none of its starts."""


def undisturbed(mode: Mode, work: Path) -> tuple[Path, Start]:
    """A run that nobody disturbs, and its points."""
    whole = work / f"whole {mode.name}"
    done = start(mode, overrides(mode, work), whole)
    if done.status or not all(done.passed):
        raise RuntimeError(f"the undisturbed run of {mode.name} failed: {done.said[-3000:]}")
    return whole, done


def campaign(
    mode: Mode, kills: int, seed: int, work: Path, whole: Path, aims: list[Aim], until: float, tell=print
) -> Campaign:
    """Kills runs of a mode so many times, or until a time, and says what was not as it should be.

    Args:
        whole: the folder of the undisturbed run.
        aims: where runs die first, in turn; those that follow are drawn from them.
        until: by ``time.monotonic()``.
    """
    from outcome import began_wrongly, counted, differences, newest_step

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
        last = found.row(mode.name, hits[-1] if hits else NONE)
        if ended.status == 1 and (line := refusal(ended.said)):
            last.refused += 1
            faults.append(f"refused: {line}")  # nothing of a kill needs a hand
        elif ended.status:
            how = f"hung for {ended.seconds:.0f} s" if ended.status == HUNG else f"ended with {ended.status}"
            faults.append(f"{how}: {ended.said[-1500:]}")
            last.lost += 1
        else:
            lost, doubled = counted(folder, STEPS, GROUPS)
            different = differences(folder, whole, mode.exact)
            if found.runs % AGAIN == 1:
                again = start(mode, command, folder)
                found.starts += 1
                if again.status or "is finished after" not in again.said:
                    different.append(f"started once more it ended with {again.status}: {again.said[-1500:]}")
            last.lost, last.doubled = last.lost + len(lost), last.doubled + len(doubled)
            last.different += len(different)
            faults += [*(f"lost: {what}" for what in lost), *(f"twice: {what}" for what in doubled), *different]
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
    row = found.row(mode, kind)
    row.kills, row.witnessed = row.kills + 1, row.witnessed + seen
    return kind


def refusal(said: str) -> str | None:
    """The one line in which a start says what is wrong; None where it ended with a traceback."""
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    return lines[0] if len(lines) == 1 and "Traceback" not in said else None


def table(found: Campaign) -> str:
    """The counts as a Markdown table, and their sum."""
    names = list(Row.__dataclass_fields__)
    lines = [
        f"| mode | kill point | {' | '.join(names[:-1])} | refused with a line |",
        "| --- " * (len(names) + 2) + "|",
    ]
    total: Counter[str] = Counter()
    order = [*KINDS, UNSEEN, NONE]
    keys = [key.split("\t") for key in found.rows]
    for mode, kind in sorted(keys, key=lambda key: (list(MODES).index(key[0]), order.index(key[1]))):
        counts = asdict(found.rows[f"{mode}\t{kind}"])
        total.update(counts)
        lines.append(f"| {mode} | {kind} | {' | '.join(str(counts[name]) for name in names)} |")
    return "\n".join([*lines, f"| all | | {' | '.join(str(total[name]) for name in names)} |"])


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


def shared_out(kills: int, modes: list[str]) -> dict[str, int]:
    """Kills of each mode: its share, rounded up."""
    all_shares = sum(SHARES[mode] for mode in modes)
    return {mode: -(-kills * SHARES[mode] // all_shares) for mode in modes}


def until_enough(kills: int, modes: list[str], seed: int, work: Path, jobs: int, until: float) -> Campaign:
    """The campaigns of all modes, one after the other, until enough kills are witnessed or the time is over.

    The time that a quick mode leaves is used in another round, for the kills that are still to do.
    """
    found, whole = Campaign(), {}
    for name in modes:
        whole[name] = undisturbed(MODES[name], work)
        passed = [point for of_rank in whole[name][1].passed for point in of_rank]
        kinds = ", ".join(f"{count} x {kind}" for kind, count in Counter(p.kind for p in passed).items())
        print(f"{name}: {whole[name][1].seconds:.1f} s a run, {len(passed)} points: {kinds}", flush=True)
    rounds = 0
    while (to_do := kills - found.witnessed) > 0 and time.monotonic() < until and not found.broken:
        before = found.witnessed
        found.add(in_turns(shared_out(to_do, modes), seed + rounds * 1000, work, jobs, until, whole))
        rounds += 1
        if found.witnessed == before:
            break
    return found


def in_turns(
    kills: dict[str, int], seed: int, work: Path, jobs: int, until: float, undisturbed: dict[str, tuple[Path, Start]]
) -> Campaign:
    """The campaigns of all modes, each in ``jobs`` forks of this process side by side."""
    found, left = Campaign(), sum(kills.values())
    for name, count in kills.items():
        now, begun = time.monotonic(), found.witnessed
        until_of_mode, left = now + (until - now) * count / left, left - count  # none takes the time of those after it
        whole, done = undisturbed[name]
        aims = all_kinds_in_turn(done.passed, random.Random(seed))
        children = {}
        for job in range(jobs):
            share = count // jobs + (job < count % jobs)
            out = work / f"campaign {name} {job}.json"
            if not (child := os.fork()):
                code = 1
                try:
                    own = campaign(MODES[name], share, seed * jobs + job, work, whole, aims[job::jobs], until_of_mode)
                    out.write_text(json.dumps(asdict(own)))
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            children[child] = out
        for child, out in children.items():
            if os.waitpid(child, 0)[1]:
                found.faults.append(f"the harness failed in {name}")
                found.broken = True
                continue
            told = json.loads(out.read_text())
            told["rows"] = {key: Row(**row) for key, row in told["rows"].items()}
            found.add(Campaign(**told))
        print(f"{name}: {found.witnessed - begun} kills in {time.monotonic() - now:.0f} s", flush=True)
    return found


def verdict(found: Campaign, kills: int) -> int:
    """The exit code: 1 where fewer kills were witnessed than asked for, or anything was not as it should be."""
    bad = sum(row.lost + row.doubled + row.different + row.refused for row in found.rows.values())
    return int(bool(found.faults) or bad > 0 or found.witnessed < kills)


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
    # Rates measured beside kills are none for the user's runs; threads of Rust's would not survive a fork.
    os.environ |= {"GRPO_RL_CACHE": str(work / "cache"), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    os.chdir(work)
    begun = time.monotonic()
    try:
        warm([MODES[name] for name in options.modes], work)
        print(f"imported after {time.monotonic() - begun:.0f} s", flush=True)
        until = begun + 60 * options.minutes
        found = until_enough(options.kills, options.modes, options.seed, work, options.jobs, until)
    finally:
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)
    print(table(found))
    for fault in found.faults:
        print(f"FAULT {fault}")
    took = time.monotonic() - begun
    if found.witnessed < options.kills:
        print(f"TOO FEW: {found.witnessed} of {options.kills} kills were witnessed in {took:.0f} s; raise --minutes")
    print(
        f"{found.witnessed} witnessed kills in {found.runs} runs of {found.starts} starts, {took:.0f} s: "
        f"{len(found.faults)} faults"
    )
    return verdict(found, options.kills)


if __name__ == "__main__":
    sys.exit(main())
