"""Measures how many times faster the head is than TRL's fused one: `python benchmarks/head.py`.

The head turns hidden states into log-probabilities and entropies of the sampled tokens, and their gradients into those
of the hidden states and of the weight. Compared: `grpo_rl.policies.head`; the fused head that TRL 1.16's `GRPOTrainer`
scores with, called as it calls it (its own chunk of the vocabulary, entropies asked for); and the naive one, with all
logits. With log-probabilities alone in the loss, entropies being only reported, and for the first shape once more with
an entropy term. Ours runs in a process whose allocator is set up as for training; TRL's in one as TRL leaves it, which
the bars are about, and, shown next to it, in one set up as ours.

Inputs are bf16 (or fp32, see `harness.dtype`), and so are the products that make logits, on all sides. On CPU, TRL
multiplies the logits' gradient in fp32, ours in the inputs' dtype with fp32 sums over tiles; the naive head in the
inputs' dtype. All return the weight's gradient in it. In training `PolicyOptimizer` asks ours for an fp32 one, which
takes more memory than a bf16 one: that is one more arm, without a bar. How far each head's gradients are from fp64's is
measured at a few tokens, and stands in the table's last rows: they are one tile of tokens, so our weight gradient is
one product there, in the inputs' dtype, in whatever dtype it is returned.

Time is of a forward and a backward. Memory is what the process's peak rises above its level in its first full-size
call after a tiny one, gradients included. The figure is the smallest ratio of times without an entropy term.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import harness
import torch
from torch import Tensor

NAME = "head"
OURS, OURS_FP32, PEERS = "grpo_rl", "grpo_rl_fp32_gradient", ("trl_fused", "trl_fused_our_allocator")
ENTROPY_COEF = 0.01
TOLERANCE = 0.02
"""Tolerance of gradient norms, relative."""
FEW = 256
"""Tokens at which gradients are compared with fp64's."""

Head = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""A head: hidden [N, E], weight [V, E], ids [N], whether entropies count -> log-probabilities and entropies."""


@dataclass(frozen=True)
class Shape:
    """N tokens, E hidden size, V vocabulary; ``memory_bar`` is the share of the peer's memory that we may take."""

    tokens: int
    hidden: int
    vocab: int
    memory_bar: float

    def __str__(self) -> str:
        return f"N={self.tokens} E={self.hidden} V={self.vocab}"


SHAPES = (Shape(1024, 576, 49152, 1 / 4), Shape(2048, 896, 151936, 1 / 2))
SPEED_BAR = 2.0


def ours() -> Head:
    """Our head, without the bias, temperature and soft cap that `TrainPolicy.score` passes on."""
    from grpo_rl.policies.head import log_prob_and_entropy

    return lambda hidden, weight, ids, entropy_counts: log_prob_and_entropy(hidden, weight, ids)


def trl_fused() -> Head:
    """TRL's, as ``add_fused_lm_head`` calls it for ``GRPOTrainer``."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    def head(hidden: Tensor, weight: Tensor, ids: Tensor, entropy_counts: bool) -> tuple[Tensor, Tensor]:
        rest = (1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy"))
        log_probs, entropies, *_ = ChunkedLogProbFunction.apply(hidden, weight, None, ids, *rest)
        return log_probs, entropies

    return head


def naive() -> Head:
    """All logits at once; what an entropy that is only reported needs is not kept."""

    def head(hidden: Tensor, weight: Tensor, ids: Tensor, entropy_counts: bool) -> tuple[Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden, weight)
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        with torch.set_grad_enabled(entropy_counts):
            entropies = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, ids[:, None])[:, 0], entropies

    return head


def liger() -> Head:
    """Liger's fused scaled cross entropy with entropies: CuTe kernels on Hopper, PyTorch's operators elsewhere."""
    # To check the ids it would wait for the GPU in every call.
    os.environ.setdefault("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "0")
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    def head(hidden: Tensor, weight: Tensor, ids: Tensor, entropy_counts: bool) -> tuple[Tensor, Tensor]:
        nll, entropies = LigerFusedLinearScaledCrossEntropyFunction.apply(
            hidden, weight, ids, temperature=1.0, return_entropy=True
        )
        return -nll, entropies

    return head


HEADS = {OURS: ours, OURS_FP32: ours, PEERS[0]: trl_fused, PEERS[1]: trl_fused, "naive": naive}
ALL_HEADS = HEADS | {"liger": liger}
"""Those of :data:`HEADS`, and Liger's, which is a peer on GPUs of its own kind alone (`gpu.py`)."""


