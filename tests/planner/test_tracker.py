"""The plan's training peak against PyTorch's own tracker: fake tensors on up to 512 fake ranks, nothing is computed.

What is tracked is the trainer's own sharding (`grpo_rl.distributed.ranks`), transformers' layers, and the
head's own tiles. Two things are put in their places: PyTorch's attention for ours, whose kernels are compiled for a GPU
or read lengths that fake tensors don't have, and plain functions for the Triton kernels of the head, which make tensors
of the same sizes.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from grpo_rl.distributed.ranks import Ranks
from grpo_rl.planner.memory import Shape, Training, training_footprint
from grpo_rl.policies.head import _RowTiledHead

pytestmark = pytest.mark.slow

LLAMA_70B = Path(__file__).parent / "data" / "llama-70b"


class Scorer(torch.nn.Module):
    """A model that scores tokens as `TrainPolicy` does: hidden states, then the head by tiles of rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.dtype = model, model.dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        weight = self.model.get_output_embeddings().weight
        log_prob, _ = cast(Any, _RowTiledHead.apply(hidden, weight, weight.detach(), ids, None, 1.0, None))
        return log_prob.sum()


@pytest.fixture
def kernels_without_triton(monkeypatch):
    """The head's two kernels as they are seen from memory: five numbers a token, and logits overwritten in place."""
    kernels: Any = ModuleType("grpo_rl.policies.head_triton")
    five = range(5)
    kernels.tile_statistics = lambda logits, *_: tuple(logits.new_empty(len(logits), dtype=torch.float32) for _ in five)
    kernels.tile_gradient_ = lambda logits, *_, **__: logits
    monkeypatch.setitem(sys.modules, "grpo_rl.policies.head_triton", kernels)


def tracked_peak(config: LlamaConfig, ranks: int, tokens: int, checkpointing: bool) -> dict[str, int]:
    """Bytes that the tracker counts on a rank in a step's two micro-batches, when they are most: by kind, and Total."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        placed = Ranks("fsdp", "cpu")
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
            model.train()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            scorer = Scorer(model)
            placed.place(cast(Any, scorer))
            optimizer = torch.optim.AdamW(scorer.parameters())
            for weight in scorer.parameters():
                weight.grad = torch.zeros_like(weight)
            # Outside: the tracker counts what DTensors try out in a step as if every rank held all of it.
            optimizer.step()
            optimizer.zero_grad()
            ids = torch.zeros(tokens, dtype=torch.long)
            tracker = FSDPMemTracker(cast(Any, scorer), optimizer)
            with tracker:
                for _ in range(2):
                    scorer(ids).backward()
                    tracker.reset_mod_stats()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        return {kind if isinstance(kind, str) else kind.value: size for kind, size in peak.items()}
    finally:
        dist.destroy_process_group()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("ranks", "layers", "tokens", "checkpointing"),
    [(64, 4, 2048, False), (8, 8, 8192, True), (64, 8, 8192, True), (512, 8, 16384, True)],
)
def test_the_peak_of_a_70b_shape_is_the_trackers(ranks, layers, tokens, checkpointing, kernels_without_triton):
    config = LlamaConfig.from_pretrained(LLAMA_70B, num_hidden_layers=layers)
    with torch.device("meta"):
        shape = Shape.of(AutoModelForCausalLM.from_config(config).bfloat16())
    tracked = tracked_peak(config, ranks, tokens, checkpointing)
    planned = training_footprint(shape, Training(checkpointing=checkpointing), ranks, tokens)
    assert planned.total == pytest.approx(tracked["Total"], rel=0.1)
    # What is there all the time is sharded evenly, but for tensors of fewer rows than ranks.
    assert planned.parts["optimizer"] == pytest.approx(tracked["OptState"], rel=1e-3)
    assert planned.parts["fp32 masters"] == pytest.approx(tracked["Sharded Param"], rel=1e-3)
    assert planned.parts["gradients"] == pytest.approx(tracked["Sharded Grad"], rel=1e-3)
