"""Section: a part of a config, declared and checked with pydantic; and what help and errors say of a setting."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typing_extensions import TypeIs

from grpo_rl.by_name import is_name

REQUIRED: Any = PydanticUndefined
"""Marks a setting without a default, whose value the config must give."""
S = TypeVar("S", bound="Section")
LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
"""Pydantic's limits of a number, in words."""


def _named(value: str) -> str:
    if not is_name(value):
        raise ValueError("package.module:name of your own, names joined by dots")
    return value


Named = Annotated[str, AfterValidator(_named)]
"""The name of an object of the user's own."""


class Section(BaseModel, Mapping[str, Any]):
    """A section of a config: its settings and sections, as attributes and as a mapping; a list given is a tuple in it.

    Fields without a meaning are none of the config's; the mapping lacks them.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _with_tuples(cls, values: Any) -> Any:
        if isinstance(values, Section) or not isinstance(values, Mapping):
            return values
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    def __getitem__(self, key: str) -> Any:
        if key not in type(self).model_fields:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:  # pyrefly: ignore[bad-override]
        fields = type(self).model_fields.items()
        return iter([name for name, field in fields if field.description or is_section(field.annotation)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting in a section.

    Args:
        limits: of a number, by pydantic's names.
        mode: the only mode that reads the setting; None: both do.
        may_change: a resumed run may have another value: no step computes something else, but for rounding.
    """

    default: Any
    meaning: str
    kind: Any = str
    limits: Mapping[str, float] | None = None
    mode: str | None = None
    may_change: bool = False

    @classmethod
    def of(cls, field: FieldInfo) -> Setting:
        """The setting that a field declares."""
        found = [(name, getattr(each, name, None)) for each in field.metadata for name in LIMITS]
        limits = {name: bound for name, bound in found if bound is not None}
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        own = {name: extra[name] for name in ("mode", "may_change") if name in extra}
        return cls(field.default, field.description or "", field.annotation, limits, **own)

    @property
    def options(self) -> tuple[Any, ...]:
        """The types that a value can have."""
        return get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)

    @property
    def choices(self) -> list[str]:
        """The values that are named one by one."""
        named = [choice for kind in self.options if get_origin(kind) is Literal for choice in get_args(kind)]
        return [str(choice) for choice in named if choice is not None]

    @property
    def free(self) -> bool:
        """True for a mapping whose keys are not declared."""
        return any(get_origin(kind) is Mapping for kind in self.options)

    @property
    def comment(self) -> str:
        """The comment next to the setting in ``config/``.

        >>> Setting("none", "an experiment tracker", Literal["wandb", "none"]).comment
        'wandb | none; an experiment tracker'
        """
        unnamed = any(choice not in self.meaning for choice in self.choices)
        choices = " | ".join(self.choices) + "; " if unnamed else ""
        return (f"mode={self.mode}: " if self.mode else "") + choices + self.meaning

    @property
    def bounds(self) -> str:
        """The limits in words.

        >>> Setting(0.5, "", float, {"gt": 0, "le": 1}).bounds, Setting(8, "", int, {"ge": 2}).bounds
        ('more than 0 and at most 1', '2 or more')
        """
        limits = self.limits or {}
        if [*limits] == ["ge"]:
            return f"{limits['ge']:g} or more"
        return " and ".join(f"{LIMITS[name]} {bound:g}" for name, bound in limits.items())


def setting(
    default: Any,
    meaning: str,
    *,
    mode: Literal["sync", "async"] | None = None,
    may_change: bool = False,
    **limits: float,
) -> Any:
    """A field of a section that declares a setting, with pydantic's limits; see :class:`Setting`."""
    return Field(default, description=meaning, json_schema_extra={"mode": mode, "may_change": may_change}, **limits)


changeable = functools.partial(setting, may_change=True)
"""Declares a setting that a resumed run may change; see :func:`setting`."""


def is_section(kind: Any) -> TypeIs[type[Section]]:
    """True for the type of a section, not of a setting."""
    return isinstance(kind, type) and issubclass(kind, Section)


@functools.cache
def declared(section: type[Section], prefix: str = "") -> Mapping[str, Setting]:
    """Every setting of a section and of those inside it, by its dotted name."""
    found: dict[str, Setting] = {}
    for name, field in section.model_fields.items():
        if is_section(field.annotation):
            found |= declared(field.annotation, f"{prefix}{name}.")
        elif field.description:
            found[prefix + (field.alias or name)] = Setting.of(field)
    return found


def wrong_values(section: type[Section], values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """A line about each wrong value: its key, the value, what it can be, and the nearest of its choices."""
    try:
        section.model_validate(values)
        return []
    except ValidationError as failure:
        error = failure
    known = declared(section)
    found: dict[str, tuple[Any, Setting | None, dict[str, None]]] = {}
    for wrong in error.errors(include_url=False):
        names = list(map(str, wrong["loc"]))
        key = next((key for n in range(len(names)) if (key := ".".join(names[: n + 1])) in known), ".".join(names))
        setting = known.get(key)
        inside = wrong["loc"][key.count(".") + 1 :]
        if setting and len({*setting.options} - {NoneType}) > 1:
            inside = ()  # pydantic names the option there
        key += "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inside)
        message = wrong["msg"].removeprefix("Input ").removeprefix("Value error, ").replace("tuple", "list")
        # Of an item of it the setting says nothing more.
        found.setdefault(key, (plain(wrong["input"]), None if inside else setting, {}))[2][message] = None
    return [_line(prefix + key, *what) for key, what in found.items()]


def _line(key: str, value: Any, setting: Setting | None, messages: Iterable[str]) -> str:
    said = " or ".join(messages)
    if said == "Field required":
        return f"{key} is missing: {setting.meaning if setting else 'it has to be given'}"
    text = f"{key} is {value!r}; it {said}"
    if setting is None:
        return text
    text += ", or null" * (NoneType in setting.options)
    if {*setting.options} - {NoneType} == {str} and type(value) in (int, float):
        text += f"; quoted it is: {key}=\"'{value}'\""
    close = difflib.get_close_matches(str(value), setting.choices, n=1)
    return text + (f"; did you mean {close[0]}?" if close else "")


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


def read_section(section: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """A section without sections inside it, made of the given values and the defaults of the others.

    Args:
        where: the place of the values, for messages.

    Raises:
        ValueError: an unknown setting, one that is missing, or a wrong value.
    """
    if wrong := [key for key in values if key not in section.model_fields]:
        raise ValueError(f"{where}: {unknown('setting', str(wrong[0]), section.model_fields)}")
    if lines := wrong_values(section, plain(values), where and f"{where}."):
        raise ValueError("\n".join(lines))
    return section.model_validate(plain(values))


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
