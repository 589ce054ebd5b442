"""The rewards of responses to a row, as an environment's step has them judged."""

from __future__ import annotations

import torch

from grpo_rl.data import keys
from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.prompts import Prompt


def scored(env: LLMEnv, row: int, responses) -> list:
    """The reward of each response, given as ids, or why it has none."""
    prompt = Prompt(0, row, "", torch.tensor(env.encode(env.task.rows[row])))
    rows = env.reset(prompts=[prompt], repeats=len(responses))
    for each, ids in zip(rows.unbind(0), responses, strict=True):
        each[keys.TOKENS_RESPONSE] = torch.as_tensor(ids)
    return [each[keys.HISTORY].verdict for each in env._step(rows).unbind(0)]
