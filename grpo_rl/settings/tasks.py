"""The tasks that a config can name, and settings: those of all, and parameters of each one's class and rows' loader."""

import functools
import inspect
import operator
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import Field, create_model

from grpo_rl.by_name import is_name, short_name
from grpo_rl.envs.own import own_class, parameters_of
from grpo_rl.envs.spec import TASKS as SPECS
from grpo_rl.envs.spec import task_spec
from grpo_rl.section import REQUIRED, Section, changeable, plain, setting, unknown

MIXTURE = "mixture"
"""The value of ``env.dataset`` that stands for several tasks, ``env.mixture``."""
TASKS = (*SPECS, MIXTURE)
"""The values of ``env.dataset``."""
ALIASES = {"math500": "math"}
"""Names of test sets, and the task that they are the held-out rows of."""
SINGLE = (*SPECS, *ALIASES)
"""The names of single tasks, which can be evaluated."""
TAKEN = ("task", "seed", "tokenizer", "max_prompt_tokens", "rows")
"""Names that the environment uses itself, in addition to the settings that all tasks share."""


class Env(Section):
    """The task, and how its prompts are sampled and its responses scored."""

    dataset: str = setting(REQUIRED, "task: " + " | ".join(TASKS) + " | package.module:Class, your own (docs/tasks.md)")
    path: str | None = setting(
        None,
        "instead of the task's own data: a file, folder or pattern of JSONL, JSON, CSV, Parquet, or hf:owner/name "
        "(docs/data.md)",
    )
    subset: str | None = setting(None, "the hub's configuration of the data; null: the only one")
    split: str | None = setting(None, "split of the hub's data or a folder; null: train")
    revision: str | None = setting(None, "commit, tag or branch of the hub's data; null: the newest")
    columns: Mapping[str, str] = setting(
        {}, "the data's names of columns, by those that the task uses: {question: problem, answer: solution}"
    )
    eval_path: str | None = setting(
        None, "held-out data, as `path`; null: `eval_split` of `path`, without `path` the task's own held-out split"
    )
    eval_split: str | None = setting(None, "held-out split of the hub's data or a folder; null: test")
    num_envs: int = setting(4, "prompts per collection", ge=1)
    repeats: int = setting(8, "group size G: responses per prompt", ge=2)
    long_prompt: Literal["error", "skip"] = setting(
        "error", "a prompt that leaves no room in max_model_len: `error` names its row, `skip` counts it"
    )
    max_turns: int = setting(4, "the policy's turns, for tasks that reply (calculator, search_qa)", ge=1)
    score_timeout_s: float = changeable(
        60, "seconds for one call of the scorer, of a response or of a whole group, and for a tool's reply", gt=0
    )
    max_failed_fraction: float = setting(
        0.1, "share of all responses whose scorers may fail or hang; with more the run stops", ge=0, le=1
    )
    isolated: bool | None = changeable(
        None,
        "true: score in processes of their own, which can be killed; false: reward functions given by name are called "
        "in this process; null: only they get a process. math's comparisons and gsm8k's patterns always do",
    )
    curriculum: Mapping[Any, Any] = setting(
        {},
        "only rows whose pass rate in this run is between low and high are drawn: {low: 0.1, high: 0.9} "
        "(docs/mixtures.md); empty: all",
    )
    rewards: Mapping[Any, Any] = setting(
        {},
        "added to the task's own: a weight by name, or a mapping of weight and settings, with `function` one of your "
        "own (docs/tasks.md)",
    )
    tool_parser: str | None = setting(
        None,
        "vLLM's parser of calls of tools: hermes | llama3_json | ..., or package.module:Class; null: by the chat "
        "template",
    )
    mcp: tuple[object, ...] = setting((), "MCP servers of tools: commands, or URLs of this machine (docs/tools.md)")
    transforms: tuple[str, ...] = setting(
        (), "TorchRL transforms around the environment: package.module:Class, made without arguments (docs/tasks.md)"
    )
    task: Mapping[str, Any] = Field(default_factory=dict)
    """The task's own settings, as plain values; as a mapping a section has them next to its own."""

    def __getitem__(self, key: str) -> Any:
        return self.task[key] if key in self.task else super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        return iter([*super().__iter__(), *self.task])


class MixtureTasks(Section):
    """Several tasks in one run."""

    mixture: Mapping[Any, Any] = setting(
        REQUIRED,
        "weights by task: {gsm8k: 0.5, ifeval: 0.3}; or a mapping of weight, scale (factor of its rewards), task "
        "(where its name is another) and its own settings",
    )


