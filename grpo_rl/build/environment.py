"""The environment of ``env.dataset``, and its held-out rows."""

from __future__ import annotations

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.registry import task_spec


def make_env(cfg: DictConfig, tokenizer: PreTrainedTokenizerBase) -> LLMEnv:
    """The environment of ``env.dataset``, its prompts checked against the context.

    Raises:
        ValueError: the data can't be found or read, or a prompt is too long and ``env.long_prompt`` is ``error``.
    """
    settings = {name: cfg.env[name] for name in cfg.env if name not in ("dataset", "eval_path")}
    env = task_spec(cfg.env.dataset)(
        tokenizer=tokenizer,
        max_prompt_tokens=cfg.inference_model.max_model_len - cfg.sampling.max_new_tokens,
        seed=cfg.train.seed,
        **settings,
    )
    env.check_prompts()
    return env


def eval_rows(cfg: DictConfig, env: LLMEnv) -> list[dict]:
    """The first ``evaluate.rows`` held-out rows; none where none are asked for.

    Raises:
        ValueError: fewer rows are there, one is too long, or the data can't be found: a local ``env.path`` needs
            ``env.eval_path``.
    """
    wanted = cfg.evaluate.rows
    if not wanted:
        return []
    spec, path = task_spec(cfg.env.dataset), cfg.env.eval_path
    if path is None and cfg.env.path:
        if not cfg.env.get("held_out") and cfg.env.path not in spec.generated:
            raise ValueError(f"evaluate.rows={wanted} needs env.eval_path beside env.path={cfg.env.path}")
        path = cfg.env.path  # which has a held-out part
    rows = spec.rows(path, "test", cfg.env)
    if len(rows) < wanted:
        raise ValueError(f"evaluate.rows={wanted}, but the held-out data has {len(rows)} rows")
    for i in range(wanted):
        row = rows[i]
        if (tokens := len(env.encode(row))) > env.max_prompt_tokens:
            raise ValueError(
                f"held-out row {i} has a prompt of {tokens} tokens, {env.max_prompt_tokens} fit; raise "
                "inference_model.max_model_len or lower evaluate.rows"
            )
    return [rows[i] for i in range(wanted)]
