"""The tasks of ``env.mixture``, ``evaluate.tasks`` and agents: their entries, and what is wrong with one by itself."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from grpo_rl.by_name import is_name, short_name
from grpo_rl.envs.curriculum import read_bounds
from grpo_rl.envs.own import is_env, own_class
from grpo_rl.section import REQUIRED, Section, declared, plain, read_section, select, setting
from grpo_rl.settings.sections import Sections
from grpo_rl.settings.tasks import MIXTURE, TASKS, Env, check_names

OF_DATA = ("path", "subset", "split", "revision", "columns", "eval_path", "eval_split")
"""Settings of ``env`` that say where rows come from; each task of a mixture has its own."""
SHARED = (
    "num_envs", "repeats", "long_prompt", "max_turns", "score_timeout_s", "max_failed_fraction", "isolated", "rewards",
    "curriculum", "tool_parser", "mcp",
)  # fmt: skip
"""Settings of ``env`` that a mixture's tasks have from the mixture, where they give none of their own."""
TAKEN = ("error", "timeout", "invalid", "unjudgeable", "groups")
"""Names that no task of a mixture can have: ``failed/error`` counts errors."""
ALONE = (MIXTURE, "agent")
"""Values of ``env.dataset`` that are no task of a mixture: an agent's sessions have a collector of their own."""
OF_ALL = ("dataset", "num_envs", "repeats", "max_turns", "transforms", "mixture")
"""Settings that a single task of a mixture can't have."""
OF_TRAINING = ("dataset", "eval_path", "num_envs", "repeats", "curriculum", "transforms")
"""Settings of ``env`` that an entry can't have: its own keys name task and data, and nothing is trained on."""
EPISODES = ("openenv", "verifiers")
"""Tasks that reward the steps of an episode, which an agent's session is not."""


class Entry(Section):
    """One task of a mixture."""

    task: str = setting(REQUIRED, "the task, where the entry has another name")
    weight: float = setting(REQUIRED, "the share of prompts that are drawn from it", gt=0)
    scale: float = setting(1.0, "factor of its rewards", gt=0)
    teacher: str | None = setting(None, "the reference of its prompts, as ref_model.name")
    env: Mapping[str, Any] = Field(default_factory=dict)
    """Its task's own settings."""


def entries(settings: Sections) -> dict[str, Entry]:
    """The tasks of ``env.mixture`` by the names that metrics have; empty where ``env.dataset`` is another task.

    Raises:
        ValueError: an entry names no task, or has a weight or scale that makes no sense.
    """
    found: dict[str, Entry] = {}
    for key, value in settings.env.task.get(MIXTURE, {}).items():
        name = short_name(str(key))
        where = f"env.mixture.{name}"
        env = dict(value) if isinstance(value, Mapping) else {"weight": value}
        given = {key: env.pop(key) for key in declared(Entry) if key in env}
        own = {"task": str(key)} | {key: value for key, value in given.items() if value is not None}
        entry = read_section(Entry, own | {"env": env}, where)
        if name in found or "/" in name or name in TAKEN:
            raise ValueError(f"{where}: metrics have this name already; use another: {{other: {{task: {key}, ...}}}}")
        check_names([entry.task], where, [task for task in TASKS if task not in ALONE])
        if is_name(entry.task) and is_env(own_class(entry.task)):
            raise ValueError(f"{where}: an environment is no task of a mixture; set env.dataset={entry.task}")
        if taken := [name for name in OF_ALL if name in env]:
            raise ValueError(f"{where}.{taken[0]}: all tasks of a mixture have the same; set env.{taken[0]}")
        model = select(env, "rewards.model", {})
        if isinstance(model, Mapping) and (model.get("num_devices") or model.get("devices")):
            raise ValueError(f"{where}.rewards.model asks for a device; all tasks share it: set env.rewards.model")
        found[name] = entry
    if settings.env.dataset == MIXTURE and not found:
        raise ValueError("env.mixture is empty; give at least one task with its weight: {gsm8k: 0.5, ifeval: 0.5}")
    return found


def check_mixture(settings: Sections) -> None:
    """Refuses a senseless curriculum or mixture, and settings that each of its tasks has its own of."""
    read_bounds(settings.env.curriculum)
    if not (found := entries(settings)):
        return
    for name in OF_DATA:
        if settings.env[name] != declared(Env)[name].default:
            given, own = f"env.{name}={plain(settings.env[name])}", f"env.mixture.{next(iter(found))}.{name}"
            raise ValueError(f"{given} is of no task of the mixture; give it to the one that it is of: {own}")
    if settings.mode == "sft":
        raise ValueError("env.mixture: mode=sft imitates the responses of one task; set env.dataset to it")
    if settings.loss.advantage == "multi_reward":
        raise ValueError("loss.advantage=multi_reward compares each part of the reward, and tasks have different ones")
    for i, task in enumerate(settings.evaluate.tasks):
        if (name := short_name(str(task["task"]))) in found:
            raise ValueError(f"evaluate.tasks[{i}]: {name} is a task of the mixture, and so evaluated; leave it out")


class EvalTask(Section):
    """An entry of ``evaluate.tasks``."""

    task: str = setting(REQUIRED, "the task")
    rows: int = setting(REQUIRED, "the number of its held-out rows", ge=2)
    samples: int = setting(0, "extra sampled responses to each row", ge=0)
    path: str | None = setting(None, "its held-out data")
    env: Mapping[str, Any] = setting({}, "its own settings that differ from the defaults")


def read_tasks(tasks: Sequence[Mapping[str, Any]]) -> list[EvalTask]:
    """The entries, each of a known task and another name; their own settings are not checked."""
    found = [read_section(EvalTask, task, f"evaluate.tasks[{i}]") for i, task in enumerate(tasks)]
    check_names([task.task for task in found], "evaluate.tasks")
    for i, task in enumerate(found):
        if task.task == "agent":
            raise ValueError(f"evaluate.tasks[{i}] is agent, which is evaluated where it is trained; name its scorer")
        if taken := [name for name in OF_TRAINING if name in task.env]:
            raise ValueError(f"evaluate.tasks[{i}].env.{taken[0]} has no effect here; use task, path, rows and samples")
    return found


def check_agent(settings: Sections) -> None:
    """Refuses settings of ``env.dataset=agent`` that contradict each other, and those that agents' sessions lack."""
    if settings.env.dataset != "agent":
        return
    own = settings.env.task
    if bool(own["command"]) == bool(own["agent"]):
        raise ValueError(f"env.command={own['command']} and env.agent={own['agent']}; set one of them")
    scorer = own["scorer"]
    names = [name for name in TASKS if name not in ("agent", MIXTURE, *EPISODES)]
    if scorer is not None and not is_name(scorer) and scorer not in names:
        raise ValueError(f"env.scorer={scorer}; it must be {' | '.join(names)} | package.module:Class, or null")
    if scorer is None and not settings.env.path:
        raise ValueError("env.dataset=agent has no rows of its own; set env.path, or env.scorer, whose rows are taken")
    if settings.env.transforms:
        raise ValueError("env.transforms are for environments; an agent's sessions have their own; leave it out")
    if settings.env.curriculum:
        raise ValueError("env.curriculum counts the rewards of responses, not of an agent's sessions; leave it out")
