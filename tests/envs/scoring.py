"""Responses of a given policy: collected in groups, or judged as by an environment's step; calls read from them."""

import json
from collections.abc import Callable, Sequence

import torch

from grpo_rl.collectors.engine_policy import EnginePolicy
from grpo_rl.collectors.sync import SyncCollector
from grpo_rl.data import keys
from grpo_rl.engines.base import Sampling
from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.prompts import Prompt
from grpo_rl.testing import ScriptedEngine


def policy_of(tokenizer, says: Callable[[str, int], str], in_rounds: bool = False) -> EnginePolicy:
    """A policy that gives response g to a prompt the text ``says(prompt, g)``, and ends its turn."""

    def respond(prompt: Sequence[int], g: int) -> list[int]:
        return [*tokenizer(says(tokenizer.decode(prompt), g))["input_ids"], tokenizer.eos_token_id]

    engine = ScriptedEngine(respond)
    engine.in_rounds = in_rounds
    return EnginePolicy(engine, Sampling(max_new_tokens=500))


def playing(env: LLMEnv, tokenizer, says: Callable[[str, int], str], in_rounds: bool = False) -> SyncCollector:
    """A collector of the groups of :func:`policy_of`."""
    return SyncCollector(env, policy_of(tokenizer, says, in_rounds), 10_000)


def scored(env: LLMEnv, row: int, responses: Sequence) -> list:
    """The reward of each response, given as text or ids, or why it has none."""
    prompt = Prompt(0, row, "", torch.tensor(env.encode(env.task.rows[row])))
    rows = env.reset(prompts=[prompt], repeats=len(responses))
    for each, ids in zip(rows.unbind(0), responses, strict=True):
        each[keys.TOKENS_RESPONSE] = torch.as_tensor(env.tokenizer(ids)["input_ids"] if isinstance(ids, str) else ids)
    return [each[keys.HISTORY].verdict for each in env._step(rows).unbind(0)]


class PlainParser:
    """Reads one call ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: to import vLLM's takes 9 s."""

    def __init__(self, tokenizer, schemas): ...

    def parse(self, text):
        before, mark, call = text.partition("<tool_call>")
        if not mark:
            return text, []
        function = json.loads(call.partition("</tool_call>")[0])
        return before, [{"id": "x", "function": function | {"arguments": json.dumps(function["arguments"])}}]
