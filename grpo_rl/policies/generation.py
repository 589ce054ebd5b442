"""A model's tokenizer and its generation config, which say where a response ends."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}
"""Variables of templates that transformers gives in each call."""
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags of transformers' own, around the policy's turns."""
_IGNORED = re.compile(r"^- `(\w+)`: ", re.MULTILINE)
"""An entry that transformers ignores, in its error about all of them."""


def load_tokenizer(folder: str | Path, model: Mapping[str, Any] = {}) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the chat template of the section ``model`` and its values.

    The values, ``chat_template_kwargs``, are written into the template as defaults of its variables, so that a model
    that is saved with this tokenizer is served with the prompts that it was trained on. The attribute ``response_ends``
    has the ids at which generation stops, which are no part of a response's text.

    Raises:
        ValueError: the template can't be read or reads no such variable, or there is not one alone.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # by default it asks
    if template := model.get("chat_template"):
        tokenizer.chat_template = template
    if values := model.get("chat_template_kwargs"):
        tokenizer.chat_template = _with_defaults(tokenizer.chat_template, values)
    tokenizer.response_ends = end_ids(folder)
    return tokenizer


def _with_defaults(template: Any, values: Mapping[str, Any]) -> str:
    r"""The template with values for those of its variables that a caller leaves out.

    >>> _with_defaults("{{ 'on' if think else 'off' }}", {"think": True})
    "{% set think = think if think is defined else True %}\n{{ 'on' if think else 'off' }}"
    """
    if not isinstance(template, str):
        raise ValueError("model.chat_template_kwargs: the model has not one chat template; set model.chat_template")
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    except TemplateError as error:
        raise ValueError(f"model.chat_template_kwargs: the chat template can't be read: {error}") from None
    reads = meta.find_undeclared_variables(parsed) - _GIVEN
    if unread := [name for name in values if name not in reads]:
        raise ValueError(f"model.chat_template_kwargs: the chat template has no variable {', '.join(unread)} to set")
    begun = (f"{{% set {name} = {name} if {name} is defined else {value!r} %}}" for name, value in values.items())
    # transformers drops the line break behind a block: the template's own first line begins as before.
    return "".join(begun) + "\n" + template


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
