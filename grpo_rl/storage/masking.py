"""Settings without their secrets, for every file of a run that may be passed on."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from grpo_rl.storage.printable import printable
from grpo_rl.storage.whole_file import write_whole
from grpo_rl.storage.yaml_text import read_yaml

MASK = "***"
_SECRET = re.compile(r"key|token(?!i[sz])|secret|passw|credential|(?:^|\.)authorization$", re.IGNORECASE)
_NEVER_A_COUNT = re.compile("secret|passw|credential|(?:key|token)$", re.IGNORECASE)
"""Under a name with one of these a number is masked, too; keys and tokens may be counted."""
_PROSE = re.compile(r"system_prompt|chat_template|stop(?:_(?:token|string|word|sequence)s?)?", re.IGNORECASE)
"""Names of texts that are part of what is computed, and may speak of keys and tokens; they stay as they are."""
# Bounded, as a text may be long: open repeats would take the square of its length.
_USERINFO = re.compile(r"""(?<=://)(?:[^/?#\s"']+|[^/?#\s"':@]{1,99}:(?!\d{1,5}[/?#])[^\s"']{1,199})(?=@)""")
"""User and password: as in any URL, or with a password whose signs should have been percent-encoded."""
_NAMES = r"(?:key(?!error)|token(?!i[sz])|secret|passw|credential)"
_NAME = re.compile(
    rf"""({_NAMES}[\w.-]{{0,100}})["']?\s{{0,9}}[:=]\s{{0,9}}"""
    rf"""|(?<![\w-])--?[\w.-]{{0,50}}?({_NAMES}[\w.-]{{0,100}})"""
    r"""(?:[ \t]{1,9}(?=[^\s-])|["']?\s{0,9},\s{0,99}(?!["']?--?[a-z])(?=["']?[^\s"']))"""
    r"""|\b((?-i:Bearer)[ \t]{1,9}|Authorization["']?[ \t]{0,9}[:=][ \t]{0,9}["']?(?:[a-z-]{1,20}[ \t]{1,9})?)(?=\S)""",
    re.IGNORECASE,
)
"""The text before a secret: a name with a sign between, an option of a command or of its list of arguments, or the
scheme of an HTTP header."""
_NO_SECRETS = ("null", "None", "true", "false", "True", "False", "VALUE")
"""Values that are none, as in messages of ours."""
LEAST = 8
"""Characters of a variable of the environment that is masked by its value: a shorter one may stand in any word."""
_OPTION = re.compile(r"-[A-Za-z]|--?[A-Za-z][\w.-]*(?:=.*)?", re.DOTALL)
"""An item of a list of arguments that is an option, and no value of the one before."""
_QUOTED = r""""(?:[^"\\]|\\.){0,4096}"|'(?:[^'\\]|\\.){0,4096}'"""
_PARTS = re.compile(rf"{_QUOTED}|[\[\]{{}}]", re.DOTALL)
_WORD = re.compile(rf"""{_QUOTED}|[^\s,;&}}\]"']+""", re.DOTALL)
_ITEM = re.compile(rf"{_QUOTED}|[^,}}\]]+", re.DOTALL)
"""A value in a list or mapping of an override, which may have spaces."""
_TOLD_APART = re.compile(r"\*\*\*[0-9a-f]{3}")
_PARTS_TOLD_APART = re.compile(r".* \(\*\*\*[0-9a-f]{3}\)", re.DOTALL)


def is_secret(key: str) -> bool:
    """Tells whether a setting of this name, or of this dotted key, may hold a secret.

    >>> is_secret("logger.settings.api_key"), is_secret("DB_PASSWORD"), is_secret("model.tokenizer")
    (True, True, False)
    """
    return bool(_SECRET.search(key))


def may_be_secret(name: str, value: str) -> bool:
    """Tells whether a variable of the environment may hold a secret: by its name, or as a URL with user or password.

    >>> may_be_secret("WANDB_API_KEY", "x"), may_be_secret("HTTP_PROXY", "http://me:pw@host"), may_be_secret("PWD", "/")
    (True, True, False)
    """
    return is_secret(name) or bool(_USERINFO.search(value))


def _is_prose(key: str) -> bool:
    section, _, name = key.rpartition(".")
    return bool(_PROSE.fullmatch(name)) and not is_secret(section)


def _sets_prose(word: object) -> bool:
    """Tells whether this is an override of a prompt, or of another text that stays as it is."""
    return isinstance(word, str) and "=" in word and _is_prose(word.partition("=")[0].lstrip("+"))


def masked(value: Any, key: str = "", told_apart: bool = False) -> Any:
    """The same settings with ``***`` for each text that may be secret, and for user and password in each URL.

    Numbers stay, so that ``max_new_tokens`` can be read; those of a name with password, secret or credential don't,
    nor those of one that ends with key or token.
    Prompts, templates and stop strings stay, too.

    Args:
        told_apart: adds three digits of a digest, so that two texts are told apart in 4095 of 4096 cases, while of
            4096 guesses at one of them one passes. A URL's user and password have none. Told apart they stay.

    >>> masked({"api_key": "abc", "max_new_tokens": 256, "uri": "https://me:pw@host/db", "hosts": ["a"]})
    {'api_key': '***', 'max_new_tokens': 256, 'uri': 'https://***@host/db', 'hosts': ['a']}
    >>> masked({"credentials": {"user": "me", "pin": 1234}})
    {'credentials': {'user': '***', 'pin': '***'}}
    >>> masked({"command": ["server", "--api-key", "abc", "--max-tokens", "64"]})
    {'command': ['server', '--api-key', '***', '--max-tokens', '64']}
    >>> masked({"key_column": "question"}, told_apart=True)
    {'key_column': '***425'}
    """
    if isinstance(value, Mapping):
        return {name: masked(inner, f"{key}.{name}", told_apart) for name, inner in value.items()}
    if isinstance(value, list | tuple):  # of overrides, for one
        stay = not is_secret(key)
        return [
            inner if stay and _sets_prose(inner) else masked(inner, _key_in_list(key, before, inner), told_apart)
            for before, inner in zip([None, *value], value, strict=False)
        ]
    if _is_prose(key):
        return value
    if isinstance(value, str):
        secret = value and is_secret(key) and not _TOLD_APART.fullmatch(value)  # of a file that was masked before
        hidden = MASK if secret else masked_text(value)
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        hidden = MASK if number and _NEVER_A_COUNT.search(key) else value
    if not told_apart or hidden in (value, known := _USERINFO.sub(MASK, str(value))):
        return hidden
    if _PARTS_TOLD_APART.fullmatch(known):  # as above
        return value
    digits = hashlib.sha256(f"{key}\0{known}".encode()).hexdigest()[:3]
    return MASK + digits if hidden == MASK else f"{hidden} ({MASK}{digits})"


def _key_in_list(key: str, before: object, item: object) -> str:
    """The dotted key under which a list's item is masked: that of the list, and the option of a command before it.

    >>> _key_in_list("command", "--api-key", "abc"), _key_in_list("command", "--max-tokens", "64")
    ('command.--api-key', 'command')
    """
    named = isinstance(before, str) and _OPTION.fullmatch(before) and "=" not in before and is_secret(before)
    if not named or _is_prose(key):
        return key
    if isinstance(item, str) and (_OPTION.fullmatch(item) or (_is_number(item) and not _NEVER_A_COUNT.search(before))):
        return key
    return f"{key}.{before}"


def masked_override(word: str) -> str:
    """An override of Hydra's with its secrets masked.

    >>> masked_override("+logger.settings.api_key=abc def"), masked_override("env.max_new_tokens=64")
    ('+logger.settings.api_key=***', 'env.max_new_tokens=64')
    >>> masked_override("logger.settings={api_key: abc def, hosts: [a], keys: [b, [c]], project: p}")
    'logger.settings={api_key: ***, hosts: [a], keys: ***, project: p}'
    >>> masked_override("env.mcp=[{command: [server, --api-key, abc def, -v]}]")
    'env.mcp=[{command: [server, --api-key, ***, -v]}]'
    """
    if _sets_prose(word):
        return word
    key, equals, value = word.partition("=")
    if equals and value and is_secret(key) and (not _is_number(value) or _NEVER_A_COUNT.search(key)):
        return f"{key}={MASK}"
    return _masked_text(word, _ITEM if value.lstrip().startswith(("{", "[")) else _WORD)


def masked_text(text: str) -> str:
    """Any text, such as a command or a message, with what follows the name of a secret, and users of URLs, masked.

    Without quotes or brackets around it a value ends at the first space or comma.

    >>> masked_text("HF_TOKEN=hf_abc grpo-rl logger.settings.uri=postgres://me:pw@db/x?password=1")
    'HF_TOKEN=*** grpo-rl logger.settings.uri=postgres://***@db/x?password=***'
    >>> masked_text("server --api-key abc --max-tokens 64, and -H 'Authorization: Bearer def'")
    "server --api-key *** --max-tokens 64, and -H 'Authorization: Bearer ***'"
    >>> masked_text("api_keys=[abc, 'd]ef'] and password='g h'")
    'api_keys=*** and password=***'
    """
    return _masked_text(text, _WORD)


def shown(text: str) -> str:
    """A text as it may be printed and logged, wherever it comes from: printable, and without secrets.

    Agents, servers and judges repeat what they were given, so that the environment's secrets are known by their values.

    >>> shown("\\x1b[2Jno such file; password: abc, KeyError: 'a'")
    "no such file; password: ***, KeyError: 'a'"
    """
    text = printable(text)
    for name, value in os.environ.items():
        if len(value) >= LEAST and is_secret(name):
            text = text.replace(value, MASK)
    return masked_text(text)


def _masked_text(text: str, plain: re.Pattern[str]) -> str:
    text, at, parts = _USERINFO.sub(MASK, text), 0, []
    while name := _NAME.search(text, at):
        end = _end_of_value(text, name.end(), plain if name[1] or "," in name[0] else _WORD)
        value = text[name.end() : end]
        is_count = (
            _is_number(value.strip("\"'") if name[2] else value)
            and not name[3]
            and not _NEVER_A_COUNT.search(name[1] or name[2])
        )
        stays = not value or is_count or value in _NO_SECRETS
        parts += [text[at : name.end()], value if stays else MASK]
        at = end
    return "".join([*parts, text[at:]])


def _end_of_value(text: str, start: int, plain: re.Pattern[str]) -> int:
    """The end of the value that starts there; what opens a bracket ends where that is closed, or with the text."""
    if not text.startswith(("[", "{"), start):
        found = plain.match(text, start)
        return found.end() if found else start
    depth = 0
    for part in _PARTS.finditer(text, start):
        depth += (part[0] in "[{") - (part[0] in "]}")
        if not depth:
            return part.end()
    return len(text)


def mask_files(paths: Iterable[Path]) -> None:
    """Masks the secrets in YAML files of settings and overrides; what can't be read as such is removed."""
    for path in paths:
        text = path.read_text(encoding="utf-8")
        try:
            content = read_yaml(text)
        except ValueError:
            path.unlink()
            continue
        hidden = {word: masked_override(word) for word in _in_lists(content)}
        # The longest first: one override may be the beginning of another.
        known = sorted((word for word in hidden if hidden[word] != word), key=len, reverse=True)
        changed = masked(_replaced(content, {word: hidden[word] for word in known}))
        if changed != content:
            write_whole(path, yaml.safe_dump(changed, sort_keys=False, allow_unicode=True))


def _in_lists(value: Any, inside: bool = False) -> Iterator[str]:
    """The texts in lists, where Hydra's files have overrides."""
    if isinstance(value, str) and inside:
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _in_lists(inner, isinstance(value, list))


def _replaced(value: Any, words: Mapping[str, str]) -> Any:
    """The same with other words in all texts: Hydra also has the overrides as one text, joined by commas."""
    if isinstance(value, Mapping):
        return {name: _replaced(inner, words) for name, inner in value.items()}
    if isinstance(value, list):
        return [_replaced(inner, words) for inner in value]
    if isinstance(value, str):
        for word, hidden in words.items():
            value = value.replace(word, hidden)
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
