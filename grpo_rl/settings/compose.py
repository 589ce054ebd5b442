"""Composes a config with Hydra from the project's files and a command line's overrides."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

import grpo_rl.config
from grpo_rl.by_name import is_name
from grpo_rl.settings.command_line import option
from grpo_rl.settings.composing_errors import OF_COMPOSING, OWN, explained
from grpo_rl.settings.declaration import declared, plain, select
from grpo_rl.settings.schema import Settings, check_keys
from grpo_rl.settings.sections import Env, declarations
from grpo_rl.settings.tasks import MIXTURE, TASKS

FOLDER = Path(grpo_rl.config.__path__[0]).resolve()
DEFAULT_CONFIG = "grpo_gsm8k"
OF_A_LOSS = ("policy.kl_coef", "policy.entropy_coef")
"""Keys beside those of ``loss`` that a replay can change."""
GROUPS = ("env", "loss", "experiment")
"""Config groups: chosen by name (``loss=grpo``), not keys of their own."""


def check_overrides(arguments: Sequence[str], dataset: str | None = None) -> None:
    """Checks the command line's overrides by name, since Hydra's own message suggests no nearest key.

    Without a dataset a key of ``env`` passes: :class:`Settings` checks it against the task that the config names.

    Raises:
        ValueError: an unknown key.
    """
    names = []
    for word in arguments:
        if "=" not in word or word.startswith("-"):
            continue
        try:
            override = OverridesParser.create().parse_overrides([word])[0]
        except HydraException:
            continue  # Hydra explains these itself
        name = override.key_or_group
        of_group = "/" in name or name in GROUPS  # such as hydra/launcher
        if not of_group and name.split(".")[0] != "hydra" and not override.is_delete():
            names.append(name)
    check_keys([name for name in names if dataset or not name.startswith("env.")], dataset)


def dataset_of(arguments: Sequence[str], config_name: str) -> str | None:
    """The task that a command line chooses, by its overrides or its config; None if they don't determine it.

    >>> dataset_of(["env=ifeval", "optimizer.lr=1"], "grpo_gsm8k"), dataset_of([], "grpo_gsm8k")
    ('ifeval', 'gsm8k')
    >>> dataset_of(["env=ifeval,gsm8k"], "grpo_gsm8k"), dataset_of(["--config-name", "mine"], "grpo_gsm8k")
    (None, None)
    >>> dataset_of(["--config-name=grpo_math"], "grpo_gsm8k"), dataset_of(["+experiment=mine"], "grpo_gsm8k")
    ('math', None)
    """
    named = [word.removeprefix("env.dataset=") for word in arguments if word.startswith("env.dataset=")]
    if named:  # over what a config or an experiment says
        return named[-1] if named[-1] in TASKS or is_name(named[-1]) else None
    name = (option(arguments, "--config-name") or config_name).removeprefix("grpo_")
    if any(word.lstrip("+").startswith("experiment=") for word in arguments):
        return None  # an experiment may choose a task
    for word in arguments:
        if word.startswith("env="):
            name = word.removeprefix("env=")
    return name if name in TASKS or is_name(name) else None


def folders(arguments: Sequence[str]) -> list[Path]:
    """The folders in which a command line's configs are looked for: the project's, and that of ``--config-dir``.

    Raises:
        ValueError: there is no such folder.
    """
    own = option(arguments, "--config-dir")
    if own and not Path(own).is_dir():
        raise ValueError(f"--config-dir {own}: there is no such folder; give one that holds YAML files of your own")
    return [FOLDER, *([Path(own)] if own else [])]


def choosing_configs(arguments: Sequence[str]) -> list[str]:
    """The arguments with a task named by its config, which brings its keys; those of the user's own need none there.

    Raises:
        ValueError: a name with a colon is no ``package.module:Class``, or ``own`` is given where a class is wanted.

    >>> choosing_configs(["env.dataset=math", "optimizer.lr=1"])
    ['env=math', 'optimizer.lr=1']
    >>> choosing_configs(["env.task=grpo_rl.envs.gsm8k:GSM8K", "env.correctness=1"])
    ['env=own', 'env.dataset=grpo_rl.envs.gsm8k:GSM8K', '++env.correctness=1']
    >>> choosing_configs(["env.mixture={gsm8k: 1, math: 2}"])
    ['env=mixture', '++env.mixture={gsm8k: 1, math: 2}']
    >>> choosing_configs(["--help", "env.reward"])
    ['--help', 'env.reward']
    """
    words = []
    keys = {word.lstrip("+").partition("=")[0] for word in arguments if "=" in word}
    chosen = keys & {"env", "env.dataset", "env.task"} or option(arguments, "--config-name")
    if not chosen and any(key.split(".")[:2] == ["env", MIXTURE] for key in keys):
        words.append(f"env={MIXTURE}")
    for word in arguments:
        key, _, value = word.lstrip("+").partition("=")
        if key not in ("env.dataset", "env.task"):
            words.append(word)
        elif OWN in value.split(","):
            raise ValueError(f"{word} names no task; say which class of your own it is: env.task=module:Class")
        elif all(map(is_name, value.split(","))):
            words += [f"env={OWN}", f"env.dataset={value}"]
        elif key == "env.task" or ":" in value:
            raise ValueError(
                f"{word} is no package.module:Class, names joined by dots without .py or folders; the project's own "
                "tasks are env.dataset=NAME"
            )
        else:
            words.append(f"env={value}")
    return [f"++{word.lstrip('+')}" if _of_a_task(word.lstrip("+")) else word for word in words]


def _of_a_task(word: str) -> bool:
    """Tells whether an override may be of a key that no file of ``config/`` has; where it is of none, we tell it."""
    section, _, key = word.partition("=")[0].partition(".")
    if "=" not in word:  # `--help env.reward`
        return False
    return (
        section == "env"
        and bool(key)
        and (key.split(".")[0] not in declared(Env) or key.startswith(("columns", "curriculum")))
    )


def compose_config(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """The config that a script would get from these arguments; not checked beyond the names of its keys.

    Raises:
        ValueError: an unknown key or config, or an override or a file that can't be read.

    >>> compose_config("grpo_gsm8k", ["env.dataset=countdown", "env.repeats=16"]).env.repeats
    16
    """
    words = choosing_configs(overrides)
    check_overrides(words, dataset_of(words, config_name))
    # A script that Hydra runs has a loader already, of the same folder, and must keep it.
    running = GlobalHydra.instance().is_initialized()
    try:
        with nullcontext() if running else initialize_config_dir(str(FOLDER), version_base="1.3"):
            return compose(config_name, overrides=words)
    except OF_COMPOSING as error:
        raise ValueError(explained(error, [FOLDER])) from error


def check_in_its_modes(cfg: DictConfig, likely: str = "sync") -> None:
    """Refuses a config that is wrong in the mode it names; one that names none, where no mode makes it right.

    Raises:
        ValueError: as :meth:`Settings.read`, in the mode that is named or ``likely``.
    """
    wrong = []
    for mode in [cfg.mode] if cfg.mode else sorted(("sync", "async"), key=likely.__ne__):
        tried = cfg.copy()
        tried.mode = mode
        try:
            Settings.read(tried)
        except ValueError as error:
            wrong.append(error)
        else:
            return
    raise wrong[0]


def loss_config(overrides: Sequence[str]) -> DictConfig:
    """The default config with these overrides of the loss.

    Raises:
        ValueError: an override that has no part in a loss or can't be read, an unknown preset or a wrong value.
    """
    keys = [word.lstrip("+").partition("=")[0] for word in overrides]
    if others := [key for key in keys if key != "loss" and not key.startswith("loss.") and key not in OF_A_LOSS]:
        raise ValueError(
            f"{others[0]} has no part in the loss of responses that are there already; a replay takes loss=NAME, "
            f"loss.KEY=VALUE, {' and '.join(OF_A_LOSS)}"
        )
    chosen = compose_config(DEFAULT_CONFIG, overrides)
    for key, setting in declarations(None).items():
        if key.startswith("loss.") or key in OF_A_LOSS:
            value = OmegaConf.select(chosen, key)
            if line := setting.wrong_type(key, value) or setting.wrong_value(key, value):
                raise ValueError(line)
    return chosen


def with_loss(settings: Settings, overrides: Sequence[str], chosen: DictConfig | None = None) -> Settings:
    """A run's settings with another loss.

    Args:
        chosen: what :func:`loss_config` made of the overrides, where that has been called.

    Raises:
        ValueError: an override that has no part in a loss or can't be read, an unknown preset, or settings that don't
            go together.
    """
    chosen = loss_config(overrides) if chosen is None else chosen
    keys = [word.lstrip("+").partition("=")[0] for word in overrides]
    changed = OmegaConf.create({name: plain(settings[name]) for name in ("loss", "policy")})
    for key in sorted(keys, key=len):  # a preset first, and single settings over it
        OmegaConf.update(changed, key, OmegaConf.select(chosen, key), merge=False)
    # The loss alone, in a config in which all else is in order: the run's own may ask for what this machine lacks.
    checked = compose_config(DEFAULT_CONFIG, [])
    for key in ("loss", *OF_A_LOSS):
        OmegaConf.update(checked, key, OmegaConf.select(changed, key), merge=False)
    loss = Settings.read(checked)
    return settings.with_values({key: select(loss, key) for key in ("loss", *OF_A_LOSS)})
