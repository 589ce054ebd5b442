"""What the tests of the page write into a run's folder: responses, tokens and held-out responses."""

from __future__ import annotations

import pyarrow as pa

from grpo_rl.monitor.held_out_log import HeldOutLog
from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts
from grpo_rl.monitor.token_log import SCHEMA
from grpo_rl.training.evaluate import Evaluation


def response(group_id, reward, text="4", **more):
    return {
        "group_id": group_id,
        "row": group_id + 10,
        "prompt": f"Prompt {group_id}",
        "completion": text,
        "answer": "4",
        "reward": reward,
        "reward_correct": reward,
        "advantage": 0.0,
        "tokens": len(text),
        "truncated": False,
        "policy_version": 3,
    } | more


def write_tokens(run_dir, step, responses, group_id=7):
    """Tokens of a group, a list of texts for each response: one that begins with ! was read, of one with ? only ids."""
    rows = [
        {
            "step": step,
            "group_id": group_id,
            "response": number,
            "position": position,
            "token_id": 100 + position,
            "text": None if text.startswith("?") else text.removeprefix("!"),
            "special": text.startswith("<|"),
            "trainable": not text.startswith("!"),
            "policy_version": 3 + (position > 0),
            "sampler_log_prob": None if text.startswith("!") else -0.5 - position,
            "log_prob": -0.75 - position,
            "entropy": 1.5,
        }
        for number, texts in enumerate(responses)
        for position, text in enumerate(texts)
    ]
    StepParts(run_dir / TOKENS_FOLDER).write(step, pa.Table.from_pylist(rows, schema=SCHEMA))


def write_held_out(run_dir, step, rewards, gold, said, prompt="Prompt"):
    prompts, texts = ([f"{text} {i}" for i in range(len(rewards))] for text in (prompt, said))
    evaluation = Evaluation(rewards, {}, {}, prompts, texts, [2] * len(rewards), [False] * len(rewards))
    HeldOutLog(run_dir).write(step, evaluation, gold)
