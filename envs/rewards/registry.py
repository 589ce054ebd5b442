"""Rewards by the names of Open-R1, and the reading of ``env.rewards``: which, with what weight and settings."""

import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_rl.by_name import object_by_name
from grpo_rl.envs.task import check_weights
from grpo_rl.section import unknown

UNITS = ("characters", "tokens")
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_NOTHING: dict[str, Any] = {"text": "", "length": 0, "correct": False}


@dataclass(frozen=True)
class Known:
    """A reward that a config can name.

    Args:
        function: a function, or its ``module:name``, which is imported when the reward is asked for; keyword-only
            parameters are its settings, whose types have pydantic's limits.
        inputs: what it is called with, in order: the response's ``text``, its ``length``, whether it is ``correct``,
            the row's ``gold`` answer, the ``question``, the gold answer where there is one as ``reference``.
        whole_group: it compares the responses to a prompt, and so is called once with the lists of all.
        unit: of its lengths, unless the config says another.
        made: the function is a class: an object with these settings is made once, and called with the lists of all, as
            that is faster; its ``counts`` are metrics of the run.
        own: the function is the user's, and is tried on an empty response.
    """

    function: Any
    inputs: tuple[str, ...] = ("text",)
    whole_group: bool = False
    unit: str = "characters"
    made: bool = False
    own: bool = False

    @property
    def takes_lists(self) -> bool:
        """True if it is called with lists, of all responses to a prompt, and returns one."""
        return self.whole_group or self.made


_OURS = "grpo_rl.envs.rewards"
REWARDS: dict[str, Known] = {
    "accuracy": Known(f"{_OURS}.text:accuracy", ("text", "gold")),
    "format": Known(f"{_OURS}.text:answer_format"),
    "tag_count": Known(f"{_OURS}.text:tag_count"),
    "reasoning_steps": Known(f"{_OURS}.text:reasoning_steps"),
    "length": Known(f"{_OURS}.text:group_length", ("length", "correct"), whole_group=True),
    "cosine": Known(f"{_OURS}.text:cosine", ("length", "correct")),
    "repetition_penalty": Known(f"{_OURS}.text:repetition_penalty"),
    "soft_overlong_punishment": Known(f"{_OURS}.text:soft_overlong_punishment", ("length",), unit="tokens"),
    "code_format": Known(f"{_OURS}.text:code_format"),
    "judge": Known(f"{_OURS}.judge:Judge", ("question", "text", "reference"), made=True),
    "model": Known(f"{_OURS}.classifier:Classifier", ("question", "text"), made=True),
}
"""The rewards that ``env.rewards`` can name."""
INPUTS = ("text", "length", "correct", "gold", "question", "reference")
"""Inputs of a function of the user's own, by the names of its parameters."""


@dataclass(frozen=True)
class Part:
    """One reward as a config asks for it.

    Args:
        name: of :data:`REWARDS`, or the user's for a function of his own; that of the reward part, too.
        correct: the reward part that is above 0 for right responses; None looks for one.
    """

    name: str
    weight: float
    known: Known
    unit: str
    correct: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def values(self, inputs: Mapping[str, list[Any]], count: int) -> list[float | Exception]:
        """The value of each of ``count`` responses, not yet weighted, or what its scorer raised."""
        columns = [inputs[name] for name in self.known.inputs]
        if self.known.takes_lists:
            try:
                return list(self.known.function(*columns, **self.settings))
            except Exception as error:
                return [error] * count
        values: list[float | Exception] = []
        for arguments in zip(*columns, strict=True):
            try:
                values.append(self.known.function(*arguments, **self.settings))
            except Exception as error:
                values.append(error)
        return values


