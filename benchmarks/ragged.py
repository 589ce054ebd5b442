"""Speedup over TRL in trained tokens per second, on ragged responses: `python benchmarks/ragged.py`.

Responses have log-normal lengths, 50 tokens at the median, 8 times that at the 99th percentile: the quantiles of that
distribution, so that a small batch has its shape, dealt to the prompts at random. Tensors are prebuilt; timed is one
optimizer step's forward, loss and backward on the default model.

- ours: `TrainPolicy.score`, `GRPOLoss` and backward over micro-batches as in training, gradients summed in fp32;
- TRL: the real `GRPOTrainer`'s `_compute_loss` and backward, weights and gradients in `harness.dtype`, no gradient
  checkpointing, on the batch as its `_prepare_inputs` makes it: padded to the step's longest
  response, shuffled, cut in batches. Several sizes of these batches are tried alone, the fastest also with our
  allocator settings. The fastest of all is the peer, and takes turns with ours.

Old log-probabilities are those of the present weights, so both sides make the same gradient; its norm is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import harness
import torch
from lengths import dealt_lengths

from grpo_rl.policies.before_loading import keep_freed_memory

NAME = "ragged"
OURS = "grpo_rl"
BAR = 3.0
TOLERANCE = 0.05
"""Tolerance of the gradient norms of the two computations, relative; wide enough for bf16."""


@dataclass(frozen=True)
class Work:
    """One optimizer step: ``prompts`` prompts, ``repeats`` responses to each.

    >>> work = Work("", prompts=2, repeats=2, prompt=1, median=50, p99_over_median=8.0, longest=99,
    ...             micro_batch_tokens=1)
    >>> sorted(length for row in work.lengths for length in row)
    [18, 38, 66, 99]
    """

    model: str
    prompts: int
    repeats: int
    prompt: int
    median: int
    p99_over_median: float
    longest: int
    micro_batch_tokens: int

    @property
    def lengths(self) -> list[list[int]]:
        """Lengths of the responses to each prompt."""
        return dealt_lengths(self.prompts, self.repeats, self.median, self.p99_over_median, self.longest)


def make_groups(work: Work, vocab: int) -> list:
    """Groups of random ids whose responses are alternately good and bad; the same in every arm."""
    from grpo_rl.testing import random_group

    advantages = torch.tensor([1.0 if g % 2 else -1.0 for g in range(work.repeats)])
    return [
        random_group(work.prompt, lengths, vocab, group_id=i, seed=i).with_advantages(advantages)
        for i, lengths in enumerate(work.lengths)
    ]


def our_arm(steps: harness.Steps, work: Work) -> None:
    """Ours, with the gradients that the optimizer keeps; its step is not timed and changes nothing."""
    from grpo_rl.data.batching import MicroBatching
    from grpo_rl.losses.grpo import GRPOLoss
    from grpo_rl.policies.policy import TrainPolicy
    from grpo_rl.training.micro_batches import scored_micro_batches
    from grpo_rl.training.optimizer import PolicyOptimizer

    policy = TrainPolicy.load(Path(work.model), harness.dtype())
    groups = make_groups(work, policy.model.config.vocab_size)
    with torch.no_grad():
        groups = [replace(group, log_probs=policy.score([group])[0]) for group in groups]
    optimizer, loss = PolicyOptimizer(policy.model, name="sgd", lr=0.0), GRPOLoss()
    while steps.wait():
        start = time.perf_counter()
        for tokens in scored_micro_batches(policy, groups, MicroBatching(work.micro_batch_tokens)):
            loss(tokens)["loss_objective"].backward()
        seconds = time.perf_counter() - start
        steps.done(fwd_bwd_s=seconds, grad_norm=optimizer.step().grad_norm)


def trl_arm(steps: harness.Steps, work: Work, batch: int, our_allocator: bool = False) -> None:
    """TRL's loss, with ``batch`` responses in a forward."""
    import peers
    from transformers import AutoTokenizer

    if our_allocator:
        keep_freed_memory()
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = peers.trl_trainer(work.model, tokenizer, work.repeats, batch, Path(folder))
        batches = peers.trl_batches(make_groups(work, trainer.model.config.vocab_size), batch, tokenizer.pad_token_id)
        while steps.wait():
            start = time.perf_counter()
            peers.trl_backward(trainer, batches)
            seconds = time.perf_counter() - start
            gradients = [p.grad.float() for p in trainer.model.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            trainer.model.zero_grad()
            steps.done(fwd_bwd_s=seconds, grad_norm=norm)


def trl_name(batch: int, our_allocator: bool = False) -> str:
    """
    >>> trl_name(8), trl_name(8, our_allocator=True)
    ('trl_batch8', 'trl_batch8_our_allocator')
    """
    return f"trl_batch{batch}{'_our_allocator' * our_allocator}"


def fastest_setting(work: Work, batches: Sequence[int], tried: dict[str, float | str]) -> tuple[int, bool]:
    """The batch of TRL's fastest step alone, and the allocator; more arms than one may not fit next to ours.

    Raises:
        ValueError: none finished.
    """
    times: dict[tuple[int, bool], float] = {}

    def try_alone(*setting: Any) -> None:
        name = trl_name(*setting)
        print(f"trying {name}", file=sys.stderr, flush=True)
        try:
            with contextlib.closing(harness.Arm(name, trl_arm, work, *setting)) as arm:
                arm.step()
                tried[name] = times[setting] = min(arm.step()["fwd_bwd_s"] for _ in range(2))
        except harness.ArmError as error:
            tried[name] = str(error).splitlines()[-1]
        print(f"  {tried[name]}", file=sys.stderr, flush=True)

    for batch in batches:
        try_alone(batch, False)
    if not times:
        raise ValueError(f"TRL finished with none of its batches: {tried}")
    try_alone(min(times, key=times.__getitem__)[0], True)
    return min(times, key=times.__getitem__)


def main() -> None:
    args = parse()
    load = harness.require_quiet(args.force)
    from grpo_rl.policies.hub import resolve_model

    tried: dict[str, float | str] = {}
    responses = args.prompts * args.repeats
    try:
        work = Work(
            str(resolve_model(args.model)), args.prompts, args.repeats, args.prompt, args.median,
            args.p99_over_median, args.longest, args.micro_batch_tokens,
        )  # fmt: skip
        if not (batches := [batch for batch in args.trl_batch if responses % batch == 0]):
            raise ValueError(f"none of --trl-batch {args.trl_batch} divides {responses} responses")
        setting = fastest_setting(work, batches, tried)
    except ValueError as error:
        sys.exit(f"error: {error}")
    functions = {OURS: (our_arm,), trl_name(*setting): (trl_arm, *setting)}
    with contextlib.ExitStack() as stack:
        arms = {
            name: stack.enter_context(contextlib.closing(harness.Arm(name, function, work, *rest)))
            for name, (function, *rest) in functions.items()
        }
        results = harness.rounds({name: arm.step for name, arm in arms.items()}, args.steps)

    summary = {name: harness.summarize(reports) for name, reports in results.items()}
    norms = {name: arm["median"]["grad_norm"] for name, arm in summary.items()}
    if not all(math.isclose(norms[OURS], norm, rel_tol=TOLERANCE) for norm in norms.values()):
        sys.exit(f"error: gradient norms differ, {norms}: not the same work")
    times = {name: arm["median"]["fwd_bwd_s"] for name, arm in summary.items()}
    lengths = [length for row in work.lengths for length in row]
    tokens = sum(lengths)
    peer = trl_name(*setting)
    figure = times[peer] / times[OURS]
    result = {
        "shows": "Training tokens a second on responses of very different lengths: no padding and the prompt once, "
        "against TRL's own loss on the padded batch.",
        "peer": f"{peer}, TRL {version('trl')}",
        "bars": [harness.bar("times TRL's response tokens a second", figure, at_least=BAR)],
        "table": [
            {"arm": name, "s": seconds, "response tokens/s": tokens / seconds, "gradient norm": norms[name]}
            for name, seconds in times.items()
        ],
        "plots": [
            {
                "title": "response tokens a second",
                "y": "tokens/s",
                "bars": {name: tokens / seconds for name, seconds in times.items()},
            }
        ],
        "arms": summary,
        "tried_alone_s": tried,
        "tokens": {"response": tokens, "longest": max(lengths), "padded": responses * (work.prompt + max(lengths)),
                   "ours": args.prompts * work.prompt + tokens},
        "lengths": work.lengths,
        "work": asdict(work) | {"model": args.model},
        "code": harness.code("grpo_rl/data", "grpo_rl/losses", "grpo_rl/policies", "grpo_rl/training"),
        "machine": harness.machine(),
        **load,
    }  # fmt: skip
    harness.finish(NAME, figure, result, args.out)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    number = harness.at_least_one
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a local folder or a hub name")
    parser.add_argument("--prompts", type=number, default=2, help="prompts of the step")
    parser.add_argument("--repeats", type=number, default=8, help="responses to each")
    parser.add_argument("--prompt", type=number, default=64, help="tokens of each prompt")
    parser.add_argument("--median", type=number, default=50, help="tokens of the median response")
    parser.add_argument("--p99-over-median", type=float, default=8.0, help="the 99th percentile over the median")
    parser.add_argument("--longest", type=number, default=512, help="longer responses are cut to so many tokens")
    parser.add_argument("--micro-batch-tokens", type=number, default=8192, help="ours, as in training")
    parser.add_argument("--trl-batch", type=number, nargs="+", default=[4, 8, 16], help="responses a forward, to try")
    args = parser.parse_args()
    if args.p99_over_median <= 1:
        parser.error("--p99-over-median must be above 1")
    return args


if __name__ == "__main__":
    main()
