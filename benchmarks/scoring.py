"""Measures how long scoring 4,096 responses takes: `python benchmarks/scoring.py --data FOLDER`.

Responses are scored as in training: through `LLMEnv.guard`, under a deadline, eight to a row. Some are right, some
wrong, some have no form at all; responses to one row differ, in mathematics by the expressions that are compared too,
and the tool tasks' conversations have a call and its result. The headline is the slowest task's time over what it may
take: 2 seconds, and 20 for mathematics, whose responses are parsed and compared as mathematics. FOLDER has the folders
gsm8k, ifeval, math500, hotpotqa and scitldr; countdown makes its own puzzles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import harness

from grpo_rl.envs.base import Messages, Reward, ScoreGuard, Task

NAME = "scoring"
RESPONSES, REPEATS = 4096, 8
LIMITS_S = {"math": 20.0}
LIMIT_S = 2.0
PROSE = "Let us think about it step by step. First we look at what is given, then at what is asked. " * 6


def variants(right: str, wrong: str) -> list[str]:
    """Eight different responses to one row.

    >>> len(set(variants("1", "2")))
    8
    """
    ends = (right, wrong, right, wrong, "", right, wrong, right)
    return [f"{PROSE[: 60 * i]}{text}" for i, text in enumerate(ends, 1)]


Responses = Callable[[dict], list[Messages]]
"""The messages behind a row's prompt, in each of eight conversations."""


def replies(texts: Sequence[str]) -> list[Messages]:
    """Conversations of one response each."""
    return [[{"role": "assistant", "content": text}] for text in texts]


def said_after(task: Task, row: dict, call: str, texts: Sequence[str]) -> list[Messages]:
    """Conversations that call a tool, get its result and answer."""
    asked = [{"role": "assistant", "content": call}]
    reply = task.reply(row, [*task.prompt(row), *asked])
    assert reply, call
    return [[*asked, *reply, *response] for response in replies(texts)]


def expressions() -> Iterator[str]:
    """Mathematical expressions without end, no two the same."""
    for n in itertools.count(2):
        yield from (
            rf"\frac{{{n}}}{{{n + 1}}}", f"{n}x^2 + {n + 3}x - 1", rf"{n}\sqrt{{2}} + 1", f"({n}, {2 * n})",
            rf"[{n}, \infty)", f"{n}.5", rf"{n}\pi", str(n),
        )  # fmt: skip


def gsm8k(data: Path) -> tuple[Task, Responses]:
    from grpo_rl.envs.gsm8k import GSM8K, load_rows

    task = GSM8K(load_rows(str(data / "gsm8k" / "train.jsonl")))
    return task, lambda row: replies(variants(f"<answer>{task.gold(row)}</answer>", "<answer>7</answer>"))


def ifeval(data: Path) -> tuple[Task, Responses]:
    from grpo_rl.envs.ifeval import IFEval, load_rows

    with (data / "ifeval" / "recorded_verdicts.jsonl").open(encoding="utf-8") as lines:
        responses = itertools.cycle([json.loads(line)["response"] for line in itertools.islice(lines, 2000)])
    task = IFEval(load_rows(data / "ifeval" / "input_data.jsonl"))
    return task, lambda row: replies(list(itertools.islice(responses, REPEATS)))


def math(data: Path) -> tuple[Task, Responses]:
    from grpo_rl.envs.math import Math, load_rows

    task = Math(load_rows(data / "math500" / "math500.json"))
    wrong = expressions()

    def responses(row: dict) -> list[Messages]:
        gold = task.gold(row)
        boxes = [rf"\boxed{{{text}}}" for text in (gold, rf"{gold}\,", f"{{{gold}}}", *itertools.islice(wrong, 4))]
        return replies([f"{PROSE[: 60 * i]}{text}" for i, text in enumerate([*boxes, ""], 1)])

    return task, responses


def countdown(data: Path) -> tuple[Task, Responses]:
    from grpo_rl.envs.countdown import Countdown, load_rows

    rows = load_rows(None, "train")
    wrong = "<answer>1 + 2 * (3 - 4)</answer>"
    return Countdown(rows), lambda row: replies(variants(f"<answer>{row['solution']}</answer>", wrong))


