"""Factors of the loss: settings whose values name functions, and whose functions' arguments are settings themselves.

Nothing here imports torch, so that help does without the seconds that its import takes.
"""

import functools
import importlib
import inspect
import operator
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import Field, WrapValidator, create_model

import grpo_rl.losses
from grpo_rl.by_name import is_name, object_by_name
from grpo_rl.section import Named, Section, plain, setting

F = TypeVar("F", bound=Callable[..., Any])


class Factor:
    """A setting of ``loss`` whose values name functions of the project, or ``module:function``.

    The loss gives a function those arguments in ``given`` that its signature names. Its other arguments are settings of
    ``loss``: type, meaning and limits are in their ``Annotated``, and functions that share one declare it alike.

    Args:
        name: also the beginning of the names of the modules in `grpo_rl.losses` that register functions.
        given: the arguments that the loss computes.

    >>> SURROGATE.settings(SURROGATE.function("grpo_rl.losses.surrogate:plain_surrogate"))
    {}
    """

    def __init__(self, name: str, default: str, given: tuple[str, ...]) -> None:
        self.name, self.default, self.given = name, default, given
        self._functions: dict[str, tuple[Callable[..., Any], str]] = {}

    def add(self, name: str, meaning: str = "", **attributes: Any) -> Callable[[F], F]:
        """Registers a function, and gives it attributes; the meaning is shown in help."""

        def register(function: F) -> F:
            self._functions[name] = function, meaning
            vars(function).update(attributes)
            return function

        return register

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The project's functions by their names."""
        return {name: function for name, (function, _) in self._registered().items()}

    def _registered(self) -> dict[str, tuple[Callable[..., Any], str]]:
        _import_modules(self.name)
        # Whichever module was imported first.
        return dict(sorted(self._functions.items(), key=lambda item: item[1][0].__module__))

    def field(self) -> tuple[Any, Any]:
        """The type and default of the setting, as pydantic takes them."""
        choices = Literal[tuple(self.functions)]  # pyrefly: ignore[invalid-literal]
        meanings = [f"{name}: {meaning}" if meaning else name for name, (_, meaning) in self._registered().items()]
        about = " | ".join([*meanings, "package.module:function: your own (docs/losses.md)"])
        return Annotated[choices | Named, _OR_A_FUNCTION], Field(self.default, description=about)

    def function(self, choice: str | Callable[..., Any]) -> Callable[..., Any]:
        """The function that a value names, or which it is.

        Raises:
            ValueError: there is no such function, or nothing gives one of its arguments, which has no default.
        """
        if not callable(choice) and not is_name(choice):
            return self.functions[choice]
        own = choice if callable(choice) else object_by_name(choice, f"loss.{self.name}")
        known = {*self.given, *shared_settings()}
        if asked := [p.name for p in _parameters(own) if p.default is p.empty and p.name not in known]:
            raise ValueError(
                f"loss.{self.name}={named(own)} asks for {', '.join(asked)}; it can have {', '.join(self.given)}, "
                "settings of loss, and parameters of its own with a default"
            )
        return own

    def settings(self, function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
        """The types and defaults of a function's arguments that are settings, as pydantic takes them."""
        try:
            hints = get_type_hints(function, include_extras=True)
        except (NameError, TypeError):  # imported for type checkers alone, or of a callable object
            hints = {}
        found = {}
        for parameter in _parameters(function):
            if parameter.name not in self.given and parameter.default is not parameter.empty:
                own = type(parameter.default)
                kind = hints.get(parameter.name, own if own in (bool, int, float, str) else Any)
                if not any(getattr(about, "description", None) for about in get_args(kind)[1:]):
                    kind = Annotated[kind, Field(description=f"a parameter of {named(function)}")]
                found[parameter.name] = kind, plain(parameter.default)
        return found

    def bound(self, choice: str | Callable[..., Any], **settings: Any) -> functools.partial[Any]:
        """A function with those of the settings that it takes; to be called by :func:`call`."""
        function = self.function(choice)
        names = [parameter.name for parameter in _parameters(function) if parameter.name not in self.given]
        return functools.partial(function, **{name: settings[name] for name in names if name in settings})

    def chosen(self, loss: Mapping[str, Any], **others: Any) -> functools.partial[Any]:
        """The function that ``loss`` chooses, with its settings; ``others`` replace some."""
        return self.bound(loss[self.name], **{**loss, **others})


@functools.cache
def _import_modules(beginning: str) -> None:
    for module in pkgutil.iter_modules(grpo_rl.losses.__path__):
        if module.name.startswith(beginning):
            importlib.import_module(f"grpo_rl.losses.{module.name}")


def call(function: Callable[..., Any], **given: Any) -> Any:
    """The function's value, from those of the arguments that its signature names."""
    names = [parameter.name for parameter in _parameters(function)]
    return function(**{name: given[name] for name in names if name in given})


def asks_for(function: Callable[..., Any], *names: str) -> bool:
    """True if a function has one of these arguments."""
    return not inspect.signature(function).parameters.keys().isdisjoint(names)


def named(function: Any) -> str:
    """The ``module:name`` of a function, also with settings, or of a callable object."""
    function = getattr(function, "func", function)
    kind = type(function)
    return f"{getattr(function, '__module__', kind.__module__)}:{getattr(function, '__qualname__', kind.__qualname__)}"


def _parameters(function: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return (each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))


_OR_A_FUNCTION = WrapValidator(lambda value, check: value if callable(value) else check(value))
COVARIANCE = ("covariance_rank", "covariance_draw")
"""Arguments of surrogates that choose tokens by their covariance in the whole step."""
SURROGATE = Factor("surrogate", "clipped", ("log_ratio", "advantage", "log_prob", "trained", "response", *COVARIANCE))
"""The loss per token, [N], from tensors of [N]."""
KL = Factor("kl", "k3", ("log_prob", "ref_log_prob", "log_ratio"))
"""The estimate of the KL to the reference per token, [N], from tensors of [N]."""
CORRECTION = Factor("correction", "none", ("rho",))
"""The weight per token, [N], from the ratio of trainer to sampler, [N]."""
AGGREGATE = Factor("aggregate", "sequence_mean", ("trained", "response", "prompt", "sequences", "tokens", "prompts"))
"""The weight of each token in the step's loss, [N]; see `grpo_rl.losses.aggregate.token_weights`."""
ADVANTAGE = Factor("advantage", "zscore", ("rewards", "tables", "parts"))
"""The advantages; see `grpo_rl.losses.advantage.batch_advantages`."""
FACTORS = (SURROGATE, KL, CORRECTION, AGGREGATE, ADVANTAGE)

Ratio = Literal["token", "sequence", "sequence_token"]
"""The values of ``loss.ratio``."""
Level = Literal["token", "sequence", "geometric"]
"""The values of ``loss.correction_level``."""
REWARD_KL = ("k1", "k2", "k3")
"""The kinds with different values, for a KL in the reward; the others differ only in their gradient."""


class Loss(Section):
    """The loss of `policy` and this section; the other files of config/loss change some of it."""

    # `loss_section` declares the factors, and adds the settings of their functions.
    surrogate: Any = SURROGATE.default
    ratio: Ratio = setting(
        "token",
        "r of each token | sequence: its response's geometric mean, so that all its tokens share one gradient | "
        "sequence_token: that value with the token's own gradient",
    )
    kl: Any = KL.default
    kl_in: Literal["loss", "reward"] = setting(
        "loss", "loss | reward: a response's sum (k1, k2, k3; by the trainer's log-probs) is subtracted from its reward"
    )
    correction: Any = CORRECTION.default
    correction_level: Level = setting(
        "token", "rho of each token | sequence: product over its response | geometric: their geometric mean"
    )
    aggregate: Any = AGGREGATE.default
    off_policy_bound: float | None = setting(
        None,
        "OPSM: nats per token of KL to the sampler, above which a response with a negative advantage is left out",
        gt=0,
    )
    covariance_low: float = setting(1.0, "for surrogate=clip_cov: least covariance of the tokens that are drawn")
    covariance_high: float = setting(5.0, "for surrogate=clip_cov: largest covariance of the tokens that are drawn")
    mask_truncated: bool = setting(False, "leave responses that met the length limit out of the loss")
    top_entropy_fraction: float = setting(1.0, "share of tokens of highest entropy in the policy gradient", gt=0, le=1)
    advantage: Any = ADVANTAGE.default
    advantage_clip: float | None = setting(None, "largest advantage either way", gt=0)
    turn_credit: float = setting(0.0, "weight of a turn's own advantage, which is added; 0: none", ge=0)
    turn_discount: float = setting(0.95, "for turn_credit: factor of the reward for each turn to come", gt=0, le=1)

    def __reduce__(self) -> tuple[Any, ...]:  # its class is made, and no module has it
        return _restored, (dict(self),)


def _restored(values: Mapping[str, Any]) -> Loss:
    return loss_section(values).model_validate(values)


def loss_section(values: Mapping[str, Any] | None = None) -> type[Loss]:
    """The section ``loss``, with the settings of the project's functions and of the user's own that the values name.

    Raises:
        ValueError: such a function can't be had, or a parameter of it has the name of another setting.
    """
    own = [(factor, values.get(factor.name)) for factor in FACTORS] if isinstance(values, Mapping) else []
    return section_of(tuple((factor, value) for factor, value in own if callable(value) or is_name(value)))


@functools.cache
def shared_settings() -> dict[str, tuple[Any, Any]]:
    """The settings of the project's functions, whose meaning begins with the functions that take them."""
    found: dict[str, tuple[Any, Any]] = {}
    for factor in FACTORS:
        takes: dict[str, list[str]] = {}
        for choice, function in factor.functions.items():
            for name, field in factor.settings(function).items():
                takes.setdefault(name, []).append(choice)
                found[name] = field
        for name, choices in takes.items():
            kind, default = found[name]
            about = Field(description=f"for {factor.name}={' or '.join(choices)}: {get_args(kind)[1].description}")
            found[name] = operator.getitem(Annotated, (kind, about)), default
    return found


@functools.cache
def section_of(own: tuple[tuple[Factor, Any], ...]) -> type[Loss]:
    """The section with the settings of the user's own functions that stand for some factors."""
    fields = {factor.name: factor.field() for factor in FACTORS} | shared_settings()
    for factor, value in own:
        for name, field in factor.settings(factor.function(value)).items():
            # Of two functions with one parameter and two defaults, one would silently have the other's.
            differs = name in fields.keys() - shared_settings().keys() and fields[name][1] != field[1]
            if name in Loss.model_fields or differs:
                raise ValueError(f"loss.{factor.name}={value} has a parameter {name}, a name that is taken; rename it")
            fields.setdefault(name, field)
    return create_model("Loss", __base__=Loss, __doc__=Loss.__doc__, **fields)


def check_loss(loss: Loss, kl_coef: float) -> None:
    """Refuses settings that give no loss together."""
    if loss.surrogate == "none" and not kl_coef:
        raise ValueError(
            "loss.surrogate=none trains on the KL to the reference alone, which is off; set policy.kl_coef=1 and "
            "ref_model.name=TEACHER, with loss.kl_in=loss"
        )
    if (needed := getattr(SURROGATE.function(loss.surrogate), "ratio", loss.ratio)) != loss.ratio:
        raise ValueError(f"loss.surrogate={loss.surrogate} is of each token's ratio; set loss.ratio={needed}")
    if loss.covariance_low >= loss.covariance_high:
        raise ValueError(f"loss.covariance_low={loss.covariance_low} is not below covariance_high: no token is between")
    dual_clip, clip_high = loss["dual_clip"], loss["clip_high"]
    low, high = loss["correction_low"], loss["correction_high"]
    if dual_clip is not None and not dual_clip >= 1 + clip_high:
        raise ValueError(f"loss.dual_clip is {dual_clip}; use at least 1 + loss.clip_high (3 is usual), or null")
    if dual_clip is not None and "dual_clip" not in inspect.signature(SURROGATE.function(loss.surrogate)).parameters:
        raise ValueError(f"loss.dual_clip is {dual_clip}, and loss.surrogate={loss.surrogate} has none; set it to null")
    if not low <= 1 <= high:
        raise ValueError(f"loss.correction_low is {low} and loss.correction_high {high}; 1 must lie between them")
    if kl_coef and loss.kl == "k1":
        raise ValueError("loss.kl=k1 in the loss has no mean gradient; use k2, k3, k3+ or k3_is, or loss.kl_in=reward")


def check_advantage(
    function: Callable[..., Any], kl_coef: float, kl: str, reward_clip: float | None, turn_credit: float
) -> None:
    """Refuses settings of `grpo_rl.data.advantages.AdvantageEstimator` that give no advantage."""
    if kl_coef and kl not in REWARD_KL:
        raise ValueError(f"loss.kl={kl} is for the loss; with loss.kl_in=reward use {', '.join(REWARD_KL)}")
    if kl_coef and getattr(getattr(function, "func", function), "never_negative", False):
        raise ValueError(f"loss.advantage={named(function)} takes no negative rewards; use loss.kl_in=loss")
    takes = {*inspect.signature(function).parameters}
    if turn_credit and "rewards" not in takes:
        raise ValueError(f"loss.turn_credit: loss.advantage={named(function)} is none of each group by itself")
    if "rewards" in takes and (rest := takes & {"tables", "parts"}):
        wanted = f"{named(function)} asks for rewards, of each group by itself, and for {', '.join(sorted(rest))}"
        raise ValueError(f"loss.advantage={wanted}, of the whole collection; ask for tables instead of rewards")
    if not {"rewards", "tables"} & takes and (kl_coef or reward_clip is not None):
        raise ValueError(
            f"loss.advantage={named(function)} looks at parts of the reward, not at their sum; use loss.kl_in=loss "
            "and leave train.reward_clip at null"
        )
