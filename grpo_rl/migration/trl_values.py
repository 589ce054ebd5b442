"""TRL's values and ours: data sets, rewards, losses."""

from __future__ import annotations

KNOWN_DATASETS = {"openai/gsm8k": "gsm8k", "gsm8k": "gsm8k", "google/IFEval": "ifeval"}
"""Data sets of the hub that have a task here."""
REWARDS = {
    "format": "format",
    "think_format_reward": "format",
    "tag_count": "tag_count",
    "reasoning_steps": "reasoning_steps",
    "length": "length",
    "cosine": "cosine",
    "repetition_penalty": "repetition_penalty",
    "soft_overlong_punishment": "soft_overlong_punishment",
    "get_soft_overlong_punishment": "soft_overlong_punishment",
    "code_format": "code_format",
}
"""TRL's and Open-R1's names of rewards, and ours in ``env.rewards``."""
ACCURACY = ("accuracy", "accuracy_reward", "reasoning_accuracy_reward")
"""Their rewards that compare a mathematical answer with the gold one: the task ``math`` here."""
NO_EFFECT = (("repetition_penalty", 1.0), ("lora_task_type", "CAUSAL_LM"))
OPEN_R1 = ("max_completion_len", "soft_punish_cache", "dataset_prompt_column")
"""Fields that Open-R1 adds to TRL's, and that are read here."""
LOSS_TYPES = {
    "grpo": {"aggregate": "sequence_mean"},
    "dapo": {"aggregate": "token_mean"},
    "bnpo": {"aggregate": "token_mean"},
    "dr_grpo": {"aggregate": "constant"},
    "luspo": {"aggregate": "constant", "normalizer": 1.0},
    "cispo": {"surrogate": "cispo", "aggregate": "token_mean"},
    "sapo": {"surrogate": "sapo", "aggregate": "sequence_mean"},
}
ADVANTAGES = {"group": "zscore", "batch": "batch_std", "none": "no_std", True: "zscore", False: "no_std"}
CHOICES = {
    "loss_type": LOSS_TYPES,
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ADVANTAGES,
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_mask", "token_truncate", "sequence_mask", "sequence_truncate"),
}
"""Fields of which some values alone can be converted."""
