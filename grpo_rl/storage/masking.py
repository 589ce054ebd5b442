"""Settings without their secrets, for every file of a run that may be passed on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from grpo_rl.storage.whole_file import write_whole

MASK = "***"
_SECRET = re.compile(r"key|token(?!i[sz])|secret|passw|credential", re.IGNORECASE)
_NEVER_A_COUNT = re.compile("secret|passw|credential", re.IGNORECASE)
"""Under a name with one of these a number is masked, too; a key or tokens may be counted."""
_USERINFO = re.compile(r"(?<=://)[^/?#\s\"']+(?=@)")
# Bounded, as a text may be long: open repeats would take the square of its length.
_IN_TEXT = re.compile(
    r"""(?P<name>(?:key|token(?!i[sz])|secret|passw|credential)[\w.-]{0,100}["']?\s{0,9}[:=]\s{0,9})"""
    r"""(?P<value>"[^"]*"|'[^']*'|[^\s,;&}\]"']+)""",
    re.IGNORECASE,
)


def is_secret(key: str) -> bool:
    """Tells whether a setting of this name, or of this dotted key, may hold a secret.

    >>> is_secret("logger.settings.api_key"), is_secret("DB_PASSWORD"), is_secret("model.tokenizer")
    (True, True, False)
    """
    return bool(_SECRET.search(key))


def masked(value: Any, key: str = "") -> Any:
    """The same settings with ``***`` for each text that may be secret, and for user and password in each URL.

    Numbers stay, so that ``max_new_tokens`` can be read; those of a name with password, secret or credential don't.

    >>> masked({"api_key": "abc", "max_new_tokens": 256, "uri": "https://me:pw@host/db", "hosts": ["a"]})
    {'api_key': '***', 'max_new_tokens': 256, 'uri': 'https://***@host/db', 'hosts': ['a']}
    >>> masked({"credentials": {"user": "me", "pin": 1234}})
    {'credentials': {'user': '***', 'pin': '***'}}
    """
    if isinstance(value, Mapping):
        return {name: masked(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, key) for inner in value]
    if isinstance(value, str):
        return MASK if value and is_secret(key) else masked_text(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return MASK if number and _NEVER_A_COUNT.search(key) else value


def masked_override(word: str) -> str:
    """An override of Hydra's with its secrets masked.

    >>> masked_override("+logger.settings.api_key=abc def"), masked_override("env.max_new_tokens=64")
    ('+logger.settings.api_key=***', 'env.max_new_tokens=64')
    >>> masked_override("logger.settings={api_key: abc, project: p}")
    'logger.settings={api_key: ***, project: p}'
    """
    key, equals, value = word.partition("=")
    if equals and value and is_secret(key) and (not _is_number(value) or _NEVER_A_COUNT.search(key)):
        return f"{key}={MASK}"
    return masked_text(word)


def masked_text(text: str) -> str:
    """Any text, such as a command or a message, with what follows the name of a secret, and users of URLs, masked.

    >>> masked_text("HF_TOKEN=hf_abc grpo-rl logger.settings.uri=postgres://me:pw@db/x?password=1")
    'HF_TOKEN=*** grpo-rl logger.settings.uri=postgres://***@db/x?password=***'
    """

    def hide(found: re.Match[str]) -> str:
        stays = _is_number(found["value"]) and not _NEVER_A_COUNT.search(found["name"])
        return found[0] if stays else found["name"] + MASK

    return _IN_TEXT.sub(hide, _USERINFO.sub(MASK, text))


def mask_files(paths: Iterable[Path]) -> None:
    """Masks the secrets in YAML files of settings and overrides; what can't be read as such is removed."""
    for path in paths:
        text = path.read_text(encoding="utf-8")
        try:
            content = yaml.safe_load(text)
            hidden = yaml.safe_dump(masked(_overrides_masked(content)), sort_keys=False, allow_unicode=True)
        except yaml.YAMLError:
            path.unlink()
            continue
        if yaml.safe_load(hidden) != content:
            write_whole(path, hidden)


def _overrides_masked(value: Any) -> Any:
    """The same with the secrets of overrides masked, which stand in lists."""
    if isinstance(value, Mapping):
        return {name: _overrides_masked(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [masked_override(inner) if isinstance(inner, str) else _overrides_masked(inner) for inner in value]
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
