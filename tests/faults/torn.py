"""Damages files that a resumed run reads, and looks whether one is taken for good: `python tests/faults/torn.py`.

A run of three steps, each with a checkpoint, is copied, and one file of the copy is cut off or removed: a checkpoint,
its shards, metrics, a log of the last step, or the last evaluation. Checkpoints and shards are also changed by a bit,
filled with zeros for a page, or replaced by an older one. The run's folder is then opened as a resumed run does. It has
to go on from the newest checkpoint that is untouched, with all that was logged until then, or to say in one line why it
can't. Some of the damaged runs are also finished, and compared with the one that no one disturbed.
"""

import argparse
import contextlib
import io
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from starts import MODES, STEPS, overrides, start, undisturbed, warm, working_in

PAGE = 4096


def damaged(how: str, content: bytes, before: bytes, rng: random.Random) -> bytes | None:
    """The content of a file after a damage, None where the file is gone; ``before`` is the file a step before."""
    at = rng.randrange(len(content))
    page = at - at % PAGE
    rest = content[page + PAGE :]
    return {
        "cut off": content[:at],
        "bit flipped": content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :],
        "page of zeros": content[:page] + bytes(len(content) - page - len(rest)) + rest,
        "missing": None,
        "an older one": before,
    }[how]


DAMAGES = ("cut off", "bit flipped", "page of zeros", "missing", "an older one")
KINDS = ("checkpoint", "shards", "metrics", "log", "evaluation")
LOST = ("cut off", "missing")
"""The damages that logs and evaluations are looked for: they carry no digest."""


class Runs:
    """Two unfinished runs of three steps, one of them sharded; damage is done to copies of them."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.folders: dict[str, Path] = {}
        for name in ("sync", "two ranks"):
            whole, _ = undisturbed(MODES[name], work, "train.keep_checkpoints=0")
            self.folders[name] = shutil.copytree(whole, work / f"three {name}")
            (self.folders[name] / "summary.json").unlink()  # something is left to do
            shutil.rmtree(self.folders[name] / "model")

    def files(self, kind: str) -> tuple[Path, list[str]]:
        """The run that has files of a kind, and these."""
        run, last = self.folders["two ranks" if kind == "shards" else "sync"], f"checkpoints/checkpoint_{STEPS:06d}"
        found = {
            "checkpoint": [run / f"{last}.pt"],
            "shards": sorted(run.glob(f"{last}.shards/*")),
            "log": sorted(run.glob(f"*/part-{STEPS:08d}.parquet")),
            "metrics": [run / "metrics.jsonl"],
            "evaluation": [run / "evaluation.json"],
        }[kind]
        # The held-out responses are of after the last checkpoint.
        names = [str(path.relative_to(run)) for path in found if path.parent.name != "held_out.parquet"]
        assert len(names) >= 1 + (kind in ("shards", "log")), names
        return run, names


def step_ends(metrics: bytes) -> dict[int, int]:
    """The byte at which the row of each training step ends."""
    ends, at = {}, 0
    for line in metrics.splitlines(keepends=True):
        at += len(line)
        if "reward/mean" in (row := json.loads(line)):
            ends[row["step"]] = at
    assert sorted(ends) == list(range(1, STEPS + 1)), ends
    return ends


def damage(runs: Runs, kind: str, how: str, rng: random.Random, to: Path) -> tuple[int | None, str]:
    """Copies a run and damages a file of the copy; the step that it has to go on from, None for none, and the file."""
    run, files = runs.files(kind)
    name = rng.choice(files)
    shutil.copytree(run, to)
    content = (run / name).read_bytes()
    # The same file a step before.
    before = (run / name.replace(f"checkpoint_{STEPS:06d}", f"checkpoint_{STEPS - 1:06d}")).read_bytes()
    while (left := damaged(how, content, before, rng)) == content:  # a page that was zeros already
        pass
    if left is None:
        (to / name).unlink()
    else:
        (to / name).write_bytes(left)
    if kind == "evaluation":
        return STEPS, name
    if kind == "metrics":
        untouched = [k for k, end in step_ends(content).items() if (left or b"")[:end] == content[:end]]
        return max(untouched, default=None), name
    return STEPS - 1, name


def open_again(run: Path) -> tuple[int | None, str]:
    """Opens a run's folder as a resumed run does; the step that it goes on from, None if refused; what it said."""
    from grpo_rl.run.folder import Room, RunFolder
    from grpo_rl.settings.sections import Train
    from grpo_rl.storage import checkpoint_file
    from grpo_rl.training.checkpoint import checkpoints

    config = {}
    for path in checkpoints(run / "checkpoints"):
        with contextlib.suppress(ValueError, KeyError):
            config = json.loads(checkpoint_file.read(path)["config"])
            break
    train = Train(checkpoint_frequency=1, total_dialog_turns=10_000, elastic=True)
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
        try:
            with RunFolder(run, str(run), config, "", Room(4, 1000, 1000), train) as folder:
                folder.prepare()
                return folder.step, said.getvalue()
        except ValueError as error:
            return None, f"{said.getvalue()}{error}"


