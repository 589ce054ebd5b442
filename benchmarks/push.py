"""What a weight push through shared memory costs, in plain copies of the same bytes: `python benchmarks/push.py`.

All weights of SmolLM2-135M in bfloat16 go from a trainer to vLLM, whose core is a process of its own. A push is all
that `WeightSync.push` does: it pauses the engine, writes every tensor into shared memory bucket by bucket, has the
worker pack it for vLLM's CPU kernels, asks what each packed weight was packed from, compares that with what was sent,
and goes on. The first push, which vLLM loads in its own way, is the warm-up round; it is reported nowhere.

The peer is one `Tensor.copy_` of each of the same tensors into memory that is there already, with as many threads. It
delivers nothing to another process, lays nothing out anew, and proves nothing: it is what moving the bytes once costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import asdict, dataclass

import harness
import torch

NAME = "push"
PUSH, COPY = "push", "plain copy"
BAR = 3.0


@dataclass(frozen=True)
class Work:
    """What is pushed."""

    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    bucket_mib: int = 16
    copies: int = 5
    """Plain copies in a step; the step reports their mean."""


def load(work: Work) -> torch.nn.Module:
    """The trainer's model."""
    from transformers import AutoModelForCausalLM

    from grpo_rl.policies.hub import resolve_model

    return AutoModelForCausalLM.from_pretrained(resolve_model(work.model), dtype=torch.bfloat16)


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
    """Pushes weights that have changed since the last push."""
    from grpo_rl.engines.vllm.asynchronous import AsyncVLLMEngine
    from grpo_rl.policies.hub import resolve_model
    from grpo_rl.weights.push import WeightSync
    from grpo_rl.weights.remote import LoopControl
    from grpo_rl.weights.shared_memory import SharedMemoryTransport

    model = load(work)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    engine = AsyncVLLMEngine(resolve_model(work.model), max_model_len=512)
    transport = SharedMemoryTransport([LoopControl(engine, loop)], work.bucket_mib << 20)
    sync = WeightSync(model, transport)
    try:
        while steps.wait():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            start = time.perf_counter()
            sync.push()
            seconds = time.perf_counter() - start
            start = time.perf_counter()
            sync.verify()  # reads back all that products are made with, and moves nothing
            steps.done(step_s=seconds, proof_s=time.perf_counter() - start)
    finally:
        asyncio.run_coroutine_threadsafe(engine.close(), loop).result(60)
        transport.close()


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    quiet = harness.require_quiet(args.force)
    work = Work()
    with contextlib.ExitStack() as stack:
        arms = {
            name: stack.enter_context(contextlib.closing(harness.Arm(name, function, work)))
            for name, function in ((COPY, copy_arm), (PUSH, push_arm))
        }
        results = harness.rounds({name: arm.step for name, arm in arms.items()}, args.steps)

    summary = {name: harness.summarize(reports) for name, reports in results.items()}
    copy, push = summary[COPY]["median"], summary[PUSH]["median"]
    ratio = push["step_s"] / copy["step_s"]
    print(
        f"a push: {1000 * push['step_s']:.0f} ms; a plain copy of its {copy['mib']:.0f} MiB: "
        f"{1000 * copy['step_s']:.1f} ms; reading all of it back: {1000 * push['proof_s']:.0f} ms"
    )
    result = {
        "shows": "A push of all weights to a vLLM in another process, through shared memory, with the proof that it "
        "computes with them; in plain copies of the same bytes.",
        "peer": f"Tensor.copy_, torch {torch.__version__}",
        "bars": [harness.bar("plain copies of the bytes", ratio, at_most=BAR)],
        "arms": summary,
        "work": asdict(work),
        "machine": harness.machine(),
        **quiet,
    }
    harness.finish(NAME, ratio, result, args.out)


if __name__ == "__main__":
    main()
