"""Measures what computing a prompt once gains in training, of what it could gain: `python benchmarks/prefix.py`.

Forward and backward of `TrainPolicy.score` over one group of G responses with R tokens each to a prompt of P tokens,
against the same code on the same tokens in G groups of one response, each with the prompt, with sharing between groups
off. Both are cut into micro-batches by the same budget of tokens, training's default. Sharing computes P + GR tokens
instead of G(P + R); the figure is the smallest speed-up over that ratio. It is below 1 where work does not depend on
the trunk's tokens: the head sees GR tokens either way.

The prompt's share: what a step takes more with the prompt than with a prompt of one token. It must not depend on G, for
a prompt is computed once. But a response's tokens attend to the prompt, and that attention does grow with G, with
whatever implementation. So the share is taken with responses of a few tokens, whose attention to the prompt is about a
hundredth of the prompt's own work, and compared between G = 16 and G = 1. The same difference with responses of full
length, that attention included, is recorded next to it, without a bar.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar
from unittest import mock

import harness
import torch

from grpo_rl.data import batching
from grpo_rl.data.batching import micro_batches
from grpo_rl.data.group import Group
from grpo_rl.policies import packing
from grpo_rl.policies.hub import DEFAULT_MODEL, resolve_model
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group

T = TypeVar("T")
NAME = "prefix"
SPEEDUP_BAR, SHARE_BAR = 0.8, 1.1
SHORT = 4
"""Tokens of a response, where the responses' attention to the prompt should not count."""
NEVER = 1 << 60
"""A cost of sharing, and a length of shared beginnings, that nothing reaches."""
MANY = 16
"""Responses, where the prompt's share is compared with that of one."""


