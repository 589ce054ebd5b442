"""Hydra configs of the project, and the checks that refuse a wrong one before anything expensive starts."""

from __future__ import annotations

import difflib
import errno
import functools
import gc
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import get_args

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from grpo_rl.build.parts import ENVS, group_sizes, make_lora, make_loss, micro_batching
from grpo_rl.data.advantages import Kind as Advantage
from grpo_rl.data.advantages import check_advantage
from grpo_rl.engines.base import Sampling
from grpo_rl.envs.rewards.registry import read_parts
from grpo_rl.losses.aggregate import Aggregation, check_aggregation
from grpo_rl.losses.correction import Correction, Level
from grpo_rl.losses.kl import KL
from grpo_rl.losses.surrogate import Ratio, Surrogate
from grpo_rl.planner.batches import misfits
from grpo_rl.policies.allocator import give_back
from grpo_rl.policies.lora import LoRA, check_quantization
from grpo_rl.run.folder import RunIsOver
from grpo_rl.settings.kinds import check_kinds, plain
from grpo_rl.training.optimizer import check_optimizer
from grpo_rl.training.schedules import AdaptiveKL, RefreshRule

FOLDER = (Path(__file__).resolve().parents[1] / "config").resolve()
GROUPS = ("env", "loss", "experiment")
"""Config groups: chosen by name (``loss=grpo``), not keys of their own."""
ONLY_ASYNC = (
    "train.max_staleness",
    "inference_model.max_restarts",
    "inference_model.start_s",
    "inference_model.deadline_s",
    "inference_model.transfer",
    "inference_model.push_changes",
    "inference_model.keep_cache",
    "ray.address",
    "ray.nodes",
)
"""Keys that nothing reads in mode=sync."""
FREE = ("env.rewards.", "env.reward.", "loss.reward_weights.")
"""Beginnings of keys that are of a task's own, which refuses others; ``env.reward`` only where it may be a mapping."""


@functools.cache
def default_values(dataset: str | None = None) -> dict[str, object]:
    """Every public key, dotted, with its default: of the shared config, the default loss and the task's config.

    Args:
        dataset: the task; None: all tasks together.
    """
    base = OmegaConf.load(FOLDER / "grpo.yaml")
    parts = [OmegaConf.create({k: v for k, v in base.items() if k not in ("defaults", "hydra")})]
    parts.append(OmegaConf.create({"loss": OmegaConf.load(FOLDER / "loss" / "grpo.yaml")}))
    for name in [dataset] if dataset else ENVS:
        parts.append(OmegaConf.create({"env": OmegaConf.load(FOLDER / "env" / f"{name}.yaml")}))
    found = {key: plain(OmegaConf.select(part, key)) for part in parts for key in leaves(part)}
    return found | {key: "???" for part in parts for key in OmegaConf.missing_keys(part)}


def known_keys(dataset: str | None = None) -> set[str]:
    """Every public key, dotted; see :func:`default_values`."""
    return set(default_values(dataset))


def leaves(node: DictConfig, prefix: str = "") -> list[str]:
    """Dotted names of a config's leaves; lists and empty mappings are leaves.

    >>> leaves(OmegaConf.create({"env": {"repeats": 8, "examples": []}}))
    ['env.repeats', 'env.examples']
    """
    names = []
    for key in node:
        value = node._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none() and len(value):
            names += leaves(value, f"{prefix}{key}.")
        else:
            names.append(f"{prefix}{key}")
    return names


