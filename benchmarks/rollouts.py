"""CPU time of a turn, the trainer's left out: `taskset -c 0 python benchmarks/rollouts.py`.

Trajectories are sampled by the scripted engine in groups of four, all in flight at once: single responses, and
conversations of three turns. Printed is the median of five collections, in ms a turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from transformers import AutoTokenizer

from grpo_rl.collectors.engine_policy import EnginePolicy
from grpo_rl.collectors.sync import SyncCollector
from grpo_rl.engines.base import Sampling
from grpo_rl.envs.base import LLMEnv, Reward, Task
from grpo_rl.testing import ScriptedEngine, save_tiny_model

GROUP, STEPS = 4, 5


class Single(Task):
    """One response to each question."""

    reward_parts = ("length", "format")
    turns = 1

    def __init__(self, count: int) -> None:
        self.rows = [{"i": i} for i in range(count)]

    def prompt(self, row):
        return [{"role": "user", "content": f"question {row['i']}"}]

    def score(self, row, response):
        return Reward({"length": float(len(response)), "format": 1.0})


class Turns(Single):
    """Three turns, with a reply after the first two."""

    turns = 3

    def reply(self, row, messages):
        said = sum(message["role"] == "assistant" for message in messages)
        return None if said == self.turns else [{"role": "user", "content": "go on"}]

    def score_dialog(self, row, messages):
        return self.score(row, messages[-1]["content"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--trajectories", type=int, default=2000)
    groups = parser.parse_args().trajectories // GROUP
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_model(tempfile.mkdtemp()))
    ids = [*tokenizer("abcdefgh")["input_ids"], tokenizer.eos_token_id]
    for task in (Single(groups), Turns(groups)):
        env = LLMEnv(task, tokenizer, groups, GROUP)
        policy = EnginePolicy(ScriptedEngine(lambda *_: ids, max_model_len=4000), Sampling(max_new_tokens=16))
        collector, found = SyncCollector(env, policy, 10**9), []
        for _ in range(1 + STEPS):
            begun_s = time.process_time()
            collected = collector.collect()
            found.append((time.process_time() - begun_s) / (groups * GROUP * task.turns) * 1e3)
            assert len(collected) == groups
        print(f"{task.turns} turns: {statistics.median(found[1:]):.3f} ms of CPU time a turn")


if __name__ == "__main__":
    main()
