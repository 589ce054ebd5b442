"""Composes configs with Hydra: a run's, from the project's files and overrides, and that of one task among several."""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import grpo_rl.config
from grpo_rl.by_name import is_name
from grpo_rl.losses.factors import loss_section
from grpo_rl.section import declared, plain, read_section, select, unknown
from grpo_rl.settings.mixture import SHARED, entries, read_tasks
from grpo_rl.settings.schema import Settings, check_keys
from grpo_rl.settings.sections import Policy
from grpo_rl.settings.tasks import ALIASES, MIXTURE, TASKS, Env
from grpo_rl.storage.masking import masked_override, masked_text

MODES = {"--async": "grpo_async", "--sft": "sft"}
"""The script in sota/ of each option of `grpo-rl train`, and the function in it; without one it is ``grpo``."""
typed: list[str] = []
"""The command line of this process's run as typed; of a job of a sweep, its own; empty outside of one."""


def program(mode: str) -> list[str]:
    """The words before the overrides of this command line: a script's, or those of `grpo-rl`."""
    name = Path(sys.argv[0]).name
    if name in ("grpo-rl", "cli.py"):  # installed, and as `python -m grpo_rl.cli`
        return ["grpo-rl", "train", *([] if mode == "sync" else [f"--{mode}"])]
    return ["python", sys.argv[0]] if name.endswith(".py") else [name]


def overrides() -> list[str]:
    """The overrides of this process's run, as typed; without Hydra's own, such as the run's folder."""
    _, words = divided([word for word in typed[2 if typed[:1] == ["python"] else 1 :] if word not in MODES])
    return [word for word in words if not word.startswith("hydra")]


def divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options with their values, and the overrides.

    >>> divided(["loss=dapo", "--config-dir", "lr=1/conf", "-m", "~logger"])
    (['--config-dir', 'lr=1/conf', '-m'], ['loss=dapo', '~logger'])
    """
    overrides = [word for word in hydra_options(arguments).overrides if "=" in word or word.startswith("~")]
    options = list(arguments)
    for word in overrides:
        options.remove(word)
    return options, overrides


def arranged(arguments: Sequence[str]) -> list[str]:
    """The arguments with options first: Hydra takes overrides from one place only.

    >>> arranged(["loss=dapo", "--multirun", "optimizer.lr=1e-6,1e-5", "--config-name", "mine"])
    ['--multirun', '--config-name', 'mine', 'loss=dapo', 'optimizer.lr=1e-6,1e-5']
    """
    options, overrides = divided(arguments)
    return options + overrides


def hydra_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The words as Hydra's own parser reads them: ``config_name``, ``config_dir``, ``overrides`` and so on."""
    return get_args_parser().parse_known_intermixed_args(list(arguments))[0]


FOLDER = Path(grpo_rl.config.__path__[0]).resolve()
DEFAULT_CONFIG = "grpo_gsm8k"
OF_A_LOSS = ("policy.kl_coef", "policy.entropy_coef")
"""Other keys than those of ``loss`` that a replay can change."""
GROUPS = ("env", "loss", "experiment")
"""Config groups: chosen by name (``loss=grpo``), not keys of their own."""
KINDS = {"": "config", "env": "task", "experiment": "recipe"}
"""The word for a member of each config group, where it is not the group's name; ``""``: files of the folder itself."""
OWN = "own"
"""The config of ``env`` behind ``env.task=module:Class``."""
OF_COMPOSING = (HydraException, OmegaConfBaseException, yaml.YAMLError)
"""The errors of the libraries that read and compose configs."""


def dataset_of(arguments: Sequence[str], config_name: str) -> str | None:
    """The task that a command line names, for its help; None if it names none.

    >>> dataset_of(["env=ifeval", "optimizer.lr=1"], "grpo_gsm8k"), dataset_of(["--config-name=mine"], "grpo_gsm8k")
    ('ifeval', None)
    """
    names = [word.partition("=")[2] for word in arguments if word.startswith(("env=", "env.dataset="))]
    default = hydra_options(arguments).config_name or config_name
    name = names[-1] if names else default.removeprefix("grpo_")
    return name if name in TASKS or is_name(name) else None


