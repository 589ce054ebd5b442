"""The settings of a run: read from a config, checked, and written as text and JSON."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import grpo_rl.config
from grpo_rl.losses.factors import Loss, loss_section
from grpo_rl.section import REQUIRED, Section, Setting, declared, plain, read_section, select, wrong_values
from grpo_rl.settings.derived import indivisible_batches
from grpo_rl.settings.devices import default_dtype
from grpo_rl.settings.mixture import check_agent, check_mixture
from grpo_rl.settings.relations import check_relations
from grpo_rl.settings.sections import Sections, declarations
from grpo_rl.settings.tasks import TASKS, Env, check_names, task_section
from grpo_rl.storage.masking import masked
from grpo_rl.storage.yaml_text import flat, read_yaml

SAME: Mapping[str, str] = {
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.clip_grad_norm",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "num_generations": "env.repeats",
    "max_completion_length": "sampling.max_new_tokens",
    "num_iterations": "train.epochs",
    "importance_sampling_level": "loss.ratio",
    "beta": "policy.kl_coef",
    "entropy_coef": "policy.entropy_coef",
    "epsilon": "loss.clip_low",
    "delta": "loss.dual_clip",
    "sapo_temperature_pos": "loss.tau_pos",
    "sapo_temperature_neg": "loss.tau_neg",
    "top_entropy_quantile": "loss.top_entropy_fraction",
    "mask_truncated_completions": "loss.mask_truncated",
    "off_policy_mask_threshold": "loss.off_policy_bound",
    "gradient_checkpointing": "train_model.gradient_checkpointing",
    "min_p": "sampling.min_p",
    "vllm_gpu_memory_utilization": "inference_model.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "inference_model.tensor_parallel_size",
    "vllm_enable_sleep_mode": "inference_model.sleep",
    "max_tool_calling_iterations": "env.max_turns",
    "log_completions": "logger.completions",
    "ddp_timeout": "train_model.timeout_s",
    "seed": "train.seed",
    "model_name_or_path": "model.name",
    "chat_template": "model.chat_template",
    "chat_template_kwargs": "model.chat_template_kwargs",
    "system_prompt": "env.system_prompt",
    "project": "logger.project",
    "run_name": "logger.name",
    "output_dir": "hydra.run.dir",
}
"""TRL's fields whose value is taken over as it is, with our names."""


ABSENT = object()
UNSET = "???"
"""OmegaConf's marker of a value that must be given."""


class Settings(Sections):
    """All settings of a run, checked; each section has its keys as attributes, and is a mapping of them."""

    @classmethod
    def read(cls, cfg: DictConfig | Mapping[str, Any], divides: bool = True) -> Settings:
        """Reads and checks a config; ``divides``: refuse batch sizes that do not divide evenly.

        Raises:
            ValueError: a key, a type or a value is wrong, or several contradict each other; with the remedy.
        """
        try:
            values: Any = OmegaConf.to_container(cfg, resolve=True) if isinstance(cfg, DictConfig) else cfg
        except OmegaConfBaseException as error:
            raise ValueError(f"the config can't be read: {' '.join(str(error).split())}") from error
        settings = cls.restored(values)
        if settings.train_model.dtype is None:
            settings = settings.with_values({"train_model.dtype": default_dtype(settings.ray.address)})
        if (steps := settings.train.steps) and settings.mode != "sft":
            responses = steps * settings.env.num_envs * settings.env.repeats
            settings = settings.with_values({"train.total_dialog_turns": responses})
        check_relations(settings)
        check_mixture(settings)
        check_agent(settings)
        for error in indivisible_batches(settings) if divides and settings.mode != "sft" else ():
            raise error
        return settings

    @classmethod
    def restored(cls, values: Mapping[str, Any]) -> Settings:
        """The settings that a stored run had, whether or not this machine could run them.

        Raises:
            ValueError: a key, a type or a value is wrong, as of a run of another version.
        """
        dataset = select(values, "env.dataset")
        check_names([str(dataset or "null")], "env.dataset", TASKS)
        own = task_section(dataset)
        if dataset not in TASKS:
            values = _with_defaults(values, "env", declared(own))
        # The loss comes last: its functions are in files that import torch, which takes seconds.
        known = declarations(dataset, Loss)
        others = {key: known[key] for key in known if not key.startswith("loss.")}
        check_keys([key for key in flat(values) if not key.startswith("loss.")], dataset)
        if values.get("mode") == "sft" and select(values, "env.reward") == UNSET:
            values = {**values, "env": {**values["env"], "reward": None}}  # nothing is scored
        _check_given(values, others)
        names = {key.partition(".")[0] for key in declared(own)}
        task = {name: value for name, value in values["env"].items() if name in names}
        env = {name: value for name, value in values["env"].items() if name not in task}
        whole = {**values, "env": env | {"task": task}, "loss": Loss()}
        if lines := [*wrong_values(own, task, "env."), *wrong_values(cls, whole)]:
            raise ValueError("\n".join(lines))
        loss = loss_section(values.get("loss"))
        added = declared(loss).keys() - declared(loss_section()).keys()
        values = _with_defaults(values, "loss", {name: declared(loss)[name] for name in sorted(added)})
        check_keys(flat(values), dataset, loss)
        _check_given(values, declared(loss, "loss."))
        return cls.model_validate({**whole, "loss": read_section(loss, values["loss"], "loss")})

    def with_values(self, changes: Mapping[str, Any]) -> Settings:
        """The settings with other values at some dotted names; not checked.

        >>> from grpo_rl.settings.compose import compose_config
        >>> Settings.read(compose_config("grpo_gsm8k", [])).with_values({"env.repeats": 4}).env.repeats
        4
        """
        changed = self
        for key, value in changes.items():
            changed = _with_value(changed, key.split("."), value)
        return changed

    def stored(self) -> dict[str, Any]:
        """The settings as a run stores them, of JSON's types: without secrets.

        Masked texts are distinguished, as a run must not go on with others; those of loggers may differ.
        """
        return json.loads(self.as_json())

    def as_json(self) -> str:
        """The same as JSON, as checkpoints have it."""
        return json.dumps(self._without_secrets(), sort_keys=True)

    def as_text(self) -> str:
        """The settings as YAML, for people and for comparing runs: without secrets, and distinguished likewise."""
        return yaml.safe_dump(self._without_secrets(), sort_keys=False, allow_unicode=True)

    def _without_secrets(self) -> dict[str, Any]:
        return {name: masked(value, name, told_apart=name != "logger") for name, value in plain(self).items()}


