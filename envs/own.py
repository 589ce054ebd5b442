"""A task of the user's own, by ``env.dataset=package.module:Class``: its class, its rows, and checks before its use."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_rl.by_name import is_name, object_by_name, one_line
from grpo_rl.envs.sources import AnySource, Source
from grpo_rl.envs.tables import column_hint, is_message, load_rows, place_of
from grpo_rl.envs.task import Task

if TYPE_CHECKING:
    from grpo_rl.envs.base import LLMEnv


def own_class(name: str) -> type:
    """The class of a task or an environment that ``package.module:Class`` names.

    Raises:
        ValueError: there is none, or it is neither.
    """
    found = object_by_name(name, "env.dataset")
    if not (inspect.isclass(found) and (issubclass(found, Task) or is_env(found))):
        wanted = "a class that inherits from grpo_rl.envs.base.Task, or from torchrl.envs.EnvBase"
        raise ValueError(f"env.dataset={name} is {found!r:.80}; it must be {wanted}")
    return found


def is_env(found: type) -> bool:
    """True for a class that derives from TorchRL's EnvBase; found by name, as a task needs no import of TorchRL."""
    return not issubclass(found, Task) and any(base.__qualname__ == "EnvBase" for base in found.__mro__)


def parameters_of(own: type) -> list[inspect.Parameter]:
    """The parameters of a class that are settings: a task's behind ``rows``, an environment's behind the tokenizer."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(own.__init__).parameters.values())[1:]
    settings = [each for each in parameters[3:] if each.name != "seed"] if is_env(own) else parameters[1:]
    return [parameter for parameter in settings if parameter.kind not in variadic]


def load_own_rows(task: type[Task], name: str, path: AnySource = None, split: str = "train") -> Sequence[dict]:
    """The rows of a task at ``path``: by its own ``load_rows(path, split)``, else as those of any data set."""
    source, own = Source.of(path), getattr(task, "load_rows", None)
    if own is None:
        return load_rows(source, split)
    source.refuse(f"{name}, which has a load_rows of its own", "subset", "revision", "columns")
    return own(source.path, source.split or split)


def make_own_task(task: type[Task], rows: Sequence[dict], **settings: Any) -> Task:
    """The task of the rows; a config's lists come as lists."""
    return task(rows, **{k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()})  # pyrefly: ignore[bad-argument-count]


def check_task_of(env: LLMEnv, name: str) -> None:
    """Checks what an environment needs of the user's own task or reward functions, with two empty responses to a row.

    Those of `env.rewards` are not called: a judge costs money, a model is not loaded yet. `grpo_rl.testing.check_task`
    checks more, in seconds: that scores repeat, and the way to a gradient.

    Raises:
        ValueError: a prompt is no list of messages, or empty responses to the first row can't be scored.
    """
    # They bring torch and processes, which a message needs not wait for.
    from grpo_rl.envs.guards.guard import Failure, ScoreGuard
    from grpo_rl.envs.rewards.combined import WithRewards

    task = env.task.task if isinstance(env.task, WithRewards) else env.task
    prompt = check_prompts(task, task.rows, name, None if is_name(name) else 1)
    guard = ScoreGuard(task, env.guard.deadline_s, 1.0)
    guard.tell = lambda _: None  # it is raised
    dialogs = [[*prompt, {"role": "assistant", "content": ""}]] * 2  # one would hide a number in the place of a list
    for result in guard.score_dialogs(task.rows[0], dialogs, place_of(task.rows, 0)):
        if isinstance(result, Failure) and result.kind != "unjudgeable":
            raise ValueError(f"{name} can't score an empty response: {result.message}")


def check_prompts(task: Task, rows: Sequence[dict], name: str, count: int | None = None) -> list[dict[str, str]]:
    """The prompt of the first row, when those of all rows, or the first ``count``, have been found to be messages.

    Raises:
        ValueError: one is not, or the task raised; with the row's place; or there are no rows.
    """
    indices = range(len(rows) if count is None else count)
    if not indices:
        raise ValueError(f"{name} has no rows; give a dataset with at least one")
    first: list[dict[str, str]] = []
    for index in indices:
        where = f"{name}: prompt of {place_of(rows, index)}"
        try:
            messages = task.prompt(rows[index])
        except Exception as error:
            hint = column_hint(error.args[0], rows[index]) if isinstance(error, KeyError) and error.args else ""
            raise ValueError(f"{where} raised {one_line(error)}{hint}") from error
        if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
            raise ValueError(f"{where} is {messages!r:.120}; it must be a list of messages, with role and content")
        first = first or messages
    return first