@dataclass(frozen=True)
class Shape:
    """P prompt tokens, R tokens of each response, G responses."""

    prompt: int
    response: int
    responses: int

    def __str__(self) -> str:
        return f"{self.prompt}/{self.response}/{self.responses}"

    @property
    def token_ratio(self) -> float:
        """Tokens computed with the prompt repeated, over those with it shared: what sharing could gain at most.

        >>> Shape(128, 128, 8).token_ratio
        1.7777777777777777
        """
        repeated = self.responses * (self.prompt + self.response)
        return repeated / (self.prompt + self.responses * self.response)

    def filling(self, max_tokens: int) -> int:
        """The number of groups that fill a micro-batch of so many tokens, at least one.

        >>> Shape(512, 128, 8).filling(16_384), Shape(512, 128, 8).filling(100)
        (10, 1)
        """
        return max(1, max_tokens // (self.prompt + self.responses * self.response))

    def shared(self, vocab: int, groups: int = 1) -> list[Group]:
        """Makes so many groups, each with a prompt of its own."""
        lengths = [self.response] * self.responses
        return [random_group(self.prompt, lengths, vocab, group_id=i, seed=i) for i in range(groups)]

    def repeated(self, vocab: int, groups: int = 1) -> list[Group]:
        """The same tokens in groups of one response.

        >>> [group.num_tokens for group in Shape(3, 2, 2).repeated(vocab=8)]
        [5, 5]
        """
        return [
            Group(
                group_id=whole.group_id * self.responses + g,
                row=0,
                prompt_ids=whole.prompt_ids,
                response_ids=ids,
                log_probs=torch.zeros(len(ids)),
                versions=torch.zeros_like(ids),
                trainable=torch.ones_like(ids, dtype=torch.bool),
                offsets=torch.tensor([0, len(ids)]),
                rewards=torch.zeros(1),
            )
            for whole in self.shared(vocab, groups)
            for g, ids in enumerate(whole.responses)
        ]


SHAPES = (Shape(128, 128, 8), Shape(512, 128, 8), Shape(1024, 128, 16))


def step(policy: TrainPolicy, groups: Sequence[Group], max_tokens: int) -> dict[str, float]:
    """One forward and backward of the groups, micro-batch by micro-batch."""
    policy.model.zero_grad()
    harness.synchronize(str(policy.device))
    start = time.perf_counter()
    for micro in micro_batches(groups, max_tokens):
        log_probs, _ = policy.score(micro)
        log_probs.mean().backward()
    harness.synchronize(str(policy.device))
    return {"step_s": time.perf_counter() - start}


def prompts_alone(run: Callable[[], T]) -> T:
    """The result of a call in which nothing is shared but prompts, each by the responses to it."""
    with mock.patch.object(packing, "NODE_COST", NEVER), mock.patch.object(batching, "LEAST_SHARED", NEVER):
        return run()


def speedups(
    run: Callable[[Sequence[Group]], dict[str, float]],
    shapes: Sequence[Shape],
    vocab: int,
    steps: int,
    fill: int | None = None,
):
    """A row for each shape: both times, the speed-up, and its share of the token ratio.

    Args:
        fill: tokens of the micro-batch that groups with shared prompts fill; None: one group.
    """
    rows = []
    for shape in shapes:
        groups = shape.filling(fill) if fill else 1
        shared, repeated = (functools.partial(run, made(vocab, groups)) for made in (shape.shared, shape.repeated))
        arms = {f"shared {shape}": shared, f"repeated {shape}": functools.partial(prompts_alone, repeated)}
        results = harness.rounds(arms, steps)
        shared_s, repeated_s = (median(report["step_s"] for report in reports) for reports in results.values())
        rows.append(
            {
                "P/R/G": str(shape),
                "prompt shared s": shared_s,
                "prompt repeated s": repeated_s,
                "speed-up": repeated_s / shared_s,
                "token ratio": shape.token_ratio,
                "of the token ratio": repeated_s / shared_s / shape.token_ratio,
            }
        )
    return rows


def prompt_share(
    run: Callable[[Sequence[Group]], dict[str, float]], prompt: int, response: int, vocab: int, steps: int
) -> dict:
    """Seconds of the prompt in a step of one response and of :data:`MANY`, and their ratio; medians over the rounds."""
    shapes = [Shape(p, response, g) for g in (1, MANY) for p in (1, prompt)]
    results = harness.rounds({str(s): functools.partial(run, s.shared(vocab)) for s in shapes}, steps)
    times = {shape: [report["step_s"] for report in results[str(shape)]] for shape in shapes}
    # A round's steps stand next to each other in time, so differences are taken within it.
    one, many = (
        median(
            with_prompt - without
            for with_prompt, without in zip(
                times[Shape(prompt, response, g)], times[Shape(1, response, g)], strict=True
            )
        )
        for g in (1, MANY)
    )
    return {"P": prompt, "R": response, "at G=1 s": one, f"at G={MANY} s": many, "ratio": many / one}


def main() -> None:
    args = parse()
    load = harness.require_quiet(args.force)
    try:
        policy = TrainPolicy.load(resolve_model(args.model), harness.dtype(), args.device)
    except ValueError as error:
        sys.exit(f"error: {error}")
    vocab = policy.model.config.vocab_size
    run = functools.partial(step, policy, max_tokens=args.micro_batch_tokens)
    shapes = [Shape(*numbers) for numbers in args.shape] if args.shape else SHAPES
    rows = speedups(run, shapes, vocab, args.steps, args.micro_batch_tokens if args.fill else None)
    share = prompt_share(run, args.share_prompt, SHORT, vocab, args.steps)
    with_attention = prompt_share(run, args.share_prompt, args.share_response, vocab, args.steps)
    figure = min(row["of the token ratio"] for row in rows)
    result = {
        "shows": "Training forward and backward with a group's prompt computed once, against the same code with the "
        "prompt repeated for each response; the figure is the speed-up over the ratio of tokens.",
        "peer": "the same code, prompt repeated",
        "bars": [
            *(
                harness.bar(f"speed-up over token ratio, P/R/G {row['P/R/G']}", row["of the token ratio"],
                            at_least=SPEEDUP_BAR)
                for row in rows
            ),
            harness.bar(f"the prompt's share at G={MANY} over that at G=1", share["ratio"], at_most=SHARE_BAR),
        ],
        "table": rows,
        "plots": [
            {
                "title": "what sharing the prompt gains",
                "x": "token ratio",
                "y": "speed-up",
                "series": {
                    "measured": [[row["token ratio"], row["speed-up"]] for row in rows],
                    "the token ratio": [[row["token ratio"]] * 2 for row in rows],
                },
            }
        ],
        "prompt_share": share,
        "prompt_share_with_the_responses_attention": with_attention,
        "micro_batch_tokens": args.micro_batch_tokens,
        "filled": args.fill,
        "model": args.model,
        "device": args.device,
        "steps": args.steps,
        "code": harness.code("grpo_rl/data", "grpo_rl/policies"),
        "machine": harness.machine(),
        **load,
    }  # fmt: skip
    harness.finish(NAME, figure, result, args.out)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a local folder or a hub name")
    parser.add_argument(
        "--shape", type=harness.at_least_one, nargs=3, action="append", metavar=("P", "R", "G"),
        help="prompt tokens, response tokens, responses; may be repeated (default: three shapes)",
    )  # fmt: skip
    parser.add_argument("--share-prompt", type=harness.at_least_one, default=512, help="P of the prompt's share")
    parser.add_argument("--share-response", type=harness.at_least_one, default=128, help="R of its full responses")
    parser.add_argument(
        "--micro-batch-tokens", type=harness.at_least_one, default=8192, help="of both arms, as in training"
    )
    parser.add_argument("--fill", action="store_true", help="as many groups as fill a micro-batch, instead of one")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