def choosing_configs(arguments: Sequence[str]) -> list[str]:
    """The arguments with a task named by its config, which brings its keys; those of the user's own need none there.

    >>> choosing_configs(["env.dataset=math", "optimizer.lr=1"])
    ['env=math', 'optimizer.lr=1']
    >>> choosing_configs(["env.task=grpo_rl.envs.gsm8k:GSM8K", "env.correctness=1"])
    ['env=own', 'env.dataset=grpo_rl.envs.gsm8k:GSM8K', '++env.correctness=1']
    >>> choosing_configs(["env.mixture={gsm8k: 1, math: 2}"])
    ['env=mixture', '++env.mixture={gsm8k: 1, math: 2}']
    >>> choosing_configs(["model.chat_template_kwargs={enable_thinking: false}"])
    ['++model.chat_template_kwargs={enable_thinking: false}']
    """
    words = []
    keys = {word.lstrip("+").partition("=")[0] for word in arguments if "=" in word}
    chosen = keys & {"env", "env.dataset", "env.task"} or hydra_options(arguments).config_name
    if not chosen and any(key.split(".")[:2] == ["env", MIXTURE] for key in keys):
        words.append(f"env={MIXTURE}")
    for word in arguments:
        key, equals, value = word.lstrip("+").partition("=")
        if key in ("env.dataset", "env.task"):
            words += [f"env={OWN}", f"env.dataset={value}"] if ":" in value else [f"env={value}"]
        elif equals and (
            key.startswith(("loss.", "model.chat_template_kwargs"))
            or (key.startswith("env.") and _is_of_a_task(key[4:]))
        ):
            words.append(f"++{word.lstrip('+')}")
        else:
            words.append(word)
    return words


def _is_of_a_task(key: str) -> bool:
    """True if no file of ``config/`` may have this key of ``env``; one that nothing has is refused by `Settings`."""
    return key.split(".")[0] not in declared(Env) or key.startswith(("columns", "curriculum"))


def explained(error: Exception, folders: Iterable[Path] = (FOLDER,)) -> str:
    """An error of :data:`OF_COMPOSING` as one line without secrets: the library's own, or the nearest name.

    Args:
        folders: the folders with configs, whose names are offered for an unknown ``--config-name``.
    """
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        known = error.options or sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
        return unknown(KINDS.get(group, group), name, [member for member in known if member != OWN])
    if isinstance(error, OverrideParseException) and (hidden := masked_override(error.override)) != error.override:
        return f"{hidden} is no override of Hydra's; put its value into quotes"  # Hydra quotes a part of the value
    if (key := re.match(r"Could not override '([\w.]+)'", str(error))) and key[1] not in GROUPS:
        try:
            check_keys([key[1]])
        except ValueError as nearest:
            return str(nearest)
    texts = [getattr(error, "override", None), error, error.__cause__]
    texts = [str(text).partition("full_key:")[0] for text in texts if text]
    return masked_text(": ".join(dict.fromkeys(" ".join(text.split()) for text in texts)))


def parsed_override(word: str) -> Override:
    """An override as Hydra reads it.

    Raises:
        ValueError: it can't be read.
    """
    try:
        return OverridesParser.create().parse_overrides([word])[0]
    except HydraException as error:
        raise ValueError(explained(error)) from error