def check_keys(names: Iterable[str], dataset: str | None = None) -> None:
    """Refuses keys that nothing reads.

    Args:
        dataset: the task; None: keys of any task will do.

    Raises:
        ValueError: names each unknown key and the nearest known one.

    >>> check_keys(["optimizer.lrr"])
    Traceback (most recent call last):
    ...
    ValueError: unknown config key optimizer.lrr; did you mean optimizer.lr?
    """
    known = known_keys(dataset)
    sections = {key.rsplit(".", i)[0] for key in known for i in range(1, key.count(".") + 1)}
    free = tuple(prefix for prefix in FREE if prefix[:-1] in known)
    unknown = [name for name in names if name not in known | sections and not name.startswith(free)]
    if unknown:
        raise ValueError("\n".join(f"unknown config key {name}{_nearest(name, known)}" for name in unknown))


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    # The right name in the wrong section is the likeliest slip of all.
    leaf = name.rsplit(".", 1)[-1]
    same_leaf = sorted(key for key in known if key.rsplit(".", 1)[-1] == leaf)
    best = same_leaf or close
    return f"; did you mean {' or '.join(best)}?" if best else "; `--cfg job` prints every key"


def check_overrides(arguments: Sequence[str], dataset: str | None = None) -> None:
    """Checks the command line's overrides by name, since Hydra's own message suggests no nearest key.

    Args:
        dataset: the task; None: keys of any task will do.

    Raises:
        ValueError: an unknown key.
    """
    names = []
    for word in arguments:
        if "=" not in word or word.startswith(("-", "~")):
            continue
        try:
            name = OverridesParser.create().parse_override(word).key_or_group
        except HydraException:
            continue  # Hydra explains these itself
        # A slash, or Hydra's own section, is a group: `hydra/launcher=...`.
        if "/" not in name and name.split(".")[0] != "hydra" and name not in GROUPS:
            names.append(name)
    check_keys(names, dataset)


def _dataset_of(arguments: Sequence[str], config_name: str) -> str | None:
    """The task that a command line chooses, by its overrides or its config; None where it can't be told from them.

    >>> _dataset_of(["env=ifeval", "optimizer.lr=1"], "grpo_gsm8k"), _dataset_of([], "grpo_gsm8k")
    ('ifeval', 'gsm8k')
    >>> _dataset_of(["env=ifeval,gsm8k"], "grpo_gsm8k"), _dataset_of(["--config-name", "mine"], "grpo_gsm8k")
    (None, None)
    >>> _dataset_of(["--config-name=grpo_math"], "grpo_gsm8k"), _dataset_of(["+experiment=mine"], "grpo_gsm8k")
    ('math', None)
    """
    name = config_name.removeprefix("grpo_")
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        option, _, value = word.partition("=")
        if option in ("--config-name", "-cn"):
            name = (value or following).removeprefix("grpo_")
        if option.lstrip("+") == "experiment":
            return None  # it may choose a task
    for word in arguments:
        if word.startswith("env="):
            name = word.removeprefix("env=")
    return name if name in ENVS else None


def _choosing_configs(arguments: Sequence[str]) -> list[str]:
    """The arguments with a task named by its config: it brings its own keys.

    >>> _choosing_configs(["env.dataset=math", "optimizer.lr=1"])
    ['env=math', 'optimizer.lr=1']
    """
    return [re.sub(r"^\+{0,2}env\.dataset=", "env=", word) for word in arguments]