def calculator(data: Path) -> tuple[Task, Responses]:
    from grpo_rl.envs.calculator import Calculator, load_rows

    task = Calculator(load_rows("arithmetic"))

    def responses(row: dict) -> list[Messages]:
        right = f"<answer>{task.gold(row)}</answer>"
        return said_after(task, row, f"Calculator: {task.gold(row)} * 3 / 3", variants(right, "<answer>7</answer>"))

    return task, responses


def search_qa(data: Path) -> tuple[Task, Responses]:
    from grpo_rl.envs.search_qa import SearchQA, load_rows
    from grpo_rl.envs.tools.search_index import SearchIndex, load_corpus

    folder = data / "hotpotqa"
    index = SearchIndex(load_corpus(folder / "hotpotqa_train_corpus.json"))
    task = SearchQA(load_rows(folder / "hotpotqa_train.json"), index)

    def responses(row: dict) -> list[Messages]:
        texts = variants(f"<answer>{row['answer']}</answer>", "<answer>in the year of 1975</answer>")
        return said_after(task, row, f"Search: {row['question']}".replace("\n", " "), texts)

    return task, responses


def prompt_response(data: Path) -> tuple[Task, Responses]:
    from grpo_rl.envs.prompt_response import PromptResponse, load_rows

    rewards = [f"grpo_rl.envs.rewards.examples:{name}" for name in ("reward_len", "sentence_ending")]
    rows = load_rows(str(data / "scitldr" / "scitldr_A_dev.jsonl"))
    task = PromptResponse([{"prompt": " ".join(row["source"])} for row in rows], reward=rewards)
    return task, lambda row: replies(variants("Half the bits suffice.", "no full stop"))


TASKS = {f.__name__: f for f in (gsm8k, ifeval, math, countdown, calculator, search_qa, prompt_response)}


def conversations(task: Task, responses: Responses, count: int) -> Iterator[tuple[dict, list[Messages]]]:
    """A row and eight conversations about it, as many as make so many responses."""
    for i in range(count // REPEATS):
        row = task.rows[i % len(task.rows)]
        prompt = task.prompt(row)
        yield row, [[*prompt, *messages] for messages in responses(row)]


def scored_s(task: Task, work: Sequence[tuple[dict, list[Messages]]]) -> float:
    """Seconds that scoring took; every response must have got a reward."""
    guard = ScoreGuard(task, max_failed_fraction=0.0)
    start = time.perf_counter()
    results = [guard.score_dialogs(row, dialogs, "a row") for row, dialogs in work]
    seconds = time.perf_counter() - start
    assert sum(isinstance(result, Reward) for group in results for result in group) == REPEATS * len(work)
    return seconds


def main() -> None:
    args = parse()
    load = harness.require_quiet(args.force)
    medians, bars = {}, []
    for name in args.tasks:
        task, responses = TASKS[name](args.data)
        work = list(conversations(task, responses, args.responses))
        scored_s(task, work[:8])  # warm-up: worker processes start
        medians[name] = statistics.median(scored_s(task, work) for _ in range(args.steps))
        limit = LIMITS_S.get(name, LIMIT_S)
        print(f"{name}: {args.responses} responses in {medians[name]:.2f} s")
        bars.append(harness.bar(f"seconds for {args.responses} responses of {name}", medians[name], at_most=limit))
    worst = max(medians[name] / LIMITS_S.get(name, LIMIT_S) for name in medians)
    result = {
        "shows": f"Scoring {args.responses} responses of each task; the figure is the slowest task's time over its "
        "limit.",
        "bars": bars,
        "seconds": medians,
        "code": harness.code("envs"),
        "machine": harness.machine(),
        **load,
    }
    harness.finish(NAME, worst, result, args.out)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    data = os.environ.get("GRPO_RL_DATA")
    parser.add_argument("--data", type=Path, default=Path(data) if data else None, help="default: $GRPO_RL_DATA")
    count = harness.at_least_one
    parser.add_argument("--responses", type=count, default=RESPONSES, help="of each task, a multiple of 8")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data FOLDER, or set GRPO_RL_DATA")
    if not args.data.is_dir():
        sys.exit(f"error: {args.data} is no folder")
    return args


if __name__ == "__main__":
    main()
