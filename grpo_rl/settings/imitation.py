"""The settings that mode=sft, which imitates the data's responses, reads, and those that it refuses."""

from __future__ import annotations

from grpo_rl.section import plain, select
from grpo_rl.settings.sections import Sections, declarations

OF_GRPO = (
    "env.num_envs", "env.repeats", "env.max_turns", "env.score_timeout_s", "env.max_failed_fraction", "env.isolated",
    "env.curriculum", "env.rewards", "env.tool_parser", "env.mcp", "env.transforms", "ref_model", "inference_model",
    "sampling", "train.total_dialog_turns", "train.steps", "train.max_staleness", "train.max_resamples",
    "train.reward_clip", "train.lineage", "train_model.lora.push", "policy", "mismatch", "loss", "evaluate.samples",
    "evaluate.temperature", "evaluate.tasks", "evaluate.keep_best", "evaluate.patience", "evaluate.score",
    "logger.completions", "logger.token_groups", "ray",
)  # fmt: skip
"""Settings and sections of sampling and rewards, which SFT has none of."""


def is_read(key: str) -> bool:
    """True if mode=sft reads a setting.

    >>> is_read("optimizer.lr"), is_read("sampling.temperature"), is_read("sampling.max_new_tokens")
    (True, False, True)
    """
    lengths = ("inference_model.max_model_len", "sampling.max_new_tokens")  # which GRPO can go on with
    return key in lengths or not any(key == name or key.startswith(f"{name}.") for name in OF_GRPO)


def check_sft(settings: Sections) -> None:
    """Refuses settings that mode=sft does not read, and more micro-batches than a step has rows."""
    batch, count = settings.train.optim_batch_size, settings.train.gradient_accumulation_steps
    if count is not None and count > batch:
        raise ValueError(f"train.gradient_accumulation_steps={count}: a step has {batch} rows; use at most {batch}")
    for key, setting in declarations(settings.env.dataset, type(settings.loss)).items():
        if not is_read(key) and (value := select(settings, key)) != setting.default:
            raise ValueError(
                f"{key}={plain(value)} means nothing to mode=sft, which samples no responses; leave it out"
            )