def compose_config(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """The config that a script would get from these arguments; not checked beyond the names of its keys.

    Raises:
        ValueError: an unknown key.
        HydraException: an unknown config, or an override that Hydra can't read.

    >>> compose_config("grpo_gsm8k", ["env.dataset=countdown", "env.repeats=16"]).env.repeats
    16
    """
    words = _choosing_configs(overrides)
    check_overrides(words, _dataset_of(words, config_name))
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        return compose(config_name, overrides=words)


def check(cfg: DictConfig) -> None:
    """Refuses a config that cannot run, by its keys, the types of its values, and its numbers.

    Raises:
        ValueError: what is wrong, with the numbers, and what to change.
    """
    try:
        OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"the config can't be read: {' '.join(str(error).split())}") from error
    _one_of(cfg, "env.dataset", tuple(ENVS))
    check_keys(leaves(cfg), cfg.env.dataset)
    missing = sorted(known_keys(cfg.env.dataset) - set(leaves(cfg)) - {prefix[:-1] for prefix in FREE})
    if missing and all(key.startswith("loss.") for key in missing):
        raise ValueError(f"the loss lacks {', '.join(missing)}; build its file on another: `defaults: [grpo, _self_]`")
    if missing:
        raise ValueError(f"the config lacks {', '.join(missing)}; build it on grpo_gsm8k by `defaults: [grpo_gsm8k]`")
    if unset := sorted(OmegaConf.missing_keys(cfg)):
        raise ValueError(f"{', '.join(unset)} must be set: {cfg.env.dataset} can't do without")
    defaults = default_values(cfg.env.dataset) | dict.fromkeys(
        [key for key in leaves(cfg) if key.startswith("loss.reward_weights.")], 1.0
    )
    check_kinds(cfg, {key: defaults[key] for key in leaves(cfg) if key in defaults})
    read_parts(cfg.env.rewards)
    for key in (
        "env.num_envs",
        "env.repeats",
        "train.total_dialog_turns",
        "train.optim_batch_size",
        "train.micro_batch_tokens",
        "train.epochs",
        "train.max_bad_steps",
        "sampling.max_new_tokens",
    ):
        _at_least(cfg, key, 1)
    for key in (
        "policy.kl_coef",
        "policy.entropy_coef",
        "loss.clip_low",
        "loss.clip_high",
        "loss.tau_pos",
        "loss.tau_neg",
        "loss.correction_low",
        "loss.correction_high",
        "loss.top_entropy_fraction",
        "policy.kl_gain",
        "ref_model.decay",
        "ref_model.refresh_steps",
        "mismatch.first_tokens",
        "optimizer.weight_decay",
        "optimizer.warmup_steps",
        "train.keep_checkpoints",
        "train.max_refills",
        "train.checkpoint_frequency",
        "evaluate.rows",
        "evaluate.frequency",
    ):
        _at_least(cfg, key, 0)
    for key in ("policy.target_kl", "policy.stop_kl", "train.reward_clip", "mismatch.bound"):
        if OmegaConf.select(cfg, key) is not None:
            _at_least(cfg, key, 0)
    if cfg.train.gradient_accumulation_steps is not None:
        _at_least(cfg, "train.gradient_accumulation_steps", 1)
    if cfg.env.repeats < 2:
        raise ValueError(f"env.repeats is {cfg.env.repeats}; a group of one answer has no advantage, use 2 or more")
    if cfg.inference_model.max_model_len <= cfg.sampling.max_new_tokens:
        raise ValueError(
            f"inference_model.max_model_len={cfg.inference_model.max_model_len} leaves no room for a prompt beside "
            f"sampling.max_new_tokens={cfg.sampling.max_new_tokens}"
        )
    if cfg.env.dataset == "search_qa" and cfg.env.eval_path and not cfg.env.corpus:
        raise ValueError("env.eval_path needs env.corpus: those beside env.path do not answer its questions")
    if not 0 <= cfg.optimizer.min_lr_fraction <= 1:
        raise ValueError(f"optimizer.min_lr_fraction is {cfg.optimizer.min_lr_fraction}; it must be between 0 and 1")
    _check_mode(cfg)
    _one_of(cfg, "inference_model.engine", ("vllm", "transformers"))
    _one_of(cfg, "env.long_prompt", ("error", "skip"))
    _one_of(cfg, "train_model.dtype", ("bfloat16", "float32"))
    _check_lora(cfg)
    _check_parallel(cfg)
    _check_loss(cfg)
    _one_of(cfg, "logger.backend", ("none", "wandb"))
    check_optimizer(cfg.optimizer.name, cfg.optimizer.lr, cfg.optimizer.schedule, cfg.optimizer.clip_grad_norm)
    Sampling(**cfg.sampling)
    if not cfg.sampling.temperature:
        raise ValueError("sampling.temperature is 0; greedy answers to one prompt are all equal, use more than 0")
    if cfg.sampling.top_p != 1:
        raise ValueError(
            f"sampling.top_p is {cfg.sampling.top_p}: answers would come from a truncated distribution: no importance "
            "weight brings back the tokens that are cut off, and fresh ratios would start at the mass kept, not at 1. "
            "Use 1; a lower sampling.temperature sharpens answers and stays exact (docs/troubleshooting.md)"
        )
    if cfg.evaluate.rows == 1:
        raise ValueError("evaluate.rows is 1; use 0, or at least 2: one row gives no interval")
    for misfit in misfits(cfg):  # last: `grpo-rl batches` draws a config with which nothing else is wrong
        raise misfit


