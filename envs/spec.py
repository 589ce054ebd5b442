"""TaskSpec: a task, the loader of its rows, and the environment of both; and the specs that ``env.dataset`` can name.

A spec imports torch only when it is called, and a task's module is imported when its task is asked for.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from grpo_rl.by_name import is_name
from grpo_rl.envs.own import is_env, load_own_rows, make_own_task, own_class
from grpo_rl.envs.sources import AnySource, Source
from grpo_rl.envs.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_rl.envs.base import LLMEnv


@dataclass(frozen=True)
class TaskSpec:
    """A task and the loader of its rows; called like an environment's class, it makes the environment.

    Args:
        task: makes the task; takes the rows, and the task's settings as keywords.
        load_rows: loads the rows of a path and a split; see the task's module.
        row_settings: names of the settings that ``load_rows`` takes as keywords.
        generated: values of ``path`` that name generated data instead of files; they have both splits.
        takes_reward: whether ``reward`` itself is a setting of the task; otherwise its entries are the task's settings.
        beside: name of a task setting that names other data; if that setting is None, ``path`` is used.
        hub: the hub's data set with the task's own rows to train on, ``owner/name``; None: it makes them, or has none.
    """

    task: Callable[..., Task]
    load_rows: Callable[..., Sequence[dict]]
    row_settings: tuple[str, ...] = ()
    generated: tuple[str, ...] = ()
    takes_reward: bool = False
    beside: str | None = None
    hub: str | None = None

    def __call__(
        self,
        num_envs: int,
        repeats: int,
        tokenizer: PreTrainedTokenizerBase,
        *,
        path: AnySource = None,
        split: str = "train",
        **settings: Any,
    ) -> LLMEnv:
        """The task as an :class:`~grpo_rl.envs.base.LLMEnv`; for ``path`` and ``split`` see its ``load_rows``.

        Args:
            settings: those of the environment, such as ``seed``; all others are the task's, with its weights in
                ``reward``, as in the config's ``env``.
        """
        from grpo_rl.envs.base import LLMEnv  # brings torch, which a worker that scores need not wait for

        own, shared = self.parted(settings)
        return LLMEnv(self.make_task(path, split, **own), tokenizer, num_envs, repeats, **shared)

    def parted(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The task's own settings, and those of :class:`~grpo_rl.envs.base.LLMEnv`."""
        from grpo_rl.envs.base import LLMEnv

        names = inspect.signature(LLMEnv.__init__).parameters.keys()
        own = {name: value for name, value in settings.items() if name not in names}
        return own, {name: value for name, value in settings.items() if name in names}

    def make_task(self, path: AnySource = None, split: str = "train", **settings: Any) -> Task:
        """The task of the rows at ``path``."""
        rows = self.rows(path, split, settings)
        own = {name: value for name, value in settings.items() if name not in self.row_settings}
        if self.beside:
            own[self.beside] = own.get(self.beside) or Source.of(path).path
        if not self.takes_reward:
            own |= own.pop("reward", None) or {}
        return self.task(rows, **own)

    def rows(self, path: AnySource, split: str, settings: Mapping[str, Any]) -> Sequence[dict]:
        """The rows at ``path``, loaded with those of ``settings`` that are the loader's."""
        return self.load_rows(path, split, **{name: settings[name] for name in self.row_settings if name in settings})

    def holds_out(self, path: str | None, settings: Mapping[str, Any]) -> bool:
        """True if the data at ``path`` has held-out rows next to those to train on."""
        return bool(settings.get("held_out")) or path in self.generated


class OwnEnvSpec(TaskSpec):
    """A TorchRL environment of the user's own; see `grpo_rl.envs.own_env`."""

    @override
    def __call__(
        self, num_envs: int, repeats: int, tokenizer: Any, *, path: Any = None, split: str = "train", **settings: Any
    ) -> LLMEnv:
        from grpo_rl.envs.own_env import OwnEnv

        if split != "train":
            _no_rows()
        own, shared = self.parted(settings)
        if unused := [name for name in ("rewards", "mcp", "curriculum") if shared.get(name)]:
            raise ValueError(f"env.{unused[0]} is for tasks; an environment of your own gives its rewards itself")
        made: Any = self.task(num_envs, repeats, tokenizer, seed=shared.get("seed", 0), **own)
        return OwnEnv(made, num_envs, repeats, tokenizer, shared.get("max_failed_fraction", 0.1))


def _no_rows(*_: object) -> Sequence[dict]:
    raise ValueError("an environment of your own has no rows to evaluate or imitate; set evaluate.rows=0")


_FILES = Path(__file__).parents[1] / "config" / "env"
TASKS = tuple(sorted({path.stem for path in _FILES.glob("*.yaml")} - {"mixture", "own"}))
"""The module of each task, which has one :class:`TaskSpec` and its settings' values in a file of its name."""


def task_spec(name: str) -> TaskSpec:
    """The task and the loader of ``env.dataset=name``, one of :data:`TASKS` or ``package.module:Class``.

    Raises:
        ValueError: there is no such class, or it is neither a task nor an environment.
    """
    if is_name(name):
        own = own_class(name)
        if is_env(own):
            return OwnEnvSpec(own, _no_rows)
        return TaskSpec(partial(make_own_task, own), partial(load_own_rows, own, name), takes_reward=True)
    found = vars(importlib.import_module(f"grpo_rl.envs.{name}")).values()
    (spec,) = (value for value in found if isinstance(value, TaskSpec))
    return spec