def read_parts(config: Mapping[str, Any]) -> list[Part]:
    """The rewards of ``env.rewards``: a weight by name, or a mapping of ``weight`` (1 if left out) and settings.

    None instead leaves a reward out, which is how a config takes one away from a config that it is built on. Rewards
    of lengths also take ``unit``, ``characters`` or ``tokens``; those that ask whether a response is right take
    ``correct``, the name of a reward part. With ``function``, ``package.module:function``, the reward is the user's own
    under a name of his choice: its parameters are of :data:`INPUTS`, its keyword-only parameters its settings.

    Raises:
        ValueError: there is no such reward or setting, one lacks, or a value makes no sense.

    >>> parts = read_parts({"format": 0.5, "cosine": {"max_len": 800, "unit": "tokens"}, "tag_count": None})
    >>> [(part.name, part.weight, part.settings) for part in parts]
    [('format', 0.5, {}), ('cosine', 1.0, {'max_len': 800})]
    """
    return [_read(name, setting) for name, setting in config.items() if setting is not None]


def _read(name: str, setting: Any) -> Part:
    where = f"env.rewards.{name}"
    settings = dict(setting) if isinstance(setting, Mapping) else {"weight": setting}
    known = _own(settings.pop("function"), where) if "function" in settings else REWARDS.get(name)
    if known is None:
        own = "one of your own needs `function: package.module:function`"
        raise ValueError(f"env.rewards: {unknown('reward', name, REWARDS)}; {own}")
    if isinstance(known.function, str):
        known = replace(known, function=pkgutil.resolve_name(known.function))
    weight = settings.pop("weight", 1.0)
    check_weights({"weight": weight}, where)
    unit = settings.pop("unit", known.unit) if "length" in known.inputs else known.unit
    if unit not in UNITS:
        raise ValueError(f"{where}: unit is {unit!r}; it can be {' or '.join(UNITS)}")
    correct = settings.pop("correct", None) if "correct" in known.inputs else None

    parameters = inspect.signature(known.function).parameters.values()
    allowed = {parameter.name: parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    for setting_name in settings:
        if setting_name not in allowed:
            taken = ["weight", *(["unit"] if "length" in known.inputs else [])]
            taken += [*(["correct"] if "correct" in known.inputs else []), *allowed]
            raise ValueError(f"{where}: {unknown('setting', setting_name, taken)}")
    try:
        hints = get_type_hints(known.function.__init__ if known.made else known.function, include_extras=True)
    except (NameError, TypeError):  # the user's: imported for type checkers alone, or of a callable object
        hints = {}
    for setting_name, value in settings.items():
        hint = hints.get(setting_name, Any)  # of the user's own it may lack
        kind: TypeAdapter[Any] = TypeAdapter(hint, config=_STRICT)
        try:
            kind.validate_python(tuple(value) if isinstance(value, list) and not known.own else value)
        except ValidationError as error:
            # In the place of a text, as of a variable's name, the value may be a key.
            of_text = str in (hint, *get_args(hint))
            given = f"of type {type(value).__name__}" if of_text else repr(value)
            wrong = " or ".join(dict.fromkeys(each["msg"] for each in error.errors()))
            raise ValueError(f"{where}.{setting_name} is {given}; {wrong.replace('Input', 'it')}") from None
    try:
        if known.made:
            return Part(name, float(weight), replace(known, function=known.function(**settings)), unit, correct)
        if allowed and not known.own:  # a response of nothing shows whether they make sense, before what is expensive
            known.function(*map(_NOTHING.get, known.inputs), **settings)
    except (TypeError, ValueError) as error:  # a TypeError: a setting is missing
        raise ValueError(f"{where}: {error}") from error
    return Part(name, float(weight), known, unit, correct, settings)


def _own(name: Any, where: str) -> Known:
    function = object_by_name(str(name), f"{where}.function")
    if not callable(function) or inspect.isclass(function):
        raise ValueError(f"{where}.function={name} is {function!r:.80}; it must be a function")
    parameters = inspect.signature(function).parameters.values()
    inputs = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    wrong = [each for each in inputs if each not in INPUTS]
    if wrong or not inputs:
        rest = f"it can ask for {', '.join(INPUTS)}, and its settings stand behind a *"
        raise ValueError(f"{where}: {name} asks for {', '.join(wrong) or 'nothing'}; {rest}")
    return Known(function, inputs, own=True)