@functools.cache
def task_section(dataset: str) -> type[Section]:
    """The settings of ``env.dataset``: those of one of the project's tasks, or those of the user's class.

    Raises:
        ValueError: there is no such class, or it is no task, or a setting has a name that is taken.
    """
    if dataset == MIXTURE:
        return MixtureTasks
    if is_name(dataset):
        return _own_section(dataset)
    spec = task_spec(dataset)
    parameters = inspect.signature(spec.task).parameters.values()
    names = [each.name for each in parameters if each.kind is Parameter.KEYWORD_ONLY]
    fields = dict(_fields(spec.task, names)) | dict(_fields(spec.load_rows, [*spec.row_settings]))
    of_reward = {name: fields.pop(name) for name in [*fields] if _is_of_reward(fields[name][0])}
    if of_reward:
        fields["reward"] = (_made("Reward", of_reward), ...)
    return _made(dataset, fields)


def _fields(function: Callable[..., Any], names: Collection[str]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Type and default of each of a function's parameters; the class in an ``Annotated`` has a section of its own."""
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    for name in names:
        hint, default = hints[name], inspect.signature(function).parameters[name].default
        assert get_origin(hint) is Annotated, f"the setting {name} lacks its meaning"
        kind, *about = get_args(hint)
        if inspect.isclass(made := about[0]):
            parameters = inspect.signature(made).parameters.values()
            inner = [each.name for each in parameters if each.kind is Parameter.KEYWORD_ONLY]
            yield name, (_made(name, dict(_fields(made, inner))), ...)
        else:
            plainer = _kind(kind, default)  # of a config, which has lists alone, and no paths or functions
            kind = operator.getitem(Annotated, (kind if plainer is Any else plainer, *about))
            yield name, (kind, ... if default is Parameter.empty else plain(default))


def _is_of_reward(hint: Any) -> bool:
    return any((getattr(each, "json_schema_extra", None) or {}).get("of_reward") for each in get_args(hint)[1:])


def _made(name: str, fields: Mapping[str, Any]) -> type[Section]:
    return create_model(name, __base__=Section, **fields)


def _own_section(name: str) -> type[Section]:
    task, fields = own_class(name), {}
    try:
        hints = get_type_hints(task.__init__, include_extras=True)
    except (NameError, TypeError):  # imported for type checkers alone
        hints = {}
    for parameter in parameters_of(task):
        if parameter.name in TAKEN:
            raise ValueError(f"{name} has a setting {parameter.name}, a name that is taken; rename it")
        hint = _kind(hints.get(parameter.name, Parameter.empty), parameter.default)
        default = REQUIRED if parameter.default is Parameter.empty else plain(parameter.default)
        meant = next(filter(None, (getattr(each, "description", None) for each in get_args(hint)[1:])), None)
        about = Field(default, description=meant or f"a parameter of {name}", alias=parameter.name)
        fields[f"own_{parameter.name}"] = (hint, about)  # any name will do, also one of pydantic's methods
    return _made("OwnTask", fields)


def _kind(hint: Any, default: Any) -> Any:
    """The type of a setting's values, of those that a config can have; Any: any.

    >>> _kind(float, Parameter.empty), _kind(list[str], ()), _kind(Parameter.empty, 3), _kind(Sequence[set], None)
    (<class 'float'>, tuple[str, ...], <class 'float'>, tuple[typing.Any, ...])
    """
    if get_origin(hint) is Annotated:
        inner, *about = get_args(hint)
        return operator.getitem(Annotated, (_kind(inner, default), *about))
    if hint is Parameter.empty:  # a number is a number, whether its default has a point or not
        kind = float if type(default) is int else type(default)
        return kind if kind in (bool, float, str) else Any
    if hint in (bool, int, float, str) or get_origin(hint) is Literal:
        return hint
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [_kind(option, None) for option in arguments if option is not types.NoneType]
        return kinds[0] | None if len(kinds) == 1 and kinds[0] is not Any else Any
    if origin in (list, tuple, Sequence):
        item = _kind(arguments[0], None) if arguments else Any
        return tuple[item, ...]
    return Mapping[Any, Any] if origin in (dict, Mapping) else Any


def check_names(names: Sequence[str], where: str, known: Collection[str] = SINGLE) -> None:
    """Refuses names of no task, and two of one short name, which metrics would mix up."""
    for name in names:
        if name not in known and not is_name(name):
            raise ValueError(f"{where}: {unknown('task', name, [*known, 'package.module:Class'])}")
    short = [short_name(name) for name in names]
    if twice := [name for name in short if short.count(name) > 1]:
        raise ValueError(f"{where} names {twice[0]} twice")