def _with_defaults(values: Mapping[str, Any], section: str, own: Mapping[str, Setting]) -> Mapping[str, Any]:
    """The values, with the defaults of settings of the user's own, which no file of config/ has."""
    defaults = {name: UNSET if each.default is REQUIRED else each.default for name, each in own.items()}
    given = values.get(section)
    return {**values, section: defaults | {**given}} if isinstance(given, Mapping) else values


def _check_given(values: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuses values that lack known settings, or do not set those that must be."""
    if missing := sorted(key for key in known if select(values, key, ABSENT) is ABSENT):
        base = "`defaults: [grpo_gsm8k, _self_]`, a loss on `[grpo, _self_]`"
        raise ValueError(f"the config lacks {', '.join(missing)}; build it on another: {base}")
    if unset := sorted(key for key in known if select(values, key) == UNSET):
        raise ValueError(f"{', '.join(unset)} must be set: {values['env']['dataset']} can't do without")


def _with_value(section: Any, names: list[str], value: Any) -> Any:
    name, *rest = names
    inner = _with_value(section[name], rest, value) if rest else value
    if isinstance(section, Env) and name in section.task:
        return section.model_copy(update={"task": {**section.task, name: inner}})
    assert name in section or not isinstance(section, Section), f"there is no setting {name}"
    return section.model_copy(update={name: inner}) if isinstance(section, Section) else {**section, name: inner}


def check_keys(names: Iterable[str], dataset: str | None = None, loss: type[Loss] | None = None) -> None:
    """Refuses keys that nothing reads; without a dataset those of any task will do, see also :func:`declarations`.

    >>> check_keys(["optimizer.lrr"])
    Traceback (most recent call last):
    ...
    ValueError: unknown config key optimizer.lrr; did you mean optimizer.lr?
    """
    known = declarations(dataset, loss or Loss)
    if not loss:  # the names of its settings, without the functions that have them
        of_loss = read_yaml(Path(grpo_rl.config.__path__[0], "loss", "grpo.yaml").read_text())
        known |= {f"loss.{name}": Setting(value, "") for name, value in of_loss.items()}
    sections = {key.rsplit(".", i)[0] for key in known for i in range(1, key.count(".") + 1)}
    free = tuple(f"{key}." for key, setting in known.items() if setting.free)
    unknown = [name for name in names if name not in known and name not in sections and not name.startswith(free)]
    if unknown:
        raise ValueError("\n".join(f"unknown config key {name}{_nearest(name, known)}" for name in unknown))


def _nearest(name: str, known: Iterable[str]) -> str:
    # The right name in the wrong section is the likeliest slip of all, and then another trainer's name.
    leaf = name.rsplit(".", 1)[-1]
    same_leaf = sorted(key for key in known if key.rsplit(".", 1)[-1] == leaf)
    elsewhere = [SAME[leaf]] if SAME.get(leaf) in known else []
    best = same_leaf or elsewhere or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(best)}?" if best else "; `--cfg job` prints every key"
