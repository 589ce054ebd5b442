"""Builds the environment of ``env.dataset``, and reads its held-out rows."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.spec import task_spec
from grpo_rl.settings.schema import Settings


def make_env(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> LLMEnv:
    """Builds the environment of ``env.dataset``, and checks its prompts against the context length.

    Raises:
        ValueError: the data can't be found or read, or a prompt is too long and ``env.long_prompt`` is ``error``.
    """
    own = {name: settings.env[name] for name in settings.env if name not in ("dataset", "eval_path")}
    env = task_spec(settings.env.dataset)(
        tokenizer=tokenizer,
        max_prompt_tokens=settings.inference_model.max_model_len - settings.sampling.max_new_tokens,
        seed=settings.train.seed,
        **own,
    )
    env.check_prompts()
    return env


def eval_rows(settings: Settings, env: LLMEnv) -> list[dict]:
    """The first ``evaluate.rows`` held-out rows.

    Raises:
        ValueError: fewer rows are there, one is too long, or the data can't be found: a local ``env.path`` needs
            ``env.eval_path``.
    """
    wanted = settings.evaluate.rows
    if not wanted:
        return []
    spec, path = task_spec(settings.env.dataset), settings.env.eval_path
    if path is None and settings.env.path:
        if not settings.env.task.get("held_out") and settings.env.path not in spec.generated:
            raise ValueError(f"evaluate.rows={wanted} needs env.eval_path beside env.path={settings.env.path}")
        path = settings.env.path  # the same data has a held-out part
    rows = spec.rows(path, "test", settings.env)
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
