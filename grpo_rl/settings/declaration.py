"""Setting, Section: declarations of settings, and the checks and parsing that need nothing else."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from grpo_rl.by_name import is_name

RewardSource = str | tuple[str, ...] | Mapping[str, Any]
"""The type of a reward setting: one function by name, a list of them, or weights by name."""
REQUIRED: Any = dataclasses.MISSING
"""Marks a setting without a default, whose value the config must give."""


def _fits(value: Any, hint: Any) -> bool:
    """True if a plain value, with lists for tuples, has a type; an int is a float, a bool is neither.

    >>> _fits([1, 4], tuple[int, ...]), _fits(1, tuple[int, ...]), _fits(True, int)
    (True, False, False)
    """
    if hint is object:
        return True
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(part, get_args(hint)[0]) for part in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    return isinstance(value, get_origin(hint) or hint) and (hint is bool or not isinstance(value, bool))


KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Mapping[str, Any]: "a mapping",
    Mapping[str, float]: "a mapping",
    Mapping[str, str]: "a mapping",
    tuple[int, ...]: "a list of whole numbers",
    tuple[float, ...]: "a list of numbers",
    tuple[str, ...]: "a list of texts",
    tuple[Mapping[str, Any], ...]: "a list of mappings",
    tuple[object, ...]: "a list",
    str | tuple[str, ...]: "text or a list of names",
    RewardSource: "text, a list or a mapping",
    object: "any value",
}
"""The types that a setting can have, in words."""
BOUNDS = {"at_least": operator.ge, "more_than": operator.gt, "at_most": operator.le, "less_than": operator.lt}
"""The comparison of a value with each bound that a setting can have."""


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting.

    Args:
        default: the default; :data:`REQUIRED`: the config must give a value.
        meaning: what the setting does; the comment next to it in ``config/``.
        choices: the allowed values; empty: any value of its type.
        named: whether ``package.module:name``, an object of the user's own, is accepted as well as the choices.
        mode: the only mode that reads the setting; None: both do.
        kind: the type of its values other than null; where it has choices, theirs.
        free: whether it is a mapping whose keys are not declared here.
    """

    default: Any
    meaning: str
    choices: tuple[Any, ...] = ()
    named: bool = False
    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None
    mode: Literal["sync", "async"] | None = None
    kind: Any = str
    null: bool = False
    free: bool = False

    def typed(self, hint: Any) -> Setting:
        """The declaration, completed from the type annotation of its field."""
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        rest = functools.reduce(operator.or_, (option for option in options if option is not NoneType))
        free = rest == RewardSource or get_origin(rest) is get_origin(Mapping[str, Any])
        null = NoneType in options
        if literal := [option for option in options if get_origin(option) is Literal]:
            choices = tuple(choice for choice in get_args(literal[0]) if choice is not None)
            kinds = {type(choice) for choice in choices}
            kind, null = kinds.pop() if len(kinds) == 1 else object, null or None in get_args(literal[0])
            return dataclasses.replace(self, choices=choices, kind=kind, null=null, named=str in options)
        return dataclasses.replace(self, kind=rest, null=null, free=free)

    @property
    def comment(self) -> str:
        """The comment next to the setting in ``config/``.

        >>> Setting("none", "an experiment tracker", choices=("wandb", "none")).comment
        'wandb | none; an experiment tracker'
        """
        unnamed = any(str(choice) not in self.meaning for choice in self.choices)
        choices = " | ".join(map(str, self.choices)) + "; " if unnamed else ""
        return (f"mode={self.mode}: " if self.mode else "") + choices + self.meaning

    @property
    def bounds(self) -> str:
        """The allowed range in words.

        >>> Setting(0.5, "", more_than=0, at_most=1).bounds, Setting(8, "", at_least=2).bounds
        ('more than 0 and at most 1', '2 or more')
        """
        if self.at_least is not None and self.at_least == self.at_most:
            return f"{self.at_least:g}"
        ends = [f"{name.replace('_', ' ')} {bound:g}" for name in BOUNDS if (bound := getattr(self, name)) is not None]
        return f"{self.at_least:g} or more" if ends == [f"at least {self.at_least}"] else " and ".join(ends)

    def wrong_type(self, key: str, value: Any) -> str | None:
        """The line about a plain value of the wrong type; None: it is right."""
        if self.kind is str and isinstance(value, int | float) and not isinstance(value, bool):
            return f"{key} is {value!r}; it must be text{', or null' * self.null}; quoted it is: {key}=\"'{value}'\""
        if self.kind == Mapping[str, float] and isinstance(value, Mapping):
            weight = dataclasses.replace(self, kind=float, null=False)
            wrong = [weight.wrong_type(f"{key}.{name}", item) for name, item in value.items()]
            return "\n".join(filter(None, wrong)) or None
        if _fits(value, self.kind) or (value is None and self.null):
            return None
        return f"{key} is {value!r}; it must be {KINDS[self.kind]}" + ", or null" * self.null

    def check(self, key: str, value: Any) -> None:
        """Refuses a plain value of a wrong type or out of range.

        Raises:
            ValueError: with the key, the value and what it can be.
        """
        if line := self.wrong_type(key, value) or self.wrong_value(key, value):
            raise ValueError(line)

    def wrong_value(self, key: str, value: Any) -> str | None:
        """The line about a wrong value of the right type; None: it is right."""
        if value is None:
            return None
        if self.choices and value not in self.choices and not (self.named and is_name(value)):
            choices = [str(choice) for choice in self.choices]
            close = difflib.get_close_matches(str(value), choices, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            or_else = ", or package.module:name of your own, names joined by dots" * self.named
            or_else += ", or null" * self.null
            return f"{key} is {value!r}; it can be {', '.join(choices)}" + or_else + hint
        bounds = {name: bound for name in BOUNDS if (bound := getattr(self, name)) is not None}
        fits = all(BOUNDS[name](value, bound) for name, bound in bounds.items())
        return None if fits else f"{key} is {value}; it must be {self.bounds}" + ", or null" * self.null


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The line about a name that does not exist.

    >>> unknown("loss", "drgrpo", ["dapo", "dr_grpo"])
    "unknown loss 'drgrpo'; did you mean dr_grpo? (all: dapo, dr_grpo)"
    >>> unknown("recipe", "x", [])
    "unknown recipe 'x'; there is none"
    """
    known = list(known)
    if not known:
        return f"unknown {kind} {name!r}; there is none"
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean {close[0]}? (all: {', '.join(known)})" if close else f"choose one of {', '.join(known)}"
    return f"unknown {kind} {name!r}; {guess}"


def setting(default: Any, meaning: str, **constraints: Any) -> Any:
    """A field of a section that declares a setting; see :class:`Setting`."""
    metadata = {"setting": Setting(default, meaning, **constraints)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section(Mapping[str, Any]):
    """A section of a config: a frozen dataclass whose fields are settings or sections, and a mapping of them."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __getitem__(self, key: str) -> Any:
        if key not in self.__dataclass_fields__:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@functools.cache
def declared(section: type[Section], prefix: str = "") -> Mapping[str, Setting]:
    """Every setting of a section and of those inside it, by its dotted name."""
    hints, found = get_type_hints(section), {}
    for name, declaration in section.__dataclass_fields__.items():
        if isinstance(hints[name], type) and issubclass(hints[name], Section):
            found |= declared(hints[name], f"{prefix}{name}.")
        elif "setting" in declaration.metadata:
            found[prefix + name] = declaration.metadata["setting"].typed(hints[name])
    return found


S = TypeVar("S", bound=Section)


def build(section: type[S], values: Mapping[str, Any], **more: Any) -> S:
    """A section with these plain values, in which lists become tuples, and ``more`` fields that are no settings."""
    hints = get_type_hints(section)
    read = {
        name: build(hints[name], values[name])
        if isinstance(hints[name], type) and issubclass(hints[name], Section)
        else tuple(values[name])
        if isinstance(values[name], list)
        else values[name]
        for name in section.__dataclass_fields__
        if name not in more
    }
    return section(**read, **more)


def read_section(section: type[S], values: Mapping[str, Any], where: str) -> S:
    """A section of settings without others in it, from those that are given and its defaults.

    Args:
        where: the place of the values, for messages.

    Raises:
        ValueError: an unknown setting, one that is missing, or a wrong value.
    """
    known = declared(section)
    if wrong := [key for key in values if key not in known]:
        raise ValueError(f"{where}: {unknown('setting', str(wrong[0]), known)}")
    found = {key: plain(values.get(key, setting.default)) for key, setting in known.items()}
    for key, setting in known.items():
        if found[key] is REQUIRED:
            raise ValueError(f"{where} lacks {key}, {setting.meaning}")
        setting.check(f"{where}.{key}", found[key])
    return build(section, found)


def plain(value: Any) -> Any:
    """A value without sections and tuples.

    >>> plain((1, {"a": (2,)}))
    [1, {'a': [2]}]
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def select(values: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value at a dotted name.

    >>> select({"env": {"repeats": 8}}, "env.repeats"), select({"env": 5}, "env.repeats")
    (8, None)
    """
    for name in key.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return default
        values = values[name]
    return values
