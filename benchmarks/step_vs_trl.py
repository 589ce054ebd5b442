"""How many times faster one GRPO step is than TRL's on the same work: `python benchmarks/step_vs_trl.py --data FILE`.

A step is generation, training and whatever it takes that the next generation uses the new weights. The work: the
default model, 4 GSM8K prompts x 8 answers of exactly 96 tokens, rewards that alternate inside each group (so that no
group can be skipped), one optimizer step over all of it. Both train with AdamW, clip the gradient to norm 1, and have
no KL term.

TRL 1.16 runs at its best settings: each of its settings below is tried alone first, the fastest for each kind of
weights goes on to the rounds, where all arms take turns, and the headline is the fastest TRL median over ours. A setting
that fails (for lack of memory, say) is recorded and left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import harness

NAME = "step_vs_trl"
OURS = "grpo_rl"


@dataclass(frozen=True)
class Work:
    """What one step does: ``prompts`` are chat messages, ``repeats`` answers each of ``response`` tokens."""

    model: str
    prompts: tuple[list[dict[str, str]], ...]
    repeats: int
    response: int
    prompt_tokens: tuple[int, ...]

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.repeats


@dataclass(frozen=True)
class TRLSetting:
    """One way to set up TRL: weights' dtype (fp32 ones under bf16 autocast), and answers per forward and backward."""

    weights: str
    batch: int
    vllm: bool = False

    @property
    def name(self) -> str:
        return f"trl_{self.weights}_batch{self.batch}" + ("_vllm" if self.vllm else "")


def trl_arm(steps: harness.Steps, work: Work, setting: TRLSetting) -> None:
    """TRL's ``GRPOTrainer``, unchanged."""
    if setting.vllm:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # TRL's choice of executor asks for it
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    def alternating(completion_ids: list[list[int]], **_: object) -> list[float]:
        lengths = {len(ids) for ids in completion_ids}
        assert lengths == {work.response}, f"answers of {lengths} tokens, not {work.response}: not the same work"
        return [float(i % 2) for i in range(len(completion_ids))]

    class TakeTurns(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            steps.done()
            control.should_training_stop = not steps.wait()

    minimum = "min_tokens" if setting.vllm else "min_new_tokens"
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=work.model,
            reward_funcs=alternating,
            # Its sampler takes the rows in order: every step has the same prompts, as ours.
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in work.prompts] * 1000),
            args=GRPOConfig(
                output_dir=folder,
                model_init_kwargs={"dtype": {"bf16": "bfloat16", "fp32": "float32"}[setting.weights]},
                bf16=setting.weights == "fp32",  # autocast
                use_cpu=not torch.cuda.is_available(),
                optim="adamw_torch_fused",
                gradient_checkpointing=False,
                per_device_train_batch_size=setting.batch,
                gradient_accumulation_steps=work.answers // setting.batch,
                num_generations=work.repeats,
                max_completion_length=work.response,
                generation_kwargs={minimum: work.response},
                use_vllm=setting.vllm,
                vllm_mode="colocate",
                vllm_max_model_length=max(work.prompt_tokens) + work.response,
                vllm_importance_sampling_correction=False,  # one forward less
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                beta=0.0,
                num_iterations=1,
                loss_type="grpo",
                epsilon=0.2,
                learning_rate=1e-6,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                max_steps=1000,
                shuffle_dataset=False,
                dataloader_pin_memory=False,
                disable_tqdm=True,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
            ),
            callbacks=[TakeTurns()],
        )
        if setting.vllm:
            _repair_weight_sync(trainer.vllm_generation)
        if steps.wait():
            trainer.train()


def _repair_weight_sync(generation) -> None:
    """Lets TRL's in-process vLLM take weights on CPU, where TRL's own way of loading them fails."""

    def sync_weights() -> None:
        runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=generation._iter_named_params())
        generation.llm.reset_prefix_cache()

    generation.sync_weights = sync_weights
