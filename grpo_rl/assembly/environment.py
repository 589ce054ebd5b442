"""Builds the environment of ``env.dataset``, and reads its held-out rows."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl.envs import Compose, TransformedEnv
from transformers import PreTrainedTokenizerBase

from grpo_rl.by_name import is_name, object_by_name, short_name
from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.mixture import ROW, TASK, MixtureEnv
from grpo_rl.envs.own import check_prompts, check_task_of
from grpo_rl.envs.rewards.combined import WithRewards
from grpo_rl.envs.spec import task_spec
from grpo_rl.envs.task import Task, plays_turns
from grpo_rl.envs.tools.schemas import shows_tools
from grpo_rl.run.held_out import HeldOutTask
from grpo_rl.section import unknown
from grpo_rl.settings.compose import named, settings_of_eval_tasks, settings_of_mixture
from grpo_rl.settings.derived import eval_source, train_source
from grpo_rl.settings.mixture import OF_DATA, Entry, entries, read_tasks
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.sections import Evaluate
from grpo_rl.training.evaluate import score_names


def make_env(settings: Settings, tokenizer: PreTrainedTokenizerBase, tries: bool = True) -> LLMEnv:
    """Builds the environment of ``env.dataset``, and checks its prompts against the context length.

    Args:
        tries: has reward functions of the user's own score once.
    """
    if found := entries(settings):
        return _mixture(settings, tokenizer, found, tries)
    env = _env_of(settings, tokenizer, path=train_source(settings))
    if tries or is_name(settings.env.dataset):
        _try_out(env, settings.env.dataset)
    env.check_prompts()
    return env


def with_transforms(env: LLMEnv, names: Sequence[str]) -> LLMEnv:
    """The environment in the transforms of ``env.transforms``, the last one outermost."""
    return TransformedEnv(env, Compose(*made(names, "env.transforms"))) if names else env  # pyrefly: ignore[bad-return]


def made(names: Sequence[str], key: str) -> list[Any]:
    """The objects of the classes that a setting names, made without arguments."""
    return [object_by_name(name, f"{key}[{i}]")() for i, name in enumerate(names)]


def _env_of(settings: Settings, tokenizer: PreTrainedTokenizerBase, **data: Any) -> LLMEnv:
    return task_spec(settings.env.dataset)(
        tokenizer=tokenizer,
        max_prompt_tokens=settings.inference_model.max_model_len - settings.sampling.max_new_tokens,
        seed=settings.train.seed,
        **data,
        **task_settings(settings),
    )


def task_settings(settings: Settings) -> dict[str, Any]:
    """The settings of the task and of the environment: all but those that say where rows come from."""
    own = {name: settings.env[name] for name in settings.env if name not in ("dataset", *OF_DATA, "transforms")}
    return own | {"tool_parser": tool_parser_of(settings)}


def _try_out(env: LLMEnv, dataset: str) -> None:
    """Scores once with the user's own task and reward functions, on rank zero alone, which does all scoring."""
    if os.environ.get("RANK", "0") == "0":
        if task_spec(dataset).takes_reward:
            check_task_of(env, dataset)
        if isinstance(env.task, WithRewards):
            env.task.try_own()


def tool_parser_of(settings: Settings) -> Callable[[PreTrainedTokenizerBase, list[dict[str, Any]]], Any]:
    """Makes the parser of calls that ``env.tool_parser`` names, where a task has tools.

    The parser is vLLM's, whichever engine samples, or a class of the user's own. For a chat template that shows no
    tools, the default is ``hermes``.
    """

    def make(tokenizer: PreTrainedTokenizerBase, schemas: list[dict[str, Any]]) -> Any:
        name = settings.env.tool_parser
        if name is not None and is_name(name):
            return object_by_name(name, "env.tool_parser")(tokenizer, schemas)
        try:
            from grpo_rl.engines.vllm.tool_parsers import tool_parser
        except ImportError as error:
            raise ValueError(
                f"{settings.env.dataset} has tools, and calls are read by vLLM's parsers, which can't be imported "
                f"({error}); install vLLM with pip install 'grpo-rl[cpu]' or 'grpo-rl[vllm]'"
            ) from error
        return tool_parser(name or (None if shows_tools(tokenizer) else "hermes"), tokenizer, schemas)

    return make


def _mixture(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, found: Mapping[str, Entry], tries: bool
) -> MixtureEnv:
    envs: dict[str, LLMEnv] = {}
    for name, own in settings_of_mixture(settings).items():
        with named(f"env.mixture.{name}"):
            envs[name] = make_env(own, tokenizer, tries)
    return MixtureEnv(
        envs,
        {name: entry.weight for name, entry in found.items()},
        settings.env.num_envs,
        settings.env.repeats,
        scales={name: entry.scale for name, entry in found.items()},
        seed=settings.train.seed,
    )