def judge(runs: Runs, kind: str, how: str, run: Path, expected: int | None, name: str) -> str | None:
    """Says what is wrong with how a damaged run was opened; None: nothing."""
    from tiny_runs import same

    from grpo_rl.report.files import read_evaluation
    from grpo_rl.storage import checkpoint_file

    original, _ = runs.files(kind)
    evaluation = read_evaluation(run, STEPS)
    step, said = open_again(run)
    if step != expected:
        return f"it went on from {step}, and {expected} is the newest that is whole: {said}"
    if kind == "evaluation":
        return None if evaluation in (None, read_evaluation(original, STEPS)) else f"another evaluation: {evaluation}"
    if expected is None:
        return None if is_told(kind, how, None, run / name, said) else f"refused, and not for {name}: {said}"
    taken, there = (folder / f"checkpoints/checkpoint_{step:06d}.pt" for folder in (run, original))
    if not same(checkpoint_file.read(taken), checkpoint_file.read(there)):
        return "the checkpoint is another"
    if kind != "shards":  # sharded runs say which of their files it was
        ends = step_ends((original / "metrics.jsonl").read_bytes())
        logged = (original / "metrics.jsonl").read_bytes()[: ends[step]]
        if not (run / "metrics.jsonl").read_bytes().startswith(logged):
            return "the metrics are others"
    return None if is_told(kind, how, step, run / name, said) else f"nothing was said of {name}: {said}"


def is_told(kind: str, how: str, step: int | None, file: Path, said: str) -> bool:
    """True if a run that goes on from a step says which file is damaged, where it is not the newest that it uses.

    Nobody can tell that there was a checkpoint whose file is missing. A run that refuses, whose step is None, names the
    file, too.
    """
    if step is None:
        return "no checkpoint can be used" in said and str(file) in said
    if step == STEPS or (kind == "checkpoint" and how == "missing"):
        return True
    name = f"{file.parent.name}/{file.name}"
    return any(line.strip().startswith("passed over: ") and name in line for line in said.splitlines())


def torn(runs: Runs, count: int, seed: int, finish_every: int = 0) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Damages so many copies; returns how many of each kind, and what was wrong.

    Args:
        finish_every: every so many are started and compared with the undisturbed run; 0: none.
    """
    from outcome import compared

    rng, done, wrong = random.Random(seed), Counter(), []
    cases = [(kind, how) for kind in KINDS for how in DAMAGES if kind in ("checkpoint", "shards") or how in LOST]
    for number in range(count):
        kind, how = cases[number % len(cases)]
        to = runs.work / f"torn {number}"
        expected, name = damage(runs, kind, how, rng, to)
        done[kind, how] += 1
        finishes = finish_every and kind != "shards" and expected and number % finish_every == finish_every - 1
        if finishes:
            mode = MODES["sync"]
            ended = start(mode, [*overrides(mode, runs.work), "train.keep_checkpoints=0"], to)
            if ended.status:
                fault = ended.said[-2000:]
            else:
                fault = "; ".join(compared(to, runs.work / "whole sync"))
        else:
            fault = judge(runs, kind, how, to, expected, name)
        if fault:
            wrong.append(f"{name}, {how} ({number}{', finished' * bool(finishes)}): {fault}")
        shutil.rmtree(to)
    return done, wrong


def main() -> int:
    """Prints what was damaged; 1 where damage was taken for good."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--finish-every", type=int, default=37, help="finishes every so many; 0: none")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="torn_")).resolve()
    begun = time.monotonic()
    with working_in(work):
        warm([MODES["sync"]], work)
        done, wrong = torn(Runs(work), options.count, options.seed, options.finish_every)
    print(f"| file | {' | '.join(DAMAGES)} |")
    print("| --- " * (1 + len(DAMAGES)) + "|")
    for kind in KINDS:
        print(f"| {kind} | {' | '.join(str(done[kind, how]) for how in DAMAGES)} |")
    for fault in wrong:
        print(f"FAULT {fault}")
    print(f"{done.total()} damaged runs, {time.monotonic() - begun:.0f} s: {len(wrong)} faults")
    return int(bool(wrong) or done.total() < options.count)


if __name__ == "__main__":
    sys.exit(main())
