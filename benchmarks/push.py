"""Measures the cost of a weight push in plain copies of the same bytes: `python benchmarks/push.py`.

All weights of SmolLM2-135M, in `harness.dtype`, go from a trainer to vLLM on a CPU, in a process of its own and in
this one. A push is all that `WeightSync.push` does: it pauses the engine, hands every tensor over, through shared
memory bucket by bucket where there are two processes, has vLLM load and pack it, compares digests of what each weight
was packed from with what was sent, and goes on.

The peer is one `Tensor.copy_` of each of the same tensors into memory that is there already, with as many threads. It
delivers nothing to another process, lays nothing out anew, and proves nothing: it is what moving the bytes once costs.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from loop_control import served

from grpo_rl.settings.devices import default_dtype

NAME = "push"
PUSH, IN_PROCESS, COPY = "push", "push in one process", "plain copy"


@dataclass(frozen=True)
class Work:
    """The weights that are pushed."""

    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    bucket_mib: int = 16
    copies: int = 5
    """The number of plain copies in a step; the step reports their mean."""
    device: str = "cpu"
    """The trainer's device."""
    engine_share: float = 0.5
    """The part of a GPU's memory that the engine in the same process takes."""


def load(work: Work) -> torch.nn.Module:
    """The trainer's model."""
    from transformers import AutoModelForCausalLM

    from grpo_rl.policies.hub import resolve_model

    return AutoModelForCausalLM.from_pretrained(resolve_model(work.model), dtype=harness.dtype()).to(work.device)


def copy_arm(steps: harness.Steps, work: Work) -> None:
    """Copies every tensor once."""
    tensors = [parameter.detach() for parameter in load(work).parameters()]
    buffers = [torch.zeros_like(tensor) for tensor in tensors]
    while steps.wait():
        start = time.perf_counter()
        for _ in range(work.copies):
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor)
        seconds = (time.perf_counter() - start) / work.copies
        steps.done(step_s=seconds, mib=sum(tensor.nbytes for tensor in tensors) / 2**20)


def push_arm(steps: harness.Steps, work: Work) -> None:
    """Pushes changed weights to an engine in another process."""
    from grpo_rl.engines.vllm.asynchronous import AsyncVLLMEngine
    from grpo_rl.policies.hub import resolve_model
    from grpo_rl.weights.push import WeightSync
    from grpo_rl.weights.shared_memory import SharedMemoryTransport

    model = load(work)
    with served(AsyncVLLMEngine(resolve_model(work.model), max_model_len=512, dtype=default_dtype())) as engine:
        transport = SharedMemoryTransport([engine], work.bucket_mib << 20)
        try:
            push(steps, model, WeightSync(model, transport))
        finally:
            transport.close()


def in_process_arm(steps: harness.Steps, work: Work) -> None:
    """Pushes changed weights to an engine in the same process."""
    from grpo_rl.engines.vllm.engine import VLLMEngine
    from grpo_rl.policies.hub import resolve_model
    from grpo_rl.weights.push import WeightSync

    model = load(work)
    # No graphs: their capture takes seconds, and a push touches none of them.
    settings = {"gpu_memory_utilization": work.engine_share, "enforce_eager": True, "dtype": default_dtype()}
    engine = VLLMEngine(resolve_model(work.model), 512, **settings)
    sync = WeightSync(model, engine)
    sync.push()  # the first one is read back by products
    push(steps, model, sync)
    engine.close()


def push(steps: harness.Steps, model: torch.nn.Module, sync: Any) -> None:
    """Pushes weights that have changed since the last push, and reads them back."""
    device = str(next(model.parameters()).device)
    while steps.wait():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        harness.synchronize(device)
        start = time.perf_counter()
        sync.push()
        harness.synchronize(device)
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        sync.verify()  # reads back all that products are made with, and moves nothing
        steps.done(step_s=seconds, proof_s=time.perf_counter() - start)


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--model", default=Work.model, help="a local folder or a hub name")
    args = parser.parse_args()
    quiet = harness.require_quiet(args.force)
    work = Work(args.model)
    with contextlib.ExitStack() as stack:
        arms = {
            name: stack.enter_context(contextlib.closing(harness.Arm(name, function, work)))
            for name, function in ((COPY, copy_arm), (PUSH, push_arm), (IN_PROCESS, in_process_arm))
        }
        results = harness.rounds({name: arm.step for name, arm in arms.items()}, args.steps)

    summary = {name: harness.summarize(reports) for name, reports in results.items()}
    copy, push = summary[COPY]["median"], summary[PUSH]["median"]
    ratio, here = push["step_s"] / copy["step_s"], summary[IN_PROCESS]["median"]["step_s"]
    print(
        f"a push: {1000 * push['step_s']:.0f} ms, in one process {1000 * here:.0f} ms; a plain copy of its "
        f"{copy['mib']:.0f} MiB: {1000 * copy['step_s']:.1f} ms; reading all back: {1000 * push['proof_s']:.0f} ms"
    )
    result = {
        "shows": "A push of all weights to a vLLM in another process, through shared memory, with the proof that it "
        "packed what was sent; in plain copies of the same bytes. Beside it, a push to a vLLM in the same process.",
        "peer": f"Tensor.copy_, torch {torch.__version__}",
        "arms": summary,
        "work": asdict(work),
        "code": harness.code("grpo_rl/engines", "grpo_rl/weights"),
        "machine": harness.machine(),
        **quiet,
    }
    harness.finish(NAME, ratio, result, args.out)


if __name__ == "__main__":
    main()