def compose_config(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """The config that a script would get from these arguments, not checked.

    Raises:
        ValueError: an unknown key or config, or an override or a file that can't be read.

    >>> compose_config("grpo_gsm8k", ["env.dataset=countdown", "env.repeats=16"]).env.repeats
    16
    """
    words = choosing_configs(overrides)
    # A script that Hydra runs has a loader already, of the same folder, and must keep it.
    running = GlobalHydra.instance().is_initialized()
    try:
        with nullcontext() if running else initialize_config_dir(str(FOLDER), version_base="1.3"):
            return compose(config_name, overrides=words)
    except OF_COMPOSING as error:
        raise ValueError(explained(error)) from error


def with_loss(settings: Settings, overrides: Sequence[str]) -> Settings:
    """A run's settings with another loss, checked with it; for errors see also :func:`loss_config`."""
    chosen, changed = loss_config(overrides), compose_config(DEFAULT_CONFIG, [])
    # The loss alone, in a config in which all else is in order: the run's own may need what this machine lacks.
    for key in ("loss", *OF_A_LOSS):
        OmegaConf.update(changed, key, plain(select(settings, key)), merge=False)
    for key in sorted((_key(word) for word in overrides), key=len):  # a preset first, and single settings over it
        OmegaConf.update(changed, key, OmegaConf.select(chosen, key), merge=False, force_add=True)
    if changed.loss.surrogate == "none":  # its log-probs are stored, and its name does not matter here
        changed.ref_model.name = "stored"
    loss = Settings.read(changed)
    return settings.with_values({key: select(loss, key) for key in ("loss", *OF_A_LOSS)})


def loss_config(overrides: Sequence[str]) -> DictConfig:
    """The default config with these overrides of the loss; others, and wrong values, are refused."""
    for key in (_key(word) for word in overrides):
        if key.partition(".")[0] != "loss" and key not in OF_A_LOSS:
            raise ValueError(f"{key} has no part in the loss; give loss=NAME, loss.KEY=VALUE, {', '.join(OF_A_LOSS)}")
    chosen = compose_config(DEFAULT_CONFIG, overrides)
    values: Any = OmegaConf.to_container(chosen, resolve=True)
    read_section(loss_section(values["loss"]), values["loss"], "loss")
    read_section(Policy, values["policy"], "policy")
    return chosen


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


OF_RUN = ("sampling", "inference_model", "model", "train.seed", "mode", "evaluate.rows")
"""Settings that all tasks of a run share."""


@contextmanager
def named(where: str) -> Iterator[None]:
    """Puts the place of a task's settings before what is wrong with them."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def settings_for_task(
    dataset: str, values: Mapping[str, Any], env: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Settings:
    """A task's settings as a run of it alone would have them.

    Args:
        values: replace those of the default config, by dotted name.
        env: the task's own settings, merged into its defaults.
        overrides: as on a command line.
    """
    cfg = compose_config(DEFAULT_CONFIG, [f"env.dataset={ALIASES.get(dataset, dataset)}", *overrides])
    for key, value in values.items():
        OmegaConf.update(cfg, key, plain(value), merge=False)
    try:
        OmegaConf.update(cfg, "env", plain(env or {}), merge=True, force_add=True)
    except OF_COMPOSING as error:  # of another type than the default
        raise ValueError(explained(error)) from error
    return Settings.read(cfg, divides=False)


def settings_of_mixture(settings: Settings) -> dict[str, Settings]:
    """The settings of each task of ``env.mixture``: its own, and the mixture's where it gives none."""
    found = {}
    for name, entry in entries(settings).items():
        own = {key: value for key, value in entry.env.items() if key not in SHARED}
        # Those of an entry are its own, whole: merged, it would have the mixture's rewards, too.
        shared = {f"env.{key}": entry.env.get(key, settings.env[key]) for key in SHARED}
        with named(f"env.mixture.{name}"):
            found[name] = settings_for_task(entry.task, _of_run(settings) | shared, own)
    return found


def settings_of_eval_tasks(settings: Settings) -> list[Settings]:
    """The settings of each task of ``evaluate.tasks``: its own, with the run's sampling, context and engine."""
    found = []
    for i, task in enumerate(read_tasks(settings.evaluate.tasks)):
        values = _of_run(settings) | {"env.eval_path": task.path}
        if is_name(task.task):
            values["env.path"] = task.path  # no rows of its own are known, and none are trained on
        with named(f"evaluate.tasks[{i}]"):
            found.append(settings_for_task(task.task, values, task.env))
    return found


def _of_run(settings: Settings) -> dict[str, Any]:
    return {key: select(settings, key) for key in OF_RUN}
