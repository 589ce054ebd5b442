"""Shows whether a conversation with a slow tool holds up others, and ids are kept: `python benchmarks/dialogs.py`.

The default model solves word problems with a calculator, a number of conversations at once, in vLLM. First all tools
answer at once: that gives the time of a conversation. Then the tool of one is so slow that its conversation takes 20
times as long; that one is played alone, and with all others. The figure is the ratio of these two times, and `others_s`
when the others had ended: with a barrier after each turn, they would wait for it at each. Sampling is greedy.

Of every turn, the ids that vLLM was given are compared with the conversation as it is trained on, token for token.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field

import harness
import torch

from grpo_rl.collectors.engine_policy import EnginePolicy, Rollout, play_all, reset_rows
from grpo_rl.collectors.groups import trajectory_of, verdict_of
from grpo_rl.data import keys
from grpo_rl.engines.base import Engine, Samples, Sampling
from grpo_rl.envs.base import Messages, Reward
from grpo_rl.envs.calculator import Calculator, CalculatorEnv
from grpo_rl.policies.hub import DEFAULT_MODEL, resolve_model
from grpo_rl.settings.devices import default_dtype

NAME = "dialogs"
BAR, OTHERS_BAR = 1.2, 1.5


class SlowForOne(Calculator):
    """A calculator that takes its time with the first row's conversation."""

    delay_s = 0.0

    def reply(self, row: dict, messages: Messages) -> Messages | None:
        if row is self.rows[0]:
            time.sleep(self.delay_s)
        return super().reply(row, messages)


@dataclass(eq=False)
class Watched:
    """An engine that records what goes in and out of it.

    Args:
        given: ids of the prompt of each request, as vLLM's scheduler got them.
        sampled: ids of the response to each prompt, and when it had ended, in seconds after the start.
    """

    engine: Engine
    given: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sampled: dict[tuple[int, ...], tuple[list[int], float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started = time.perf_counter()
        self.max_model_len = self.engine.max_model_len
        vllm = self.engine._llm.llm_engine
        self._add, self._vllm = vllm.add_request, vllm
        vllm.add_request = self._note

    def _note(self, request: str, prompt: dict, *rest: object, **named: object) -> None:
        self.given[request] = tuple(prompt["prompt_token_ids"])
        self._add(request, prompt, *rest, **named)

    def submit(self, request: int, prompt: list[int], sampling: Sampling) -> None:
        self.engine.submit(request, prompt, sampling)

    def step(self) -> list[tuple[int, Samples]]:
        finished = self.engine.step()
        for request, samples in finished:
            ended_s = time.perf_counter() - self._started
            self.sampled[self.given[str(request)]] = samples.response_ids.tolist(), ended_s
        return finished

    def abort(self) -> None:
        self.engine.abort()

    def close(self) -> None:
        self._vllm.add_request = self._add


def check_ids(rollouts: list[Rollout], watched: Watched) -> tuple[int, list[float]]:
    """The number of turns whose ids were compared, and when each conversation had its last response.

    Raises:
        SystemExit: an id differs.
    """
    turns, ended_s = 0, []
    for i, rollout in enumerate(rollouts):
        whole = torch.cat([rollout[0][keys.TOKENS_PROMPT], *trajectory_of(rollout).ids]).tolist()
        for turn in rollout:
            prompt = tuple(turn[keys.TOKENS_PROMPT].tolist())
            response, end_s = watched.sampled.get(prompt, ([], 0.0))
            if not response or whole[: len(prompt) + len(response)] != [*prompt, *response]:
                sys.exit(f"error: conversation {i} is trained on other ids than vLLM saw")
            turns += 1
        ended_s.append(end_s)
    return turns, ended_s


def main() -> None:
    args = parse()
    load = harness.require_quiet(args.force)
    from transformers import AutoTokenizer

    from grpo_rl.engines.vllm.engine import VLLMEngine

    folder = resolve_model(args.model)
    engine = VLLMEngine(folder, max_model_len=1024, dtype=default_dtype())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    env = CalculatorEnv(args.conversations, 2, tokenizer, path="quickstart-train", max_turns=4)
    env.task = SlowForOne(env.task.rows)
    sampling = Sampling(max_new_tokens=args.response, temperature=0.0)
    compared = 0

    def played(count: int, delay_s: float) -> dict[str, float]:
        """Plays so many conversations; the tool of the first one takes ``delay_s`` seconds a turn."""
        nonlocal compared
        env.task.delay_s = delay_s
        watched = Watched(engine)
        policy = EnginePolicy(watched, sampling)
        asked = reset_rows(env, policy, rows=env.task.rows[:count], repeats=1)
        start = time.perf_counter()
        rollouts, _ = play_all(env, policy, asked)
        all_s = time.perf_counter() - start
        watched.close()
        verdicts = [verdict_of(rollout[-1]["next"]) for rollout in rollouts]
        if failures := [verdict for verdict in verdicts if not isinstance(verdict, Reward)]:
            sys.exit(f"error: a conversation was dropped: {failures[0].message}")
        turns, ended_s = check_ids(rollouts, watched)
        compared += turns
        means = {"other_s": sum(ended_s[1:]) / len(ended_s[1:]), "others_s": max(ended_s[1:])} if count > 1 else {}
        return {"step_s": all_s, **means, "first_turns": len(rollouts[0])}

    try:
        played(args.conversations, 0.0)
        fast = played(args.conversations, 0.0)
        delay_s = (args.slower - 1) * fast["other_s"] / fast["first_turns"]
        arms = {
            "fast": lambda: played(args.conversations, 0.0),
            "slow alone": lambda: played(1, delay_s),
            "slow": lambda: played(args.conversations, delay_s),
        }
        summary = {name: harness.summarize(reports) for name, reports in harness.rounds(arms, args.steps).items()}
    finally:
        engine.close()

    median = {name: arm["median"] for name, arm in summary.items()}
    figure = median["slow"]["step_s"] / median["slow alone"]["step_s"]
    longer = median["slow alone"]["step_s"] / median["slow"]["other_s"]
    result = {
        "shows": f"{args.conversations} conversations of up to 4 turns, one with a tool so slow that it takes "
        f"{longer:.0f} times as long as the others do: the time of all over that of the slow one alone. The ids of "
        f"{compared} turns are those that vLLM was given, token for token.",
        "bars": [
            harness.bar("time of all conversations over the slow one's alone", figure, at_most=BAR),
            harness.bar(
                "time until the others have ended, over that without a slow one",
                median["slow"]["others_s"] / median["fast"]["others_s"],
                at_most=OTHERS_BAR,
            ),
        ],
        "arms": summary,
        "plots": [],
        "code": harness.code("envs", "grpo_rl/collectors", "grpo_rl/engines"),
        "machine": harness.machine(),
        **load,
    }
    harness.finish(NAME, figure, result, args.out)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a local folder or a hub name")
    parser.add_argument("--conversations", type=harness.at_least_one, default=16)
    parser.add_argument("--response", type=harness.at_least_one, default=32, help="tokens of a turn, at most")
    parser.add_argument("--slower", type=float, default=20.0, help="times that the slow conversation takes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
