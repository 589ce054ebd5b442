"""How much sooner a push in one process is over than by vLLM's own loading: `python benchmarks/push_in_process.py`.

All weights of SmolLM2-135M in bfloat16 go from a trainer to the `VLLMEngine` of the same process, on a CPU. A push is
all that `WeightSync.push` does, the proof included. From the third push on it writes each tensor to where vLLM's
kernels multiply by it, and reads all of it back from there.

The peer is what the first push does: vLLM loads the weights, which packs every layer anew, and the proof reads each
layer by a product with an identity matrix. It is the same engine: before its turn the tensors' places are forgotten,
and afterwards two pushes outside the measurement find them again. With one thread and with two; the figure is the
smaller ratio.
"""

from __future__ import annotations

import contextlib
import time
from unittest import mock

import harness
import torch

NAME = "push_in_process"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
THREADS = (1, 2)
BAR = 2.0


def push_arm(steps: harness.Steps) -> None:
    """Pushes changed weights by both roads, with each number of threads."""
    from transformers import AutoModelForCausalLM

    from grpo_rl.engines.vllm import engine as vllm
    from grpo_rl.policies.hub import resolve_model
    from grpo_rl.weights.push import WeightSync

    model = AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=torch.bfloat16)
    engine = vllm.VLLMEngine(resolve_model(MODEL), max_model_len=512)
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    sync = WeightSync(model, engine)

    def push() -> float:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        start = time.perf_counter()
        sync.push()
        return time.perf_counter() - start

    def by_vllms_own_road() -> float:
        with mock.patch.object(vllm, "find_places", lambda model, loaded: None):
            worker._places = None
            seconds = push()
        push(), push()  # places are found, and proven
        return seconds

    push(), push()
    while steps.wait():
        report = {}
        for threads in THREADS:
            torch._C.set_num_threads(threads)  # vLLM has put something in the place of torch's that does nothing
            assert worker._places is not None, "the weights' places are not known in this vLLM"
            report |= {f"direct_{threads}_s": push(), f"own_{threads}_s": by_vllms_own_road()}
        steps.done(**report)
    engine.close()


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    quiet = harness.require_quiet(args.force)
    with contextlib.closing(harness.Arm(NAME, push_arm)) as arm:
        results = harness.rounds({"both roads": arm.step}, args.steps)
    summary = {name: harness.summarize(reports) for name, reports in results.items()}
    median = summary["both roads"]["median"]
    rows = [
        {
            "threads": threads,
            "direct ms": 1000 * median[f"direct_{threads}_s"],
            "vLLM's own ms": 1000 * median[f"own_{threads}_s"],
            "times faster": median[f"own_{threads}_s"] / median[f"direct_{threads}_s"],
        }
        for threads in THREADS
    ]
    figure = min(row["times faster"] for row in rows)
    result = {
        "shows": "A push of all weights of SmolLM2-135M to a vLLM in the same process, proof included: straight to "
        "where vLLM multiplies by them, and read from there, against vLLM's own loading, read by products.",
        "peer": "vLLM's reload_weights, and a product of each layer with an identity matrix",
        "bars": [harness.bar("times faster than by vLLM's own road", figure, at_least=BAR)],
        "table": rows,
        "machine": harness.machine(),
        **quiet,
    }
    harness.finish(NAME, figure, result, args.out)


if __name__ == "__main__":
    main()
