"""The fields of TRL's ``GRPOConfig`` that are known here, and TRL's values under their names here.

Source: TRL 1.16, ``trl/trainer/grpo_config.py`` and ``trl/trainer/model_config.py``, and the ``TrainingArguments`` of
transformers 5.19. docs/from_trl.md says what becomes of each field, also of those without a counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping

KNOWN = {
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
    "dataset_prompt_column",
    "disable_dropout", "remove_unused_columns", "shuffle_dataset", "pad_to_multiple_of", "vllm_model_impl",
    "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
    "ds3_gather_for_generation", "cast_lm_head_to_fp32", "use_cache", "gradient_checkpointing_kwargs",
    "torch_compile", "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps",
    "auto_find_batch_size", "average_tokens_across_devices", "logging_strategy", "logging_steps",
    "logging_first_step", "logging_nan_inf_filter", "log_on_each_node", "log_level", "log_level_replica",
    "disable_tqdm", "include_num_input_tokens_seen", "num_completions_to_print", "log_unique_prompts",
    "skip_memory_metrics", "use_transformers_continuous_batching", "transformers_continuous_batching_config",
    "use_transformers_paged", "cache_implementation", "overwrite_output_dir", "do_train", "do_eval",
    "do_predict", "eval_on_start", "attn_implementation", "use_liger_loss", "per_device_eval_batch_size",
    "num_generations_eval", "bf16_full_eval", "fp16_full_eval", "prediction_loss_only",
    "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics",
    "batch_eval_metrics", "label_names", "label_smoothing_factor", "length_column_name",
    "train_sampling_strategy", "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory",
    "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context",
    "dataloader_in_order", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
    "ddp_static_graph", "ddp_backend", "accelerator_config", "local_rank", "use_cpu", "save_on_each_node",
    "ignore_data_skip", "restore_callback_states_from_checkpoint", "enable_jit_checkpoint", "num_processes",
    "max_prompt_length", "hub_strategy", "hub_always_push", "logging_dir", "vllm_device",
}  # fmt: skip
"""Fields whose value is computed, three of them Open-R1's, or that need no counterpart."""

MISSING = {
    "trust_remote_code", "router_aux_loss_coef", "generation_kwargs", "chat_template_kwargs",
    "repetition_penalty", "vllm_structured_outputs_regex", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
    "vespo_lambda_neg", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta",
    "entropy_target", "off_policy_mask_threshold", "log_multimodal", "log_completions_hub_repo", "adam_epsilon",
    "optim_args", "optim_target_modules", "neftune_noise_alpha", "liger_kernel_config", "tf32",
    "full_determinism", "data_seed", "save_only_model", "metric_for_best_model", "greater_is_better",
    "eval_delay", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_revision",
    "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "deepspeed", "fsdp_config",
    "parallelism_config", "debug", "model_revision", "dataset_streaming", "reward_model_name_or_path",
    "lora_target_parameters", "lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora",
    "use_bnb_nested_quant", "bnb_4bit_quant_storage", "vllm_importance_sampling_cap",
}  # fmt: skip
"""Fields without a counterpart."""

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
NO_EFFECT = (("repetition_penalty", 1.0), ("lora_task_type", "CAUSAL_LM"))
"""Values that ask for nothing, of fields without a counterpart."""

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
ADVANTAGES = {"group": "zscore", "batch": "batch_std", "none": "no_std", "True": "zscore", "False": "no_std"}
CHOICES = {
    "loss_type": LOSS_TYPES,
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ADVANTAGES,
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_mask", "token_truncate", "sequence_mask", "sequence_truncate"),
}
"""Fields of which some values alone can be converted."""
