"""Measures how long a checkpoint keeps a run from training: `python benchmarks/checkpoint_stall.py`.

The quickstart runs for a few steps with a checkpoint of each. Timed are the calls that can hold up its loop: the one
that begins to write, and the wait before the optimizer changes what is being written. What is left of a
checkpoint, its digests, its locks and the disk, goes on in a thread beside the sampling, which it may slow down where
both want the same cores: the steps of a run without checkpoints, which takes turns with it, say by how much.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness import arguments, bar, finish, machine, require_quiet

ROOT = Path(__file__).resolve().parents[1]
MOST = 0.02
"""Share of a step that a checkpoint may hold up training."""


def timed(run: Path, steps: int, frequency: int) -> dict[str, list[float]]:
    """Seconds of each step of a run of the quickstart, and those in which checkpoints held it up.

    Args:
        frequency: steps between checkpoints; 0: none before the end.
    """
    from grpo_rl.run.folder import RunFolder
    from grpo_rl.run.run import Run
    from grpo_rl.testing import run_script

    held: list[float] = []
    ends: list[float] = []
    writes: list[float] = []
    save, settle, finish_step = RunFolder.save, RunFolder.settle, Run.finish_step

    def timed_call(function, *given):
        start = time.perf_counter()
        done = function(*given)
        held[-1] += time.perf_counter() - start
        return done

    def finish_one(self, groups):
        held.append(0.0)
        finish_step(self, groups)
        ends.append(time.perf_counter())

    from grpo_rl.training import checkpoint

    save_file = checkpoint.save

    def timed_file(*given, **named):
        start = time.perf_counter()
        path = save_file(*given, **named)
        writes.append(time.perf_counter() - start)
        return path

    RunFolder.save = lambda self, *given: timed_call(save, self, *given)
    RunFolder.settle = lambda self: timed_call(settle, self) if held else settle(self)
    Run.finish_step, checkpoint.save = finish_one, timed_file
    try:
        overrides = [
            "+experiment=quickstart",
            "inference_model.engine=transformers",
            f"train.total_dialog_turns={128 * steps}",
            f"train.checkpoint_frequency={frequency}",
            "train.keep_checkpoints=1",
            "evaluate.rows=0",
        ]
        run_script(ROOT / "sota" / "grpo.py", overrides, run)
    finally:
        RunFolder.save, RunFolder.settle, Run.finish_step, checkpoint.save = save, settle, finish_step, save_file
    # The last checkpoint comes with the run's end, which waits for it in any case.
    return {
        "step_s": [b - a for a, b in zip(ends, ends[1:], strict=False)],
        "held_s": held[:-1],
        "write_s": writes[:-1],
    }


def main() -> None:
    """Prints the share of a step in which a checkpoint holds it up."""
    options = arguments(__doc__, steps=6).parse_args()
    quiet = require_quiet(options.force)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, frequency in (("with checkpoints", 1), ("without", 0)):
            found[name] = timed(Path(folder) / name.replace(" ", "_"), options.steps, frequency)
            print(name, {key: [round(x, 2) for x in values] for key, values in found[name].items()}, file=sys.stderr)
    step, with_s = (statistics.median(found[name]["step_s"]) for name in ("without", "with checkpoints"))
    held = statistics.median(found["with checkpoints"]["held_s"])
    result = {
        "shows": "how long a checkpoint of each step keeps the quickstart from training",
        "bars": [bar("share of a step that a checkpoint holds up", held / step, at_most=MOST)],
        "table": [
            {
                "step_s": round(step, 2),
                "step_with_checkpoint_s": round(with_s, 2),
                "held_up_s": round(held, 3),
                "written_in_s": round(statistics.median(found["with checkpoints"]["write_s"]), 2),
            }
        ],
        "steps": found,
        "machine": machine(),
        **quiet,
    }
    for name, value in result["table"][0].items():
        print(f"{name}: {value}")
    finish("checkpoint_stall", held / step, result, options.out)


if __name__ == "__main__":
    main()
