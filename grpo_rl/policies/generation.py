"""The generation config in a model's folder: where a response ends, and what is written with the trained model."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import AutoConfig, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

_IGNORED = re.compile(r"^- `(\w+)`: ", re.MULTILINE)
"""An entry that transformers ignores, in its error about all of them."""


def generation_config(model: str | Path) -> GenerationConfig:
    """The generation config of a model, given by folder or name on the hub: its file, else its config's entries.

    Raises:
        ValueError: transformers can't make sense of the file; names it, and the entry.
    """
    file = Path(model, GENERATION_CONFIG_NAME)
    try:
        return GenerationConfig.from_pretrained(model)
    except Exception as error:  # of an untrusted file transformers raises errors of any kind
        if isinstance(error, OSError) and not file.is_file():  # there is none
            return GenerationConfig.from_model_config(AutoConfig.from_pretrained(model))
        why = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"{file} makes no sense to transformers: {why}; correct it or fetch it again") from error


def leave_out_ignored(config: GenerationConfig) -> list[str]:
    """Removes the entries that transformers ignores, and so refuses to write; returns their names.

    >>> config = GenerationConfig(do_sample=False, temperature=0.9, top_p=1.0)
    >>> leave_out_ignored(config), config.temperature, config.top_p
    (['temperature'], None, 1.0)
    """
    ignored = []
    try:
        config.validate(strict=True)
    except ValueError as error:
        ignored = _IGNORED.findall(str(error))
    for name in ignored:
        setattr(config, name, None)
    return ignored


def end_ids(model: str | Path) -> tuple[int, ...]:
    """All end-of-sequence ids of a model: those of its generation config, else of its config."""
    ends = generation_config(model).eos_token_id
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
