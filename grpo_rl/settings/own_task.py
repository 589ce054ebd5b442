"""The settings of a task of the user's own: the parameters of its class behind ``rows``."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import field
from inspect import Parameter
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from grpo_rl.envs.own import own_class, parameters_of
from grpo_rl.settings.declaration import REQUIRED, Section, Setting, plain
from grpo_rl.settings.tasks import TASKS

TAKEN = ("task", "seed", "tokenizer", "max_prompt_tokens", "rows")
"""Names that the environment uses itself, in addition to the settings that all tasks share."""


def task_section(dataset: str) -> type[Section]:
    """The settings of ``env.dataset``: those of one of the project's tasks, or those of the user's class.

    Raises:
        ValueError: there is no such class, or it is no task, or a setting has a name that is taken.
    """
    return TASKS[dataset] if dataset in TASKS else _section(dataset)


@functools.cache
def _section(name: str) -> type[Section]:
    task = own_class(name)
    try:
        hints = get_type_hints(task.__init__)
    except (NameError, TypeError):  # imported for type checkers alone
        hints = {}
    types_of, settings = {}, {}
    for parameter in parameters_of(task):
        if parameter.name in TAKEN:
            raise ValueError(f"{name} has a setting {parameter.name}, a name that is taken; rename it")
        types_of[parameter.name] = hint = _kind(hints.get(parameter.name, Parameter.empty), parameter.default)
        default = REQUIRED if parameter.default is Parameter.empty else plain(parameter.default)
        declaration = Setting(default, f"a parameter of {name}").typed(hint)
        settings[parameter.name] = field(metadata={"setting": declaration})
    return type("OwnTask", (Section,), {"__annotations__": types_of, "__doc__": task.__doc__, **settings})


def _kind(hint: Any, default: Any) -> Any:
    """The type of a setting's values, of those that a config can have; ``object``: any.

    >>> _kind(float, Parameter.empty), _kind(list[str], ()), _kind(Parameter.empty, 3), _kind(Sequence[set], None)
    (<class 'float'>, tuple[str, ...], <class 'float'>, <class 'object'>)
    """
    if hint is Parameter.empty:  # a number is a number, whether its default has a point or not
        kind = float if type(default) is int else type(default)
        return kind if kind in (bool, float, str) else object
    if hint in (bool, int, float, str) or get_origin(hint) is Literal:
        return hint
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [_kind(option, None) for option in arguments if option is not types.NoneType]
        if len(kinds) == 1 and kinds[0] is not object:
            return kinds[0] | None
        return object
    if origin in (list, tuple, Sequence):
        item = arguments[0] if arguments else object
        item = Mapping[str, Any] if (get_origin(item) or item) in (dict, Mapping) else item
        return tuple[item, ...] if item in (int, float, str, Mapping[str, Any]) else object
    return Mapping[str, Any] if origin in (dict, Mapping) else object
