"""Runs sota/grpo.py as one of torchrun's ranks, of which one is killed or frozen at an optimizer step, once.

The fault is JSON in $GRPO_RL_FAULT: the ``rank``, the ``step`` before whose gradients are added up, the ``signal``, a
file ``witness`` that tells who was hit and when, and whether torchrun's own process on that node dies, too (``node``).
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path

from grpo_rl.training.optimizer import PolicyOptimizer

SCRIPT = Path(__file__).resolve().parents[2] / "sota" / "grpo.py"


def arm(fault: dict, witness: Path) -> None:
    """Has the fault happen in this process."""
    step, steps = PolicyOptimizer.step, 0

    def faulty(self: PolicyOptimizer, *arguments: object, **named: object) -> object:
        nonlocal steps
        steps += 1
        if steps == fault["step"]:
            time.sleep(fault.get("after_s", 0.0))  # the others wait in the exchange of gradients
            witness.write_text(json.dumps({"pid": os.getpid(), "rank": fault["rank"], "at": time.time()}))
            if fault.get("node"):
                os.kill(os.getppid(), fault["signal"])
            os.kill(os.getpid(), fault["signal"])
        return step(self, *arguments, **named)

    PolicyOptimizer.step = faulty


if __name__ == "__main__":
    if said := os.environ.get("GRPO_RL_FAULT"):
        fault = json.loads(said)
        if int(os.environ["RANK"]) == fault["rank"] and not Path(fault["witness"]).exists():
            arm(fault, Path(fault["witness"]))
    sys.argv[0] = str(SCRIPT)
    runpy.run_path(str(SCRIPT), run_name="__main__")
