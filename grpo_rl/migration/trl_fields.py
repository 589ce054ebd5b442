"""The table of TRL's ``GRPOConfig``: its fields, their defaults and types, and its values under their names here.

Source: TRL 1.16, ``trl/trainer/grpo_config.py`` and ``trl/trainer/model_config.py``, and the ``TrainingArguments`` of
transformers 5.19. docs/from_trl.md has what becomes of each field. `grpo_rl.settings.schema.SAME` has those whose
value is taken over as it is.
"""

from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Any] = {
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
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "use_adaptive_entropy": False,
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
    "ddp_timeout", "delta", "epsilon_high", "eval_steps", "generation_batch_size", "logging_steps", "lora_alpha",
    "lora_dropout", "lora_r", "max_completion_len", "max_prompt_length", "min_p", "num_processes",
    "off_policy_mask_threshold", "ref_model_mixup_alpha", "ref_model_sync_steps", "sapo_temperature_neg",
    "sapo_temperature_pos", "save_total_limit", "soft_punish_cache", "steps_per_generation", "top_entropy_quantile",
    "vllm_importance_sampling_clip_min", "vllm_max_model_length", "vllm_tensor_parallel_size",
} | {name for name, default in DEFAULTS.items() if type(default) in (int, float)}  # fmt: skip
COUNTS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations",
    "generation_batch_size", "num_processes", "steps_per_generation", "vllm_tensor_parallel_size",
)  # fmt: skip
"""Fields that are 1 or more."""
BOUNDS = ("epsilon", "epsilon_high", "max_grad_norm", "vllm_importance_sampling_clip_max")
"""Fields that may be infinite, which is no bound."""
LISTS: Mapping[str, type] = {"dataset_configs": str, "report_to": str, "reward_funcs": str, "reward_weights": float}
MAPPINGS: Mapping[str, tuple[str, ...]] = {
    "lr_scheduler_kwargs": ("min_lr", "min_lr_rate"),
    "model_init_kwargs": ("dtype", "torch_dtype"),
}
"""Fields that are mappings, and the names in them that have a counterpart."""
CONVERTED = {
    *DEFAULTS, *NUMBERS, *LISTS, *MAPPINGS, "bf16", "bnb_4bit_quant_type", "dataset_config", "dataset_name",
    "dataset_prompt_column", "dataset_test_split", "dataset_train_split", "dtype", "eval_strategy", "fp16", "fsdp",
    "load_best_model_at_end", "load_in_4bit", "load_in_8bit", "lora_target_modules", "optim", "resume_from_checkpoint",
    "sync_ref_model", "use_dora", "use_peft", "use_rslora",
}  # fmt: skip
"""Fields with a counterpart, other than those whose value is taken over; three of them are Open-R1's."""
UNNEEDED = (
    "accelerator_config", "attn_implementation", "auto_find_batch_size", "average_tokens_across_devices",
    "batch_eval_metrics", "bf16_full_eval", "cache_implementation", "cast_lm_head_to_fp32", "dataloader_", "ddp_",
    "disable_", "do_", "ds3_", "enable_jit_checkpoint", "eval_accumulation_steps", "eval_do_", "eval_on_start",
    "eval_use_", "fp16_full_eval", "gradient_checkpointing_kwargs", "hub_always_push", "hub_strategy",
    "ignore_data_skip", "include_", "label_", "length_column_name", "local_rank", "log_level", "log_on_each_node",
    "log_unique_prompts", "logging_", "num_completions_to_print", "num_generations_eval", "overwrite_output_dir",
    "pad_to_multiple_of", "per_device_eval_batch_size", "prediction_loss_only", "remove_unused_columns", "restore_",
    "save_on_each_node", "shuffle_dataset", "skip_memory_metrics", "torch_", "train_sampling_strategy",
    "transformers_", "use_cache", "use_cpu", "use_liger_", "use_transformers_", "vllm_device", "vllm_group_port",
    "vllm_model_impl", "vllm_server_",
)  # fmt: skip
"""Beginnings of fields that need no counterpart."""
NO_EFFECT = {
    "repetition_penalty": 1.0, "lora_task_type": "CAUSAL_LM", "model_revision": "main", "hub_revision": "main",
} | dict.fromkeys(
    (
        "dataset_streaming", "full_determinism", "greater_is_better", "hub_private_repo", "log_multimodal",
        "push_to_hub", "save_only_model", "tf32", "trust_remote_code", "use_bnb_nested_quant",
    ),
    False,
)  # fmt: skip
"""Values that ask for nothing, of fields without a counterpart; as null does of any field."""
RENAMED: Mapping[str, str] = {
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps",
    "hub_model_revision": "hub_revision",
    "wandb_project": "project",
    "use_liger": "use_liger_kernel",
    "lora_task": "lora_task_type",
}
"""Names of earlier versions of TRL and transformers, and today's."""

LOSS_TYPES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"aggregate": "sequence_mean"},
    "dapo": {"aggregate": "token_mean"},
    "bnpo": {"aggregate": "token_mean"},
    "dr_grpo": {"aggregate": "constant"},
    "luspo": {"aggregate": "constant", "normalizer": 1.0},
    "cispo": {"surrogate": "cispo", "aggregate": "token_mean"},
    "sapo": {"surrogate": "sapo", "aggregate": "sequence_mean"},
}
LORA = {"rank": ("r", 16), "alpha": ("alpha", 32), "dropout": ("dropout", 0.05)}
"""Our settings of adapters, TRL's behind ``lora_``, and its defaults."""
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
BY_HAND = {
    "load_best_model_at_end": "evaluate.keep_best=true, with evaluate.rows",
    "load_in_8bit": "int8 is for CPUs here; load_in_4bit is train_model.quantization=nf4",
    "resume_from_checkpoint": "TRL's can't be resumed; give its model folder as model.name",
}
"""Fields with a counterpart that is to be set by hand."""
DATASETS = {"openai/gsm8k": "gsm8k", "gsm8k": "gsm8k", "google/IFEval": "ifeval"}
"""Data sets of the hub that have a task here."""
ACCURACY = ("accuracy", "accuracy_reward", "reasoning_accuracy_reward")
"""Rewards that compare a mathematical answer with the gold one: the task ``math`` here."""
OVERLONG = "soft_overlong_punishment"
REWARDS = {
    name: name
    for name in ("format", "tag_count", "reasoning_steps", "length", "cosine", "repetition_penalty", "code_format")
} | {"think_format_reward": "format", OVERLONG: OVERLONG, f"get_{OVERLONG}": OVERLONG}
"""TRL's and Open-R1's names of rewards, and ours in ``env.rewards``."""
