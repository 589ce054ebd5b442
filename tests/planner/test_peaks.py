"""The plan's training peak against what real steps of a small model take on this machine's CPU."""

from __future__ import annotations

import json
import subprocess
import sys
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

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SMALL = SIZES | {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768}
"""Half as wide: activations are the largest part. A process's growth needs ``SIZES``: libraries' own would be too much
of it."""
MIXTURE = SMALL | {
    "vocab_size": 2048,
    "moe_intermediate_size": 192,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "head_dim": 32,
}
Lengths = tuple[int, list[int]]
LONG: Lengths = (256, [224] * 8)
SHORT: Lengths = (128, [112] * 8)
"""A group's tokens: of its prompt, and of its responses."""

CHILD = """
import json, sys, tempfile, torch
from transformers import LlamaConfig, LlamaForCausalLM
from grpo_rl.training.optimizer import PolicyOptimizer
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.settings.hardware import lacks_bfloat16
from grpo_rl.testing import random_group

sizes, prompt, lengths = json.loads(sys.argv[1])

def resident():  # bytes of this process now, and the most since the last reset
    lines = open("/proc/self/status").read().splitlines()
    return [1024 * int(line.split()[1]) for name in ("VmRSS", "VmHWM") for line in lines if line.startswith(name)]

with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().save_pretrained(folder)
    groups = [random_group(prompt, lengths, vocab=sizes["vocab_size"], group_id=i) for i in range(2)]
    warm = {**sizes, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    small = TrainPolicy(LlamaForCausalLM(LlamaConfig(**warm)).bfloat16())
    small.score(groups[:1])[0].sum().backward()  # what libraries take by themselves
    del small
    before, _ = resident()
    policy = TrainPolicy.load(folder, torch.bfloat16)
optimizer = PolicyOptimizer(policy.model)

def step():
    for group in groups:
        policy.score([group])[0].sum().backward()
    optimizer.step()

step()
open("/proc/self/clear_refs", "w").write("5")
step()
print(json.dumps(resident()[1] - before))
"""


def model_of(sizes: dict) -> PreTrainedModel:
    if "num_experts" in sizes:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def growth_of_a_process(sizes: dict, lengths: Lengths) -> float:
    """Bytes at most in the second step, beyond those before the model was loaded, by the kernel."""
    argument = json.dumps([sizes, *lengths])
    done = subprocess.run([sys.executable, "-c", CHILD, argument], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def peak_of_tensors(sizes: dict, lengths: Lengths, checkpointing: bool, folder: Path) -> float:
    """Bytes of tensors at most in the second step, by PyTorch's tracker."""
    model_of(sizes).bfloat16().save_pretrained(folder)
    groups = [random_group(*lengths, vocab=sizes["vocab_size"], group_id=i) for i in range(2)]
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


def planned(sizes: dict, lengths: Lengths, checkpointing: bool) -> float:
    prompt, responses = lengths
    with torch.device("meta"):
        shape = Shape.of(model_of(sizes).bfloat16())
    return training_footprint(shape, Training(checkpointing=checkpointing), 1, prompt + sum(responses), "cpu").total


@pytest.mark.parametrize(("checkpointing", "tied"), [(False, False), (True, True)])
def test_the_tensors_of_a_real_step_take_what_is_planned(checkpointing, tied, tmp_path):
    sizes = SMALL | {"tie_word_embeddings": tied}
    peak = peak_of_tensors(sizes, LONG, checkpointing, tmp_path)
    assert planned(sizes, LONG, checkpointing) == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_tensors_of_a_real_step_of_a_mixture_take_what_is_planned(checkpointing, tmp_path):
    peak = peak_of_tensors(MIXTURE, LONG, checkpointing, tmp_path)
    assert planned(MIXTURE, LONG, checkpointing) == pytest.approx(peak, rel=0.1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_grows_by_what_is_planned():
    # Beside tensors: freed memory that is kept, and the libraries' own.
    assert planned(SIZES, SHORT, False) == pytest.approx(growth_of_a_process(SIZES, SHORT), rel=0.2)
