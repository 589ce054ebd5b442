"""How a setting is declared, and the checks and the reading that follow from its declaration alone."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

RewardSource = str | tuple[str, ...] | Mapping[str, Any]
"""A function by name, several of them, or weights by name."""
REQUIRED: Any = dataclasses.MISSING
"""The default of a setting that has none."""


@dataclass(frozen=True)
class Kind:
    """What values a type takes, in words and as a test of a plain value."""

    words: str
    fits: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


TEXT = Kind("text", _is_text)
WEIGHTS = Kind("a mapping", _is_mapping)
KINDS = {
    bool: Kind("true or false", lambda value: isinstance(value, bool)),
    int: Kind("a whole number", _is_whole),
    float: Kind("a number", _is_number),
    str: TEXT,
    Mapping[str, Any]: Kind("a mapping", _is_mapping),
    Mapping[str, float]: WEIGHTS,
    tuple[int, ...]: Kind("a list of whole numbers", _list_of(_is_whole)),
    tuple[float, ...]: Kind("a list of numbers", _list_of(_is_number)),
    tuple[tuple[int, int], ...]: Kind(
        "a list of pairs of whole numbers", _list_of(lambda pair: _list_of(_is_whole)(pair) and len(pair) == 2)
    ),
    tuple[Mapping[str, Any], ...]: Kind("a list of mappings", _list_of(_is_mapping)),
    str | tuple[str, ...]: Kind("text or a list of names", lambda value: _is_text(value) or _list_of(_is_text)(value)),
    RewardSource: Kind("text, a list or a mapping", lambda value: isinstance(value, str | list | Mapping)),
}
"""The types that a setting can have."""


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting.

    Args:
        default: its value where nobody gives another; :data:`REQUIRED` where the config has to give it.
        meaning: what it does; the comment beside it in ``config/``.
        choices: the values that it can have; empty: any of its type.
        at_least: its lower bound.
        more_than: its lower bound, which it may not reach.
        at_most: its upper bound.
        less_than: its upper bound, which it may not reach.
        because: why a value out of bounds would not do, and what to do instead.
        mode: the one mode that reads it; None: both.
        kind: of its values.
        null: whether it may be null.
        free: whether it is a mapping whose keys are not declared here.
    """

    default: Any
    meaning: str
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None
    because: str = ""
    mode: Literal["sync", "async"] | None = None
    kind: Kind = TEXT
    null: bool = False
    free: bool = False

    def typed(self, hint: Any) -> Setting:
        """The declaration with what the type of its field says."""
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        rest = functools.reduce(operator.or_, (option for option in options if option is not NoneType))
        free = rest == RewardSource or get_origin(rest) is get_origin(Mapping[str, Any])
        null = NoneType in options
        if get_origin(rest) is Literal:
            return dataclasses.replace(self, choices=get_args(rest), null=null)
        return dataclasses.replace(self, kind=KINDS[rest], null=null, free=free)

    @property
    def comment(self) -> str:
        """What ``config/`` says beside it.

        >>> Setting("none", "an experiment tracker", choices=("wandb", "none")).comment
        'wandb | none; an experiment tracker'
        """
        unnamed = any(choice not in self.meaning for choice in self.choices)
        choices = " | ".join(self.choices) + "; " if unnamed else ""
        return (f"mode={self.mode}: " if self.mode else "") + choices + self.meaning

    @property
    def bounds(self) -> str:
        """Its range in words.

        >>> Setting(0.5, "", more_than=0, at_most=1).bounds, Setting(8, "", at_least=2).bounds
        ('more than 0 and at most 1', '2 or more')
        """
        if self.at_least is not None and self.at_least == self.at_most:
            return f"{self.at_least:g}"
        lower = {"at least": self.at_least, "more than": self.more_than}
        upper = {"at most": self.at_most, "less than": self.less_than}
        ends = [f"{words} {bound:g}" for words, bound in (lower | upper).items() if bound is not None]
        return f"{self.at_least:g} or more" if ends == [f"at least {self.at_least}"] else " and ".join(ends)

    def wrong_type(self, key: str, value: Any) -> str | None:
        """What is wrong with the type of a plain value; None: nothing."""
        if self.kind is WEIGHTS and _is_mapping(value):
            weight = dataclasses.replace(self, kind=KINDS[float], null=False)
            wrong = [weight.wrong_type(f"{key}.{name}", item) for name, item in value.items()]
            return "\n".join(filter(None, wrong)) or None
        if self.kind.fits(value) or (value is None and self.null):
            return None
        told = f"{key} is {value!r}; it must be {self.kind.words}" + ", or null" * self.null
        if self.kind is TEXT and _is_number(value):
            return f"{told}; quoted it is: {key}=\"'{value}'\""
        is_number = self.kind is KINDS[float] and isinstance(value, float)
        return told + "; neither infinity nor NaN is taken" * is_number

    def wrong_value(self, key: str, value: Any) -> str | None:
        """What is wrong with a value of the right type; None: nothing."""
        if value is None:
            return None
        if self.choices and value not in self.choices:
            close = difflib.get_close_matches(str(value), self.choices, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            return f"{key} is {value!r}; it can be {', '.join(self.choices)}" + ", or null" * self.null + hint
        fits = (
            (self.at_least is None or value >= self.at_least)
            and (self.more_than is None or value > self.more_than)
            and (self.at_most is None or value <= self.at_most)
            and (self.less_than is None or value < self.less_than)
        )
        reason = f": {self.because}" if self.because else ""
        return None if fits else f"{key} is {value}; it must be {self.bounds}" + ", or null" * self.null + reason


def setting(default: Any, meaning: str, **constraints: Any) -> Any:
    """A field of a section that declares a setting; see :class:`Setting`."""
    metadata = {"setting": Setting(default, meaning, **constraints)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


class Section(Mapping[str, Any]):
    """A section of a config: a frozen dataclass whose fields are settings or sections, and a mapping of them."""

    __dataclass_fields__: dict[str, dataclasses.Field]

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
    """A section with these plain values, in which lists become tuples.

    Args:
        more: fields that are no settings.
    """
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


def leaves(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of a nested mapping's leaves; lists and empty mappings are leaves.

    >>> leaves({"env": {"repeats": 8, "examples": [], "rewards": {}}})
    ['env.repeats', 'env.examples', 'env.rewards']
    """
    names = []
    for key, value in values.items():
        names += leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else [f"{prefix}{key}"]
    return names
