"""Builds the environment of ``env.dataset``, and reads its held-out rows."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.demonstrations import Demonstrations
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


def make_demonstrations(settings: Settings, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> Demonstrations:
    """The rows of ``env.dataset`` with the responses that SFT imitates, checked against the lengths of GRPO.

    Raises:
        ValueError: the data can't be found or read, has no demonstrations, or one is too long; see `Demonstrations`.
    """
    longest = settings.sampling.max_new_tokens
    return Demonstrations(
        task_spec(settings.env.dataset).make_task(settings.env.path, **settings.env.task),
        tokenizer,
        ends,
        max_prompt_tokens=settings.inference_model.max_model_len - longest,
        max_response_tokens=longest,
        long_prompt=settings.env.long_prompt,
        seed=settings.train.seed,
    )


def eval_rows(settings: Settings, env: LLMEnv) -> list[dict]:
    """The first ``evaluate.rows`` held-out rows.

    Raises:
        ValueError: fewer rows are there, one is too long, or the data can't be found: a local ``env.path`` needs
            ``env.eval_path``.
    """
    rows = held_out_rows(settings)
    for i, row in enumerate(rows):
        if (tokens := len(env.encode(row))) > env.max_prompt_tokens:
            raise ValueError(
                f"held-out row {i} has a prompt of {tokens} tokens, {env.max_prompt_tokens} fit; raise "
                "inference_model.max_model_len or lower evaluate.rows"
            )
    return rows


def held_out_rows(settings: Settings) -> list[dict]:
    """The first ``evaluate.rows`` held-out rows, however long.

    Raises:
        ValueError: see :func:`eval_rows`.
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
    return [rows[i] for i in range(wanted)]
