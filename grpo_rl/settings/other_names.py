"""Settings under the names that other trainers, papers and optimizers give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SAME: Mapping[str, str] = {
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.clip_grad_norm",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "num_generations": "env.repeats",
    "max_completion_length": "sampling.max_new_tokens",
    "num_iterations": "train.epochs",
    "beta": "policy.kl_coef",
    "entropy_coef": "policy.entropy_coef",
    "epsilon": "loss.clip_low",
    "delta": "loss.dual_clip",
    "sapo_temperature_pos": "loss.tau_pos",
    "sapo_temperature_neg": "loss.tau_neg",
    "top_entropy_quantile": "loss.top_entropy_fraction",
    "mask_truncated_completions": "loss.mask_truncated",
    "gradient_checkpointing": "train_model.gradient_checkpointing",
    "vllm_gpu_memory_utilization": "inference_model.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "inference_model.tensor_parallel_size",
    "vllm_enable_sleep_mode": "inference_model.sleep",
    "max_tool_calling_iterations": "env.max_turns",
    "log_completions": "logger.completions",
    "ddp_timeout": "train_model.timeout_s",
    "seed": "train.seed",
    "model_name_or_path": "model.name",
    "chat_template": "model.chat_template",
    "system_prompt": "env.system_prompt",
    "run_name": "logger.name",
    "output_dir": "hydra.run.dir",
}
"""TRL's fields whose value is taken over as it is, with our names."""
OTHERS: Mapping[str, tuple[str, ...]] = {
    "env.eval_path": ("eval_file", "val_file", "val_files", "validation_file"),
    "env.num_envs": ("num_prompts", "prompts_per_step", "rollout_batch_size"),
    "env.path": ("data_path", "dataset_path", "train_file", "train_files"),
    "env.repeats": (
        "group_size",
        "n",
        "n_samples_per_prompt",
        "num_samples",
        "rollouts_per_prompt",
        "samples_per_prompt",
    ),
    "evaluate.frequency": ("eval_every", "eval_interval", "eval_steps", "test_freq"),
    "inference_model.max_model_len": ("context_length", "max_seq_len", "max_seq_length"),
    "logger.backend": ("report_to", "tracker"),
    "loss.clip_high": (
        "clip_eps",
        "clip_range",
        "clip_ratio",
        "clip_ratio_high",
        "eps_clip",
        "epsilon",
        "epsilon_high",
    ),
    "loss.clip_low": ("clip_eps", "clip_range", "clip_ratio", "clip_ratio_low", "eps_clip", "epsilon_low"),
    "optimizer.clip_grad_norm": ("clip_grad", "grad_clip", "gradient_clipping", "max_norm"),
    "optimizer.schedule": ("lr_schedule", "lr_scheduler", "lr_scheduler_type", "scheduler"),
    "optimizer.warmup_steps": ("num_warmup_steps", "warmup_ratio"),
    "policy.entropy_coef": ("ent_coef", "entropy_bonus", "entropy_coeff"),
    "policy.kl_coef": ("init_kl_coef", "kl_beta", "kl_loss_coef", "kl_weight"),
    "sampling.max_new_tokens": ("max_response_length", "max_tokens", "response_length"),
    "train.checkpoint_frequency": ("checkpoint_every", "save_every", "save_freq", "save_steps"),
    "train.epochs": ("mu", "ppo_epochs", "update_epochs"),
    "train.micro_batch_tokens": ("micro_batch_size", "per_device_train_batch_size"),
    "train.optim_batch_size": ("batch_size", "mini_batch_size", "ppo_mini_batch_size", "train_batch_size"),
    "train.total_dialog_turns": ("max_steps", "num_steps", "total_episodes", "total_steps"),
    "train_model.lora.alpha": ("lora_alpha",),
    "train_model.lora.rank": ("lora_r", "lora_rank"),
}
"""Other names of ours, which nothing converts: they serve to suggest ours."""
COUNTS: Mapping[str, str] = {
    "optimizer.warmup_steps": "optimizer steps",
    "train.micro_batch_tokens": "tokens",
    "train.total_dialog_turns": "responses",
}
"""The unit of ours where a name of :data:`OTHERS` has another one."""


def ours(name: str, known: Iterable[str]) -> list[str]:
    """The settings among these that elsewhere bear a name.

    >>> ours("learning_rate", ["optimizer.lr"]), ours("clip_ratio", ["loss.clip_high", "loss.clip_low"])
    (['optimizer.lr'], ['loss.clip_high', 'loss.clip_low'])
    """
    return [key for key in known if SAME.get(name) == key or name in OTHERS.get(key, ())]