def _check_lora(cfg: DictConfig) -> None:
    lora = make_lora(cfg)
    check_quantization(cfg.train_model.quantization, lora, cfg.train_model.compile)
    if not lora.rank:
        unused, given = LoRA(seed=lora.seed), cfg.train_model.lora
        if idle := [name for name in given if name != "rank" and getattr(lora, name) != getattr(unused, name)]:
            raise ValueError(f"train_model.lora.{idle[0]}={given[idle[0]]} without adapters; set train_model.lora.rank")
        return
    if lora.push == "adapter" and cfg.inference_model.engine != "vllm":
        raise ValueError(
            f"train_model.lora.push=adapter needs inference_model.engine=vllm, not {cfg.inference_model.engine}, which "
            "takes weights alone; use merged"
        )
    if cfg.policy.kl_coef and (cfg.ref_model.num_devices is not None or cfg.ref_model.devices is not None):
        raise ValueError(
            "with train_model.lora the reference is the policy without its adapters, on the policy's device; leave "
            "ref_model.num_devices and ref_model.devices at null"
        )


def _check_mode(cfg: DictConfig) -> None:
    if cfg.mode is not None:
        _one_of(cfg, "mode", ("sync", "async"))
    if cfg.mode != "async":
        base = OmegaConf.load(FOLDER / "grpo.yaml")
        for key in ONLY_ASYNC:
            if OmegaConf.select(cfg, key) != OmegaConf.select(base, key):
                raise ValueError(f"{key}={OmegaConf.select(cfg, key)} is of mode=async; run sota/grpo_async.py")
        return
    _at_least(cfg, "train.max_staleness", 0)
    _at_least(cfg, "inference_model.max_restarts", 0)
    _at_least(cfg, "inference_model.deadline_s", 1)
    _at_least(cfg, "inference_model.start_s", 1)
    if cfg.inference_model.transfer is not None:
        _one_of(cfg, "inference_model.transfer", ("shared_memory", "nccl"))
    if cfg.inference_model.sleep:
        raise ValueError("inference_model.sleep is of mode=sync; in mode=async engines have devices of their own")
    if cfg.inference_model.push_changes and cfg.inference_model.transfer not in (None, "shared_memory"):
        raise ValueError(
            f"inference_model.push_changes=true with inference_model.transfer={cfg.inference_model.transfer}; changes "
            "travel through shared_memory only"
        )
    if cfg.ray.nodes is not None:
        _at_least(cfg, "ray.nodes", 1)
        if cfg.ray.address is None and cfg.ray.nodes > 1:
            raise ValueError(
                f"ray.nodes={cfg.ray.nodes} needs a cluster; set ray.address (auto where this is part of it)"
            )
    if cfg.inference_model.engine != "vllm":
        raise ValueError(
            f"mode=async samples with inference_model.engine=vllm, not {cfg.inference_model.engine}; use mode=sync"
        )
    if cfg.train.repeats_schedule:
        raise ValueError("train.repeats_schedule is of mode=sync: groups of several steps are in flight in mode=async")


