"""What each key of a config takes: values of its default's type, or what the tables below say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from omegaconf import DictConfig, ListConfig, OmegaConf

TRUTH, WHOLE, NUMBER = "true or false", "a whole number", "a number"
TEXT, LIST, MAPPING = "text", "a list", "a mapping"
NUMBERS, WHOLE_NUMBERS = "a list of numbers", "a list of whole numbers"
PAIRS, MAPPINGS = "a list of pairs of whole numbers", "a list of mappings"
NAMES, REWARD = "text or a list of names", "text, a list or a mapping"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(fits(item) for item in value)


FITS: Mapping[str, Callable[[object], bool]] = {
    TRUTH: lambda value: isinstance(value, bool),
    WHOLE: _is_whole,
    NUMBER: _is_number,
    TEXT: lambda value: isinstance(value, str),
    LIST: lambda value: isinstance(value, list),
    MAPPING: lambda value: isinstance(value, dict),
    NUMBERS: _list_of(_is_number),
    WHOLE_NUMBERS: _list_of(_is_whole),
    PAIRS: _list_of(lambda pair: isinstance(pair, list) and len(pair) == 2 and all(map(_is_whole, pair))),
    MAPPINGS: _list_of(lambda item: isinstance(item, dict)),
    NAMES: lambda value: isinstance(value, str) or _list_of(lambda item: isinstance(item, str))(value),
    REWARD: lambda value: isinstance(value, str | list | dict),
}
"""Whether a plain value is of a kind."""

OTHERS = {
    "env.completion_column": TEXT,
    "env.corpus": TEXT,
    "env.eval_path": TEXT,
    "env.examples": MAPPINGS,
    "env.isolated": TRUTH,
    "env.path": TEXT,
    "env.puzzles.sizes": WHOLE_NUMBERS,
    "env.reward": REWARD,
    "env.score_timeout_s": NUMBER,
    "env.system_prompt": TEXT,
    "inference_model.deadline_s": NUMBER,
    "inference_model.devices": WHOLE_NUMBERS,
    "inference_model.num_devices": WHOLE,
    "inference_model.start_s": NUMBER,
    "inference_model.tensor_parallel_size": WHOLE,
    "inference_model.transfer": TEXT,
    "logger.name": TEXT,
    "loss.advantage_clip": NUMBER,
    "loss.dual_clip": NUMBER,
    "loss.normalizer": NUMBER,
    "mode": TEXT,
    "model.chat_template": TEXT,
    "optimizer.betas": NUMBERS,
    "policy.stop_kl": NUMBER,
    "policy.target_kl": NUMBER,
    "ray.address": TEXT,
    "ray.nodes": WHOLE,
    "ref_model.devices": WHOLE_NUMBERS,
    "ref_model.name": TEXT,
    "ref_model.num_devices": WHOLE,
    "resume": TEXT,
    "train.gradient_accumulation_steps": WHOLE,
    "train.repeats_schedule": PAIRS,
    "train.reward_clip": NUMBER,
    "train_model.compile": TRUTH,
    "train_model.devices": WHOLE_NUMBERS,
    "train_model.lora.alpha": NUMBER,
    "train_model.lora.targets": NAMES,
    "train_model.num_devices": WHOLE,
    "train_model.parallel": TEXT,
    "train_model.quantization": TEXT,
    "train_model.timeout_s": NUMBER,
}
"""Kinds of keys whose default is null, or does not say all."""

NULL_TOO = ("env.reward", "env.system_prompt", "mismatch.bound", "train_model.lora.rank")
"""Keys that may be null though their default is not."""


def kind_of(key: str, default: object) -> str:
    """What a key takes, null apart.

    >>> kind_of("optimizer.lr", 1e-5), kind_of("env.repeats", 8), kind_of("optimizer.betas", [0.9, 0.95])
    ('a number', 'a whole number', 'a list of numbers')
    """
    if key in OTHERS:
        return OTHERS[key]
    for kind in (TRUTH, WHOLE, NUMBER, TEXT, LIST, MAPPING):
        if FITS[kind](default):
            return kind
    raise AssertionError(f"the default of {key} is {default!r}, which says no type; add it to OTHERS")


def check_kinds(cfg: DictConfig, defaults: Mapping[str, object]) -> None:
    """Refuses values of another type than their key takes.

    Args:
        defaults: of the keys to check, as plain values.

    Raises:
        ValueError: names each such key, its value, and what it must be.
    """
    wrong = []
    for key, default in defaults.items():
        value = plain(OmegaConf.select(cfg, key))
        kind, null = kind_of(key, default), default is None or key in NULL_TOO
        if not (FITS[kind](value) or (null and value is None)):
            wrong.append(f"{key} is {value!r}; it must be {kind}" + ", or null" * null + _hint(key, value, kind))
    if wrong:
        raise ValueError("\n".join(wrong))


def _hint(key: str, value: object, kind: str) -> str:
    """The message's rest: how text is written that was read as a number, and which numbers are not taken."""
    if kind == TEXT and isinstance(value, int | float) and not isinstance(value, bool):
        return f"; quoted it is: {key}=\"'{value}'\""
    return "; neither infinity nor NaN is taken" if kind == NUMBER and isinstance(value, float) else ""


def plain(value: object) -> object:
    """A config's value without OmegaConf's containers."""
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value
