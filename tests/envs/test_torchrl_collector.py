"""TorchRL's own collector drives our environments: groups, rewards and ids come out as LLMEnv promises."""

from __future__ import annotations

import pytest
import torch
from tensordict import lazy_stack
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import Collector

from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.episodes import Episodes


class Says(TensorDictModuleBase):
    """A policy that says texts in turn, with the end of a turn."""

    in_keys, out_keys = [("tokens", "prompt")], [("tokens", "response")]

    def __init__(self, tokenizer, texts):
        super().__init__()
        self.tokenizer, self.texts, self.said = tokenizer, texts, 0

    def forward(self, batch):
        rows = list(batch.unbind(0))
        for row in rows:
            ids = [*self.tokenizer(self.texts[self.said % len(self.texts)])["input_ids"], self.tokenizer.eos_token_id]
            row["tokens", "response"] = torch.tensor(ids)
            self.said += 1
        return lazy_stack(rows)


class Twice(Episodes[list]):
    """Two turns; each earns its length in characters."""

    def reset(self, row):
        return [], row["said"]

    def step(self, state, text):
        state.append(text)
        return "more", len(text), len(state) == 2


def collected(env, policy, steps, batches):
    size = env.batch_size[0] * steps
    collector = Collector(env, policy, frames_per_batch=size, total_frames=size * batches, use_buffers=False)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


@pytest.mark.slow
def test_conversations_come_in_complete_groups_with_rewards_and_prompts_that_go_on(tokenizer):
    env = LLMEnv(Twice([{"said": "a"}, {"said": "bc"}]), tokenizer, num_envs=2, repeats=2)
    groups = []
    for batch in collected(env, Says(tokenizer, ["x", "yy", "zzz"]), 2, 2):
        assert batch.batch_size == (4, 2)
        groups += [int(turn["group_id"]) for turn in batch[:, 1].unbind(0)]
        for first, second in (conversation.unbind(0) for conversation in batch.unbind(0)):
            before = torch.cat([first["tokens", "prompt"], first["tokens", "response"]])
            assert torch.equal(second["tokens", "prompt"][: len(before)], before)
            assert not first["next", "done"].item() and second["next", "done"].item()
            said = [env.decode(turn["tokens", "response"]) for turn in (first, second)]
            assert first["next", "reward"].item() == 0 and second["next", "reward"].item() == sum(map(len, said))
    assert groups == [0, 0, 1, 1, 2, 2, 3, 3]