def _check_parallel(cfg: DictConfig) -> None:
    train = cfg.train_model
    _at_least(cfg, "train_model.timeout_s", 1)
    if train.parallel is not None:
        _one_of(cfg, "train_model.parallel", ("fsdp", "ddp"))
        if cfg.ref_model.num_devices is not None or cfg.ref_model.devices is not None:
            raise ValueError(
                f"ref_model.num_devices or ref_model.devices with train_model.parallel={train.parallel}: each trainer "
                "scores the reference on its own device; leave both at null"
            )
    if train.cpu_offload and train.parallel != "fsdp":
        raise ValueError(
            f"train_model.cpu_offload=true with train_model.parallel={train.parallel}; only fsdp fetches weights "
            "from there: set train_model.parallel=fsdp"
        )
    if train.quantization and train.parallel == "fsdp":
        raise ValueError(
            f"train_model.quantization={train.quantization} with train_model.parallel=fsdp: a base in so few bits is "
            "not sharded here; use ddp, where each process holds all of it"
        )
    if train.lora.export == "adapter" and train.parallel == "fsdp":
        raise ValueError(
            "train_model.lora.export=adapter with train_model.parallel=fsdp: sharded adapters are written merged only; "
            "set train_model.lora.export=merged, or use ddp"
        )


def _check_loss(cfg: DictConfig) -> None:
    choices = {
        "surrogate": get_args(Surrogate),
        "ratio": get_args(Ratio),
        "aggregate": get_args(Aggregation),
        "advantage": get_args(Advantage),
        "kl": get_args(KL),
        "kl_in": ("loss", "reward"),
        "correction": get_args(Correction),
        "correction_level": get_args(Level),
    }
    for name, values in choices.items():
        _one_of(cfg, f"loss.{name}", values)
    for name in ("dual_clip", "normalizer", "advantage_clip"):
        if cfg.loss[name] is not None:
            _at_least(cfg, f"loss.{name}", 0)
    if not 0 < cfg.loss.top_entropy_fraction <= 1:
        raise ValueError(
            f"loss.top_entropy_fraction is {cfg.loss.top_entropy_fraction}; it is the share of tokens that the policy "
            "gradient is of, more than 0 and at most 1"
        )
    masks_tokens = cfg.loss.correction == "mask" and cfg.loss.correction_level == "token"
    if cfg.loss.ratio == "sequence" and (masks_tokens or cfg.loss.top_entropy_fraction < 1):
        raise ValueError(
            "loss.ratio=sequence gives all tokens of an answer one gradient, so that loss.top_entropy_fraction and a "
            "loss.correction=mask by token would leave none of them out; use loss.ratio=sequence_token"
        )
    if cfg.loss.normalizer is not None and cfg.loss.aggregate != "constant":
        raise ValueError(
            f"loss.normalizer is {cfg.loss.normalizer}, and loss.aggregate={cfg.loss.aggregate} reads none: use null"
        )
    make_loss(cfg)
    group_sizes(cfg)
    check_aggregation(cfg.loss.aggregate, micro_batching(cfg).normalizer)
    in_reward = cfg.policy.kl_coef if cfg.loss.kl_in == "reward" else 0.0
    check_advantage(cfg.loss.advantage, cfg.loss.advantage_clip, in_reward, cfg.loss.kl, cfg.train.reward_clip)
    _check_reference(cfg)


def _check_reference(cfg: DictConfig) -> None:
    AdaptiveKL(cfg.policy.kl_coef, cfg.policy.target_kl, cfg.policy.kl_gain)
    RefreshRule(cfg.ref_model.refresh, cfg.ref_model.refresh_steps, cfg.ref_model.decay)
    if cfg.policy.stop_kl is not None and not cfg.policy.stop_kl > 0:
        raise ValueError(f"policy.stop_kl is {cfg.policy.stop_kl}; it must be more than 0, or null")
    other = cfg.ref_model.refresh != "never" or cfg.ref_model.name is not None
    if other and not cfg.policy.kl_coef:
        raise ValueError("ref_model.refresh and ref_model.name are of the KL term's reference; set policy.kl_coef")
    if other and cfg.train_model.lora.rank:
        raise ValueError(
            "with train_model.lora the reference is the policy without its adapters; leave ref_model.name at null and "
            "ref_model.refresh at never"
        )


