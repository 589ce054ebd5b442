"""The fields of TRL's ``GRPOConfig`` that are known here, and TRL's values under their names here.

Source: TRL 1.16, ``trl/trainer/grpo_config.py`` and ``trl/trainer/model_config.py``, and the ``TrainingArguments`` of
transformers 5.19. docs/from_trl.md says what becomes of each field, also of those without a counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping

CONVERTED = {
    "loss_type", "importance_sampling_level", "epsilon_high", "scale_rewards", "multi_objective_aggregation",
    "reward_weights", "use_bias_correction_kl", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size",
    "steps_per_generation", "max_steps", "num_train_epochs", "warmup_steps", "lr_scheduler_type",
    "lr_scheduler_kwargs", "optim", "adam_beta1", "adam_beta2", "min_p", "sync_ref_model",
    "ref_model_sync_steps", "ref_model_mixup_alpha", "vllm_max_model_length", "use_vllm", "vllm_mode", "bf16",
    "fp16", "model_init_kwargs", "dtype", "save_strategy", "save_steps", "save_total_limit", "eval_strategy",
    "eval_steps", "report_to", "project", "fsdp", "use_peft", "lora_r", "lora_alpha", "lora_dropout",
    "lora_target_modules", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_liger_kernel",
    "resume_from_checkpoint", "dataset_name", "dataset_config", "dataset_configs", "dataset_train_split",
    "dataset_test_split", "load_best_model_at_end", "reward_funcs", "max_completion_len", "soft_punish_cache",
    "dataset_prompt_column", "num_processes", "max_prompt_length",
}  # fmt: skip
"""Fields whose value is computed, three of them Open-R1's."""

UNNEEDED = (
    "accelerator_config", "attn_implementation", "auto_find_batch_size", "average_tokens_across_devices",
    "batch_eval_metrics", "bf16_full_eval", "cache_implementation", "cast_lm_head_to_fp32", "dataloader_", "ddp_",
    "disable_", "do_", "ds3_", "enable_jit_checkpoint", "eval_accumulation_steps", "eval_do_", "eval_on_start",
    "eval_use_", "fp16_full_eval", "gradient_checkpointing_kwargs", "hub_always_push", "hub_strategy",
    "ignore_data_skip", "include_", "label_", "length_column_name", "local_rank", "log_level", "log_on_each_node",
    "log_unique_prompts", "logging_", "num_completions_to_print", "num_generations_eval", "overwrite_output_dir",
    "pad_to_multiple_of", "per_device_eval_batch_size", "prediction_loss_only", "remove_unused_columns", "restore_",
    "save_on_each_node", "shuffle_dataset", "skip_memory_metrics", "torch_", "train_sampling_strategy",
    "transformers_", "use_cache", "use_cpu", "use_liger_loss", "use_transformers_", "vllm_device", "vllm_group_port",
    "vllm_model_impl", "vllm_server_",
)  # fmt: skip
"""Beginnings of fields that need no counterpart."""

RENAMED: Mapping[str, str] = {
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps",
    "hub_model_revision": "hub_revision",
    "wandb_project": "project",
    "use_liger": "use_liger_kernel",
    "lora_task": "lora_task_type",
}
"""Names of earlier versions of TRL and transformers, and today's."""

DEFAULTS: Mapping[str, object] = {
    "learning_rate": 1e-6,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "num_generations": 8,
    "max_completion_length": 512,
    "num_iterations": 1,
    "beta": 0.0,
    "entropy_coef": 0.0,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "use_bias_correction_kl": True,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_steps": -1,
    "num_train_epochs": 3.0,
    "warmup_steps": 0,
    "lr_scheduler_type": "linear",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "gradient_checkpointing": True,
    "save_strategy": "steps",
    "save_steps": 500,
    "log_completions": False,
    "seed": 42,
}
"""TRL's defaults of fields that have a counterpart: a config that leaves one out means this."""

NUMBERS = {
    "ddp_timeout", "delta", "epsilon_high", "eval_steps", "generation_batch_size", "logging_steps",
    "lr_scheduler_kwargs.min_lr", "lr_scheduler_kwargs.min_lr_rate", "max_completion_len", "max_prompt_length",
    "min_p", "num_processes", "ref_model_mixup_alpha",
    "ref_model_sync_steps", "sapo_temperature_neg", "sapo_temperature_pos", "soft_punish_cache",
    "steps_per_generation", "top_entropy_quantile", "vllm_importance_sampling_clip_min",
    "vllm_max_model_length", "vllm_tensor_parallel_size",
}  # fmt: skip
"""Fields that take a number, beside those whose default is one."""
BOUNDS = ("epsilon", "epsilon_high", "max_grad_norm", "vllm_importance_sampling_clip_max")
"""Fields that may be infinite, which is no bound."""
LISTS: Mapping[str, type] = {"dataset_configs": str, "report_to": str, "reward_funcs": str, "reward_weights": float}
MAPPINGS = ("lr_scheduler_kwargs", "model_init_kwargs")
NO_EFFECT = {
    "repetition_penalty": 1.0, "lora_task_type": "CAUSAL_LM", "model_revision": "main", "hub_revision": "main",
} | dict.fromkeys(
    (
        "dataset_streaming", "full_determinism", "greater_is_better", "hub_private_repo", "log_multimodal",
        "push_to_hub", "save_only_model", "tf32", "trust_remote_code", "use_adaptive_entropy", "use_bnb_nested_quant",
        "use_dora", "use_rslora",
    ),
    False,
)  # fmt: skip
"""Values that ask for nothing, of fields without a counterpart; as null does of any field."""

DATASETS = {"openai/gsm8k": "gsm8k", "gsm8k": "gsm8k", "google/IFEval": "ifeval"}
"""Data sets of the hub that have a task here."""
ACCURACY = ("accuracy", "accuracy_reward", "reasoning_accuracy_reward")
"""Rewards that compare a mathematical answer with the gold one: the task ``math`` here."""
REWARDS = {
    name: name
    for name in (
        *("format", "tag_count", "reasoning_steps", "length", "cosine", "repetition_penalty"),
        *("soft_overlong_punishment", "code_format"),
    )
} | {"think_format_reward": "format", "get_soft_overlong_punishment": "soft_overlong_punishment"}
"""TRL's and Open-R1's names of rewards, and ours in ``env.rewards``."""
LOSS_TYPES = {
    "grpo": {"aggregate": "sequence_mean"},
    "dapo": {"aggregate": "token_mean"},
    "bnpo": {"aggregate": "token_mean"},
    "dr_grpo": {"aggregate": "constant"},
    "luspo": {"aggregate": "constant", "normalizer": 1.0},
    "cispo": {"surrogate": "cispo", "aggregate": "token_mean"},
    "sapo": {"surrogate": "sapo", "aggregate": "sequence_mean"},
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
ADVANTAGES = {"group": "zscore", "batch": "batch_std", "none": "no_std", "True": "zscore", "False": "no_std"}
CHOICES = {
    "loss_type": LOSS_TYPES,
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ADVANTAGES,
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_mask", "token_truncate", "sequence_mask", "sequence_truncate"),
}
"""Fields of which some values alone can be converted."""
