"""Measures how long a checkpoint keeps a run from training: `python benchmarks/checkpoint_stall.py`.

The quickstart runs with a checkpoint after every other step, so that steps during a checkpoint and steps without one
take turns. Timed are the calls that hold up the loop: the one that begins to write, and the wait before the optimizer
changes what is being written. The rest of a checkpoint, its digests, the sync of the logs and the disk, goes on in a
thread during the next step's sampling, which it may slow down where both want the same cores: the paired difference
between the two kinds of steps includes all of that.

With ``--tiny`` a random model of two layers does it in seconds: the figures then mean nothing.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from harness import arguments, bar, code, finish, machine, require_quiet

from grpo_rl.intervals import paired_gain
from grpo_rl.run.folder import RunFolder
from grpo_rl.run.run import Run
from grpo_rl.training import checkpoint

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from tiny_runs import run_script, tiny_run

NAME = "checkpoint_stall"
ROOT = Path(__file__).resolve().parents[1]
MOST = 0.02
"""Share of a step that a checkpoint may hold up training."""
EVERY = 2
"""Steps from one checkpoint to the next."""
RESPONSES_A_STEP = {False: 128, True: 16}


@dataclass
class Times:
    """Seconds of a run: of its steps, and of its checkpoints.

    Args:
        ends: clock at the end of each step, before the checkpoint that follows it.
        held: of each checkpoint, in which the loop did nothing else.
        written: of each checkpoint, in the thread.
    """

    ends: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)

    def steps(self) -> tuple[list[float], list[float]]:
        """Seconds of steps without a checkpoint, and of the steps after them, during one; the first is a warm-up."""
        steps = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        pairs = list(zip(steps[::EVERY], steps[1::EVERY], strict=False))
        return [alone for alone, _ in pairs], [beside for _, beside in pairs]


@contextmanager
def watched() -> Iterator[Times]:
    """Times the run that goes on meanwhile."""
    times = Times()
    save, settle, finish_step, save_file = RunFolder.save, RunFolder.settle, Run.finish_step, checkpoint.save

    def timed(function, seconds: list[float], *given, **named):
        start = time.perf_counter()
        done = function(*given, **named)
        seconds.append(time.perf_counter() - start)
        return done

    def begin(self, step, *given):
        if len(times.ends) < step:
            times.ends.append(time.perf_counter())
        times.held.append(0.0)
        begun: list[float] = []
        path = timed(save, begun, self, step, *given)
        times.held[-1] += begun[0]
        return path

    def wait(self):
        waited: list[float] = []
        timed(settle, waited, self)
        if times.held:
            times.held[-1] += waited[0]

    def end_step(self, groups):
        finish_step(self, groups)
        if len(times.ends) < self.step:
            times.ends.append(time.perf_counter())

    with (
        mock.patch.object(RunFolder, "save", begin),
        mock.patch.object(RunFolder, "settle", wait),
        mock.patch.object(Run, "finish_step", end_step),
        mock.patch.object(checkpoint, "save", lambda *a, **k: timed(save_file, times.written, *a, **k)),
    ):
        yield times


def measure(folder: Path, steps: int, tiny: bool) -> Times:
    """The times of a run of so many steps without a checkpoint, and as many during one."""
    base = tiny_run(folder) if tiny else ["+experiment=quickstart", "inference_model.engine=transformers"]
    overrides = [
        *base,
        f"train.total_dialog_turns={RESPONSES_A_STEP[tiny] * (EVERY * steps + 1)}",
        f"train.checkpoint_frequency={EVERY}",
        "train.keep_checkpoints=1",
        "evaluate.rows=0",
    ]
    with watched() as times:
        run_script(ROOT / "sota" / "grpo.py", overrides, folder / "run")
    # The last one comes with the run's end, which waits for it in any case.
    times.held, times.written = times.held[:steps], times.written[:steps]
    return times


def main() -> None:
    """Prints the share of a step in which a checkpoint holds it up."""
    parser = arguments(__doc__, steps=8)
    parser.add_argument("--tiny", action="store_true", help="a random model, in seconds; the figures mean nothing")
    options = parser.parse_args()
    quiet = require_quiet(options.force)
    with tempfile.TemporaryDirectory() as folder:
        times = measure(Path(folder), options.steps, options.tiny)
    alone, beside = times.steps()
    print("steps without and during a checkpoint", [alone, beside], "held", times.held, file=sys.stderr)
    step, held = statistics.median(alone), statistics.median(times.held)
    more = paired_gain(alone, beside)
    result = {
        "shows": "how long a checkpoint keeps the quickstart from training, digests and locks included",
        "bars": [bar("share of a step that a checkpoint holds up", held / step, at_most=MOST)],
        "table": [
            {
                "step_s": round(step, 2),
                "held_up_s": round(held, 3),
                "written_in_s": round(statistics.median(times.written), 2),
                "step_beside_it_longer_by_s": f"{more.mean:+.2f} ({more.low:+.2f} to {more.high:+.2f})",
            }
        ],
        "steps": {"alone_s": alone, "beside_s": beside, "held_s": times.held, "written_s": times.written},
        "code": code("grpo_rl/run", "grpo_rl/storage", "grpo_rl/training"),
        "machine": machine(),
        **quiet,
    }
    for name, value in result["table"][0].items():
        print(f"{name}: {value}")
    finish(NAME, held / step, result, options.out)


if __name__ == "__main__":
    main()