def _at_least(cfg: DictConfig, key: str, least: int) -> None:
    value = OmegaConf.select(cfg, key)
    if not least <= value < float("inf"):
        raise ValueError(f"{key} is {value}; it must be {least} or more")


def _one_of(cfg: DictConfig, key: str, choices: Sequence[str]) -> None:
    value = OmegaConf.select(cfg, key)
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{key} is {value!r}; it can be {', '.join(choices)}{hint}")


def _fixed_folder() -> str | None:
    """The run's folder, where each start of the same command gets the same one; None where its name has the time."""
    hydra_cfg = HydraConfig.instance().cfg
    assert hydra_cfg is not None
    key = "sweep" if HydraConfig.get().mode == RunMode.MULTIRUN else "run"
    as_written = OmegaConf.to_container(hydra_cfg.hydra, resolve=False)[key]["dir"]  # pyright: ignore
    return None if "${now" in as_written else HydraConfig.get().runtime.output_dir


def main(config_name: str, mode: str = "sync") -> Callable:
    """Decorator for a script's main function: Hydra's own, with our checks, and wrong input told in one line.

    The config folder is the project's; ``hydra.searchpath`` adds others.

    Args:
        config_name: unless ``--config-name`` gives another.
        mode: that the script is of; a config may name it, and no other.
    """

    def decorate(function: Callable[[DictConfig], object]) -> Callable[[], None]:
        @functools.wraps(function)
        def run(cfg: DictConfig) -> object:
            transformers_logging.disable_progress_bar()  # the live view is the one to look at
            tqdm.set_lock(threading.RLock())  # its own may stay in /dev/shm when the run is killed
            try:
                if cfg.mode is None:
                    cfg.mode = mode
                if cfg.mode != mode:
                    script = {"sync": "sota/grpo.py", "async": "sota/grpo_async.py"}.get(cfg.mode)
                    raise ValueError(f"this script is of mode={mode}" + (f"; run {script}" if script else ""))
                check(cfg)
                if cfg.resume == "auto" and (folder := _fixed_folder()):
                    cfg.resume = folder
                return function(cfg)
            except RunIsOver:
                return None  # as at its end
            except ValueError as error:
                # A Run turns what goes wrong later into another error, so this is a wrong setting, which needs no
                # traceback. A sweep goes on with its other jobs, which an exit would prevent.
                if HydraConfig.get().mode == RunMode.MULTIRUN:
                    raise
                raise SystemExit(f"error: {error}") from error
            finally:
                gc.collect()  # models sit in reference cycles; the next job of a sweep wants their memory now
                give_back()

        def entry() -> None:
            sys.argv[1:] = _choosing_configs(sys.argv[1:])
            try:
                check_overrides(sys.argv[1:], _dataset_of(sys.argv[1:], config_name))
            except ValueError as error:
                raise SystemExit(f"error: {error}") from None
            # Otherwise Hydra cuts every traceback short, the ones of bugs too.
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")
            try:
                hydra.main(version_base="1.3", config_path=str(FOLDER), config_name=config_name)(run)()
            except HydraException as error:
                raise SystemExit(f"error: {error}") from error
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT):
                    raise
                what = f"can't write to {error.filename or 'the disk'}: {os.strerror(error.errno)}"
                remedy = "free some space or set hydra.run.dir. Checkpoints that were written are whole"
                raise SystemExit(". ".join([f"error: {what}; {remedy}", *getattr(error, "__notes__", [])])) from error

        return entry

    return decorate
