"""Builds the environment of ``env.dataset``, and reads its held-out rows."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from grpo_rl.by_name import is_name
from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.own import check_prompts, check_task_of
from grpo_rl.envs.spec import task_spec
from grpo_rl.settings.derived import eval_source, train_source
from grpo_rl.settings.schema import Settings


def make_env(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> LLMEnv:
    """Builds the environment of ``env.dataset``, and checks its prompts against the context length.

    Raises:
        ValueError: the data can't be found or read, or a prompt is too long and ``env.long_prompt`` is ``error``.
    """
    given = settings.env
    of_data = ("dataset", "path", "subset", "split", "revision", "columns", "eval_path", "eval_split")
    own = {name: given[name] for name in given if name not in of_data}
    env = task_spec(given.dataset)(
        path=train_source(settings),
        tokenizer=tokenizer,
        max_prompt_tokens=settings.inference_model.max_model_len - settings.sampling.max_new_tokens,
        seed=settings.train.seed,
        **own,
    )
    if is_name(given.dataset):
        check_task_of(env, given.dataset)
    env.check_prompts()
    return env


def eval_rows(settings: Settings, env: LLMEnv) -> list[dict]:
    """The first ``evaluate.rows`` held-out rows.

    Raises:
        ValueError: fewer rows are there, one is too long, or the data can't be found: a local ``env.path`` needs
            ``env.eval_path`` or ``env.eval_split``.
    """
    wanted = settings.evaluate.rows
    if not wanted:
        return []
    given, spec = settings.env, task_spec(settings.env.dataset)
    if not given.eval_path:
        same = given.eval_split or given.task.get("held_out") or given.path in spec.generated
        if given.path and not same:
            raise ValueError(
                f"evaluate.rows={wanted} needs env.eval_path beside env.path={given.path}, or env.eval_split where "
                "that has several splits"
            )
    rows = spec.rows(eval_source(settings), "test", given)
    if is_name(given.dataset):
        check_prompts(env.task, rows, f"{given.dataset}, held out", wanted)
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
