"""TRL and TorchRL, made to train on the same prebuilt groups as we do. Letters: B responses, T the longest length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor

from grpo_rl.data.group import Group
from grpo_rl.settings.devices import default_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def trl_trainer(
    model: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase, group_size: int, batch: int, folder: Path
):
    """TRL's ``GRPOTrainer`` without autocast and gradient checkpointing, in training mode, ready for a loss.

    Args:
        model: a model, or a folder, of which one in `default_dtype` is loaded.
        batch: responses of a forward.
        folder: where it may write.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "unused"}]),
        args=GRPOConfig(
            output_dir=str(folder),
            model_init_kwargs={"dtype": default_dtype()} if isinstance(model, str) else None,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            per_device_train_batch_size=batch,
            generation_batch_size=batch * group_size,  # read by nothing here; TRL requires whole groups in it
            num_generations=group_size,
            loss_type="grpo",
            beta=0.0,
            temperature=1.0,
            report_to="none",
        ),
    )
    trainer.current_gradient_accumulation_steps = 1  # what its training loop sets; `trl_batches` changes it
    trainer.model.train()
    return trainer


def trl_batches(groups: Sequence[Group], batch: int, pad_id: int) -> list[dict[str, Tensor]]:
    """The batches that TRL's ``_compute_loss`` is called with in one optimizer step.

    As in its ``_prepare_inputs``: all responses of the step are padded to the longest, shuffled, and cut into batches.

    Raises:
        ValueError: ``batch`` does not divide the responses.
    """
    prompts = [group.prompt_ids for group in groups for _ in range(group.size)]
    responses = [ids for group in groups for ids in group.responses]
    if len(responses) % batch:
        raise ValueError(f"{len(responses)} responses can't be cut into batches of {batch}")
    step = {
        "prompt_ids": _padded(prompts, pad_id, "left"),
        "prompt_mask": _padded([torch.ones_like(ids) for ids in prompts], 0, "left"),
        "completion_ids": _padded(responses, pad_id, "right"),
        "completion_mask": _padded([torch.ones_like(ids) for ids in responses], 0, "right"),
        "advantages": torch.cat([group.advantages for group in groups]),
    }
    order = torch.randperm(len(responses), generator=torch.Generator().manual_seed(0))
    return [{name: value[rows] for name, value in step.items()} for rows in order.split(batch)]


def trl_backward(trainer, batches: Sequence[dict[str, Tensor]]) -> None:
    """Gradients of one optimizer step, by TRL's own loss."""
    trainer.current_gradient_accumulation_steps = len(batches)
    for inputs in batches:
        trainer._compute_loss(trainer.model, inputs).backward()


def torchrl_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> torch.nn.Module:
    """TorchRL's ``GRPOLoss`` over its ``TransformersWrapper``, without the optional entropy and KL terms."""
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss

    actor = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
    return GRPOLoss(actor, clip_epsilon=0.2, entropy_bonus=False, masking_strategy="rlhf")


def torchrl_batch(groups: Sequence[Group]) -> TensorDictBase:
    """The groups in TorchRL's layout, one entry a response."""
    return lazy_stack([row for group in groups for row in group.to_tensordict().unbind(0)])


def _padded(rows: Sequence[Tensor], value: int, side: str) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)