def make_eval_env(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase | None,
    rows: int | None = None,
    remedy: str = "raise max_model_len= or lower rows=",
) -> Any:
    """The environment of the first ``rows`` held-out rows of ``env.dataset``; without a tokenizer, its task alone.

    Args:
        remedy: for a prompt that is too long; by default that of an evaluation by itself.
    """
    spec, path = task_spec(settings.env.dataset), eval_source(settings)
    if tokenizer is None:
        task = spec.make_task(path, "test", **spec.parted(task_settings(settings))[0])
        if settings.env.mcp:
            raise ValueError("env.mcp gives tools for several turns, which an endpoint is not asked for; give a model")
        if settings.env.rewards:
            raise ValueError("env.rewards is added by an environment with a tokenizer, which an endpoint has not")
        if is_name(settings.env.dataset):
            check_prompts(task, task.rows, settings.env.dataset, rows and min(rows, len(task.rows)))
        _take(task, rows, settings.env.dataset)
        if any(task.tools_of(row) for row in task.rows) and not plays_turns(task):
            raise ValueError(f"{settings.env.dataset} shows tools, which an endpoint is not asked with; give a model")
        return task
    env = _env_of(settings, tokenizer, path=path, split="test")
    _try_out(env, settings.env.dataset)
    _take(env.task, rows, settings.env.dataset)
    _check_prompts(env, env.task.rows, remedy)
    return env


def eval_tasks(settings: Settings, tokenizer: PreTrainedTokenizerBase, env_of_training: LLMEnv) -> list[HeldOutTask]:
    """The tasks of ``evaluate.tasks`` with their held-out rows; refuses an ``evaluate.score`` that no score has."""
    tasks = []
    for given, own in zip(read_tasks(settings.evaluate.tasks), settings_of_eval_tasks(settings), strict=True):
        remedy = "raise inference_model.max_model_len or lower the rows of evaluate.tasks"
        env = make_eval_env(own, tokenizer, given.rows, remedy)
        tasks.append(HeldOutTask(short_name(given.task), env, env.task.rows, given.samples))
    _check_score(settings.evaluate, env_of_training, tasks)
    return tasks


def _check_score(wanted: Evaluate, env: LLMEnv, others: Sequence[HeldOutTask]) -> None:
    if not (wanted.rows and (wanted.keep_best or wanted.patience)):
        return
    names = score_names(env.task, wanted.samples)
    for member, inner in env.members.items():
        own = score_names(inner.task, wanted.samples)
        names += [f"{member}/{name}" for name in own if not name.startswith(("maj@", "tied"))]
    names += [f"{other.name}/{name}" for other in others for name in score_names(other.env.task, other.samples)]
    if wanted.score not in names:
        raise ValueError(f"evaluate.score: {unknown('score', wanted.score, names)}")


def _take(task: Task, rows: int | None, name: str) -> None:
    if rows is not None and len(task.rows) < rows:
        raise ValueError(f"{name}: {rows} held-out rows are asked for, and the data has {len(task.rows)}")
    task.rows = [task.rows[i] for i in range(len(task.rows) if rows is None else rows)]


def _check_prompts(env: LLMEnv, rows: Sequence[dict], remedy: str) -> None:
    for i, row in enumerate(rows):
        with named(f"held-out row {i}"):
            tokens = len(env.encode(row))
            if env.max_prompt_tokens is not None and tokens > env.max_prompt_tokens:
                raise ValueError(f"a prompt of {tokens} tokens, {env.max_prompt_tokens} fit; {remedy}")


def eval_rows(settings: Settings, env: LLMEnv) -> list[dict]:
    """The first ``evaluate.rows`` held-out rows, checked for length; of a mixture, the first ones of each task."""
    rows: list[dict] = []
    for name, own in settings_of_mixture(settings).items():
        with named(f"env.mixture.{name}"):
            rows += [{TASK: name, ROW: row} for row in held_out_rows(own, env.members[name].task)]
    rows = rows if env.members else held_out_rows(settings, env.task)
    _check_prompts(env, rows, "raise inference_model.max_model_len or lower evaluate.rows")
    return rows


def held_out_rows(settings: Settings, task: Task) -> list[dict]:
    """The first ``evaluate.rows`` held-out rows, however long; of a local ``env.path`` they have to be named."""
    wanted = settings.evaluate.rows
    if not wanted:
        return []
    given, spec = settings.env, task_spec(settings.env.dataset)
    if not given.eval_path:
        same = given.eval_split or spec.holds_out(given.path, given.task)
        if given.path and not same:
            needs = f"needs env.eval_path next to env.path={given.path}, or env.eval_split"
            raise ValueError(f"evaluate.rows={wanted} {needs} where that has several splits")
    rows = spec.rows(eval_source(settings), "test", given)
    if is_name(given.dataset):
        check_prompts(task, rows, f"{given.dataset}, held out", min(wanted, len(rows)))
    if len(rows) < wanted:
        raise ValueError(f"evaluate.rows={wanted}, but the held-out data has {len(rows)} rows")
    return [rows[i] for i in range(wanted)]