def forward_backward(
    head: Head, inputs: Sequence[Tensor], entropy_counts: bool, weight_grad_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Gradients of the hidden states and of the weight.

    Args:
        weight_grad_dtype: of the latter; by default the weight's.
    """
    hidden, weight, ids, advantages = inputs
    leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    leaves[1].grad_dtype = weight_grad_dtype or weight.dtype
    log_probs, entropies = head(*leaves, ids, entropy_counts)
    entropy_term = ENTROPY_COEF * entropies.mean() if entropy_counts else 0.0
    (-(log_probs * advantages).mean() - entropy_term).backward()
    return [leaf.grad for leaf in leaves]


def gradients_of(name: str) -> Callable[[Sequence[Tensor], bool], list[Tensor]]:
    """The function that makes an arm's gradients, of inputs and whether entropies count in the loss."""
    dtype = torch.float32 if name == OURS_FP32 else None
    return functools.partial(forward_backward, ALL_HEADS[name](), weight_grad_dtype=dtype)


def make_inputs(shape: Shape, device: str) -> list[Tensor]:
    """Hidden states and weight in `harness.dtype`, ids and advantages; the same in every arm."""
    made = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    hidden = torch.randn(shape.tokens, shape.hidden, **made)
    # Logits of unit variance.
    weight = torch.randn(shape.vocab, shape.hidden, **made) / math.sqrt(shape.hidden)
    ids = torch.randint(shape.vocab, (shape.tokens,), **made)
    advantages = torch.randn(shape.tokens, **made)
    return [hidden.to(harness.dtype()), weight.to(harness.dtype()), ids, advantages]


def arm(steps: harness.Steps, name: str, shape: Shape, entropy_counts: bool, device: str) -> None:
    """Forward and backward of one head at one shape; its memory is measured before the first step."""
    if name in (OURS, OURS_FP32, PEERS[1]):
        from grpo_rl.policies.before_loading import keep_freed_memory

        keep_freed_memory()
    step = timed(name, make_inputs(shape, device), entropy_counts)
    while steps.wait():
        steps.done(**step())


def timed(name: str, inputs: Sequence[Tensor], entropy_counts: bool) -> Callable[[], dict[str, float]]:
    """A forward and backward of one head that reports its seconds; its memory is measured before, once."""
    device, run = str(inputs[0].device), gradients_of(name)
    tiny = [inputs[0][:4], inputs[1][:64], inputs[2][:4] % 64, inputs[3][:4]]
    run(tiny, entropy_counts)
    memory = harness.peak_above(lambda: run(inputs, entropy_counts), device)

    def step() -> dict[str, float]:
        harness.synchronize(device)
        start = time.perf_counter()
        gradients = run(inputs, entropy_counts)
        harness.synchronize(device)
        seconds = time.perf_counter() - start
        norms = [gradient.float().norm().item() for gradient in gradients]
        return {
            "fwd_bwd_s": seconds,
            "memory_mib": memory / 2**20,
            "grad_hidden_norm": norms[0],
            "grad_weight_norm": norms[1],
        }

    return step


def measured(shape: Shape, entropy_counts: bool, args: argparse.Namespace) -> dict[str, dict]:
    """Medians of each head, in turns."""
    with contextlib.ExitStack() as stack:
        arms = {}
        for name in HEADS:
            process = harness.Arm(name, arm, name, shape, entropy_counts, args.device)
            arms[name] = stack.enter_context(contextlib.closing(process))
        results = harness.rounds({name: arm.step for name, arm in arms.items()}, args.steps)
    return {name: harness.summarize(reports)["median"] for name, reports in results.items()}


def check_agreement(medians: Mapping[str, Mapping[str, float]]) -> None:
    """Ends the benchmark where gradients differ by more than bf16 explains: the heads did not do the same work."""
    for name, norm in itertools.product(medians, ("grad_hidden_norm", "grad_weight_norm")):
        theirs, own = medians[name][norm], medians[OURS][norm]
        if not math.isclose(theirs, own, rel_tol=TOLERANCE):
            sys.exit(f"error: {norm} is {own:.5g} with {OURS} and {theirs:.5g} with {name}: not the same work")


def ratios(medians: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The factor by which ours is faster than each head, and its share of that head's memory.

    >>> ratios({OURS: {"fwd_bwd_s": 2.0, "memory_mib": 1.0}, "naive": {"fwd_bwd_s": 3.0, "memory_mib": 4.0}})["naive"]
    {'our speed-up': 1.5, 'our share of its memory': 0.25}
    """
    own = medians[OURS]
    return {
        name: {
            "our speed-up": median["fwd_bwd_s"] / own["fwd_bwd_s"],
            "our share of its memory": own["memory_mib"] / median["memory_mib"] if median["memory_mib"] else math.inf,
        }
        for name, median in medians.items()
    }


def errors(shape: Shape, entropy_counts: bool, device: str) -> list[dict]:
    """A row for each head: how far its gradients are from those of all logits in fp64, relative, in L2 norm."""
    inputs = make_inputs(shape, device)
    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    truth = forward_backward(naive(), exact, entropy_counts)
    rows = []
    for name in HEADS:
        if name == PEERS[1]:
            continue  # an allocator changes no number
        hidden_error, weight_error = (
            ((gradient.double() - true).norm() / true.norm()).item()
            for gradient, true in zip(gradients_of(name)(inputs, entropy_counts), truth, strict=True)
        )
        rows.append(
            {
                "shape": str(shape),
                "entropy term": entropy_counts,
                "head": name,
                "hidden gradient's error": hidden_error,
                "weight gradient's error": weight_error,
            }
        )
    return rows


def main() -> None:
    args = parse()
    load = harness.require_quiet(args.force)
    shapes = [Shape(*numbers, memory_bar=1.0) for numbers in args.shape] if args.shape else SHAPES
    rows, bars, speedups = [], [], []
    runs = [(shapes[0], False), (shapes[0], True), *((shape, False) for shape in shapes[1:])]
    for shape, entropy_counts in runs:
        print(f"{shape}, entropy {'in' if entropy_counts else 'not in'} the loss", file=sys.stderr, flush=True)
        medians = measured(shape, entropy_counts, args)
        check_agreement(medians)
        compared = ratios(medians)
        for name, median in medians.items():
            rows.append(
                {
                    "shape": str(shape),
                    "entropy term": entropy_counts,
                    "head": name,
                    "ms": 1000 * median["fwd_bwd_s"],
                    "memory MiB": median["memory_mib"],
                    **compared[name],
                }
            )
        if not entropy_counts:
            shipped = next(row for row in rows[-len(medians) :] if row["head"] == PEERS[0])
            speedups.append(shipped["our speed-up"])
            bars.append(harness.bar(f"times faster than TRL's as it ships, {shape}", speedups[-1], at_least=SPEED_BAR))
            memory = shipped["our share of its memory"]
            bars.append(harness.bar(f"share of its memory, {shape}", memory, at_most=shape.memory_bar))
    dtype = harness.dtype_name()
    small = replace(shapes[0], tokens=min(FEW, shapes[0].tokens))
    error_rows = [row for entropy_counts in (False, True) for row in errors(small, entropy_counts, args.device)]
    hidden_error = {row["head"]: row["hidden gradient's error"] for row in error_rows if not row["entropy term"]}
    result = {
        "shows": "Forward and backward of log-probabilities and entropies of sampled tokens, against TRL's fused head. "
        f"Inputs and the products that make logits are {dtype} on both sides, and so is the weight's gradient that "
        f"both return; {OURS_FP32} returns it in fp32, as training asks for. TRL's products in the backward pass are "
        f"fp32 on CPU; ours are {dtype}, with fp32 sums over tiles. The last rows are relative L2 errors against fp64; "
        f"that of the hidden states' gradient is {hidden_error[OURS] / hidden_error[PEERS[0]]:.2f} times TRL's.",
        "peer": f"the fused head of TRL {version('trl')}'s GRPOTrainer (ChunkedLogProbFunction)",
        "bars": bars,
        "table": rows + error_rows,
        "plots": [
            {
                "title": f"{what}, without an entropy term",
                "y": unit,
                "bars": {f"{row['head']}\n{row['shape']}": row[unit] for row in rows if not row["entropy term"]},
            }
            for what, unit in (("time", "ms"), ("memory", "memory MiB"))
        ],
        "steps": args.steps,
        "device": args.device,
        "code": harness.code("grpo_rl/policies/before_loading.py", "grpo_rl/policies/head.py"),
        "machine": harness.machine(),
        **load,
    }
    harness.finish(NAME, min(speedups), result, args.out)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--shape", type=harness.at_least_one, nargs=3, action="append", metavar=("N", "E", "V"),
        help="tokens, hidden size, vocabulary; may be repeated (default: those of two models)",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
