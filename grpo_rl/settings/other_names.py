"""Settings under the names of TRL."""

from __future__ import annotations

from collections.abc import Mapping

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
    "importance_sampling_level": "loss.ratio",
    "beta": "policy.kl_coef",
    "entropy_coef": "policy.entropy_coef",
    "epsilon": "loss.clip_low",
    "delta": "loss.dual_clip",
    "sapo_temperature_pos": "loss.tau_pos",
    "sapo_temperature_neg": "loss.tau_neg",
    "top_entropy_quantile": "loss.top_entropy_fraction",
    "mask_truncated_completions": "loss.mask_truncated",
    "gradient_checkpointing": "train_model.gradient_checkpointing",
    "min_p": "sampling.min_p",
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
    "project": "logger.project",
    "run_name": "logger.name",
    "output_dir": "hydra.run.dir",
}
"""TRL's fields whose value is taken over as it is, with our names."""
