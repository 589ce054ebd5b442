"""Measures what computing all common beginnings once gains in training: `python benchmarks/trees.py`.

The default model plays conversations of the calculator and the search task in vLLM, one group a prompt, temperature 1.
Prompts of a task begin with the same system message and examples, and responses of a group with the same words, calls
and results. Forward and backward of `TrainPolicy.score` over these groups, in micro-batches of training's default
budget: with every common beginning computed once, against each group's prompt alone. The figure is the smallest
speed-up over the ratio of computed tokens. It is below 1 where work does not depend on the trunk's tokens.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import harness
from prefix import prompts_alone, step

from grpo_rl.collectors.engine_policy import EnginePolicy
from grpo_rl.collectors.sync import SyncCollector
from grpo_rl.data import batching
from grpo_rl.data.group import Group
from grpo_rl.engines.base import Sampling
from grpo_rl.engines.vllm.engine import VLLMEngine
from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.calculator import CalculatorEnv
from grpo_rl.envs.search_qa import SearchQAEnv
from grpo_rl.policies import packing
from grpo_rl.policies.hub import DEFAULT_MODEL, resolve_model
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.settings.devices import default_dtype

NAME = "trees"
BAR = 0.8


def played(env: LLMEnv, engine: VLLMEngine, sampling: Sampling) -> list[Group]:
    """A group of conversations about each of the environment's next prompts."""
    return SyncCollector(env, EnginePolicy(engine, sampling), sys.maxsize).collect()


def environments(args: argparse.Namespace, tokenizer) -> Iterator[tuple[str, LLMEnv]]:
    """The calculator's environment and, where its data is at hand, that of search."""
    sizes = (args.prompts, args.group, tokenizer)
    yield "calculator", CalculatorEnv(*sizes, path="arithmetic", max_turns=4)
    if args.hotpotqa:
        yield "search", SearchQAEnv(*sizes, path=args.hotpotqa, max_turns=4)


def computed_tokens(groups: list[Group], max_tokens: int) -> int:
    return sum(len(packing.pack(micro).input_ids) for micro in batching.micro_batches(groups, max_tokens))


def main() -> None:
    args = parse()
    load = harness.require_quiet(args.force)
    from transformers import AutoTokenizer

    folder = resolve_model(args.model)
    engine = VLLMEngine(folder, max_model_len=2048, dtype=default_dtype())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sampling = Sampling(max_new_tokens=args.response)
    try:
        tasks = {name: played(env, engine, sampling) for name, env in environments(args, tokenizer)}
    finally:
        engine.close()
    policy = TrainPolicy.load(folder, harness.dtype(), args.device)
    budget, rows = args.micro_batch_tokens, []
    for name, groups in tasks.items():
        run = functools.partial(step, policy, groups, budget)

        alone = functools.partial(prompts_alone, run)
        results = harness.rounds({f"{name}, tree": run, f"{name}, prompts": alone}, args.steps)
        tree_s, prompts_s = (median(report["step_s"] for report in reports) for reports in results.values())
        tokens = functools.partial(computed_tokens, groups, budget)
        tree, prompts = tokens(), prompts_alone(tokens)
        rows.append(
            {
                "task": name,
                "tokens of the sequences": sum(len(g.prompt_ids) * g.size + len(g.response_ids) for g in groups),
                "prompts once": prompts,
                "tree": tree,
                "prompts once s": prompts_s,
                "tree s": tree_s,
                "speed-up": prompts_s / tree_s,
                "token ratio": prompts / tree,
                "of the token ratio": prompts_s / tree_s / (prompts / tree),
            }
        )
    figure = min(row["of the token ratio"] for row in rows)
    result = {
        "shows": "Training forward and backward over conversations with tools, every common beginning computed once, "
        "against prompts alone; the figure is the speed-up over the ratio of tokens.",
        "peer": "the same code, which shares prompts alone",
        "bars": [
            harness.bar(f"speed-up over token ratio, {row['task']}", row["of the token ratio"], at_least=BAR)
            for row in rows
        ],
        "table": rows,
        "conversations": [args.prompts, args.group],
        "micro_batch_tokens": budget,
        "model": args.model,
        "device": args.device,
        "steps": args.steps,
        "code": harness.code("grpo_rl/data", "grpo_rl/policies"),
        "machine": harness.machine(),
        **load,
    }
    harness.finish(NAME, figure, result, args.out)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a local folder or a hub name")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=harness.at_least_one, default=4, help="groups of each task")
    parser.add_argument("--group", type=harness.at_least_one, default=6, help="conversations of a group")
    parser.add_argument("--response", type=harness.at_least_one, default=24, help="tokens of a turn, at most")
    parser.add_argument("--micro-batch-tokens", type=harness.at_least_one, default=8192)
    data = os.environ.get("GRPO_RL_DATA")
    parser.add_argument(
        "--hotpotqa",
        type=Path,
        default=Path(data) / "hotpotqa" / "hotpotqa_train.json" if data else None,
        help="HotpotQA's JSON file (default: under $GRPO_RL_DATA); without it, the calculator alone",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
