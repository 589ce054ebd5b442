"""The plan's training peak against what real steps of a small model take on this machine's CPU."""

from pathlib import Path

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_rl.planner.memory import Shape, Training, training_footprint
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.testing import random_group
from grpo_rl.training.optimizer import PolicyOptimizer

pytestmark = pytest.mark.nightly

SMALL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
MIXTURE = SMALL | {
    "vocab_size": 2048, "moe_intermediate_size": 192, "num_experts": 16, "num_experts_per_tok": 4, "head_dim": 32,
}  # fmt: skip
PROMPT, RESPONSES = 256, [224] * 8
"""A group's tokens: of its prompt, and of its responses."""


def model_of(sizes: dict) -> PreTrainedModel:
    if "num_experts" in sizes:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def peak_of_tensors(sizes: dict, checkpointing: bool, folder: Path) -> float:
    """Bytes of tensors at most in the second step, by PyTorch's tracker."""
    model_of(sizes).bfloat16().save_pretrained(folder)
    groups = [random_group(PROMPT, RESPONSES, vocab=sizes["vocab_size"], group_id=i) for i in range(2)]
    policy = TrainPolicy.load(folder, torch.bfloat16, gradient_checkpointing=checkpointing)
    optimizer, tracker = PolicyOptimizer(policy.model), MemTracker()
    for group in groups:
        policy.score([group])[0].sum().backward()
    optimizer.step()
    tracker.track_external(policy.model, optimizer._optimizer, *optimizer._masters)
    with tracker:
        for group in groups:
            policy.score([group])[0].sum().backward()
            tracker.reset_mod_stats()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sizes", [SMALL, MIXTURE])
def test_the_tensors_of_a_real_step_take_what_is_planned(sizes, checkpointing, tmp_path):
    tied = checkpointing and sizes is SMALL
    sizes = sizes | {"tie_word_embeddings": tied}
    with torch.device("meta"):
        shape = Shape.of(model_of(sizes).bfloat16())
    planned = training_footprint(shape, Training(checkpointing=checkpointing), 1, PROMPT + sum(RESPONSES), "cpu")
    assert planned.total == pytest.approx(peak_of_tensors(sizes, checkpointing, tmp_path), rel=0.1)
