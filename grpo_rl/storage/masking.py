"""Settings and texts without their secrets, and without what a terminal would obey, for logs, files and terminals."""

import hashlib
import os
import re
import sys
import unicodedata
from collections.abc import Mapping
from typing import Any

# CSI, OSC, DCS/SOS/PM/APC strings, then the two-byte sequences: ECMA-48, sections 5.3 to 5.6.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)


def printable(text: str) -> str:
    """Model text that is safe to show: no escape sequences, control or invisible formatting characters.

    A model can emit the bytes that clear a terminal, retitle its window, or reverse the direction of text. Line breaks
    stay, tabs become spaces.

    >>> printable("\\x1b[2J\\x1b]0;title\\x07red: \\x1b[31m4\\x1b[0m\\u202e\\tend")
    'red: 4 end'
    """
    text = _ESCAPE.sub("", text.replace("\r\n", "\n").replace("\t", " "))
    return "".join(c for c in text if c == "\n" or not unicodedata.category(c).startswith("C"))


def replace_unwritable() -> None:
    """Has standard output and error write a question mark for a character that their encoding lacks, as of ``…``."""
    for stream in (sys.stdout, sys.stderr):
        if "utf" not in (getattr(stream, "encoding", None) or "utf").lower() and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


MASK = "***"
_NAMES = "(?:key(?!error)|token(?!i[sz])|secret|passw|credential)"
_SECRET = re.compile(rf"{_NAMES}|(?:^|\.)authorization$", re.IGNORECASE)
_NEVER_A_COUNT = re.compile("secret|passw|credential|Bearer|authorization|(?:key|token)$", re.IGNORECASE)
"""Under a name with one of these a number is masked, too; keys and tokens may be counted."""
_PROSE = re.compile(r"system_prompt|chat_template|stop(?:_(?:token|string|word|sequence)s?)?", re.IGNORECASE)
"""Names of texts that are part of what is computed, and may speak of keys and tokens; they stay as they are."""
# Bounded, as a text may be long: open repeats would take the square of its length.
_USERINFO = re.compile(r"""(?<=://)(?:[^/?#\s"']+|[^/?#\s"':@]{1,99}:(?!\d{1,5}[/?#])[^\s"']{1,199})(?=@)""")
"""User and password: as in any URL, or with a password whose signs should have been percent-encoded."""
_NAMED = re.compile(
    rf"""({_NAMES}[\w.-]{{0,100}}["']?\s{{0,9}}[:=]\s{{0,9}}"""
    rf"""|(?<![\w-])--?[\w.-]{{0,50}}?{_NAMES}[\w.-]{{0,100}}"""
    r"""(?:[ \t]{1,9}(?=[^\s-])|["']?\s{0,9},\s{0,99}(?!["']?--?[a-z])(?=["']?[^\s"']))"""
    r"""|\b(?-i:Bearer)[ \t]{1,9}(?=\S)"""
    r"""|\bAuthorization["']?[ \t]{0,9}[:=][ \t]{0,9}["']?(?:[a-z-]{1,20}[ \t]{1,9})?(?=\S))"""
    r"""("(?:[^"\\]|\\.){0,4096}"|'(?:[^'\\]|\\.){0,4096}'|[\[{].*|["'][^\n]*|[^\s,;&}\]"']+)""",
    re.IGNORECASE | re.DOTALL,
)
"""A secret in a text, after its name with a sign between, an option of a command or of its list of arguments, or the
scheme of an HTTP header. It ends with its quotes, at a space or comma; in brackets with the text."""
_NO_SECRETS = ("null", "None", "true", "false", "True", "False", "VALUE")  # as in messages of ours
LEAST = 8
"""Characters of a secret of the environment that is masked by its value: a shorter one may stand in any word."""
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
"""An option in a list of arguments, whose value is the next item."""


def is_secret(key: str) -> bool:
    """True if a setting of this name, or of this dotted key, may hold a secret."""
    return bool(_SECRET.search(key))


def may_be_secret(name: str, value: str) -> bool:
    """True if a variable of the environment may hold a secret: by its name, or as a URL with user or password."""
    return is_secret(name) or bool(_USERINFO.search(value))


def masked(value: Any, key: str = "", told_apart: bool = False) -> Any:
    """The same settings with ``***`` for each text that may be secret, and for user and password in each URL.

    Counts of keys and tokens stay, and so do prompts, templates and stop strings. ``told_apart`` adds three digits of a
    digest: two texts are distinguished in 4095 of 4096 cases, while of 4096 guesses at one of them one passes.

    >>> masked({"api_key": "abc", "max_new_tokens": 256, "command": ["server", "--token", "abc"]})
    {'api_key': '***', 'max_new_tokens': 256, 'command': ['server', '--token', '***']}
    """
    section, _, name = key.rpartition(".")
    if _PROSE.fullmatch(name) and not is_secret(section):
        return value
    if isinstance(value, Mapping):
        return {name: masked(inner, f"{key}.{name}", told_apart) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        options = [isinstance(item, str) and bool(_OPTION.fullmatch(item)) for item in value]
        names = [key, *(f"{key}.{item}" if option else key for item, option in zip(value, options, strict=True))]
        given = zip(value, options, names, strict=False)
        return [masked(item, key if option else name, told_apart) for item, option, name in given]
    if is_secret(key):
        nothing = value is None or isinstance(value, bool) or value == "" or str(value).startswith(MASK)
        return value if nothing or _is_count(key, str(value)) else MASK + _digits(key, value) * told_apart
    if not isinstance(value, str):
        return value
    hidden, known = masked_text(value), _USERINFO.sub(MASK, value)
    return f"{hidden} ({MASK}{_digits(key, known)})" if told_apart and hidden != known else hidden


def _digits(key: str, value: object) -> str:
    return hashlib.sha256(f"{key}\0{value}".encode()).hexdigest()[:3]


def _is_count(name: str, text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return not _NEVER_A_COUNT.search(name)


def masked_override(word: str) -> str:
    """An override of Hydra's, whose whole value is masked where it holds a secret.

    >>> masked_override("logger.settings={api_key: abc def, project: p}"), masked_override("env.max_new_tokens=64")
    ('logger.settings=***', 'env.max_new_tokens=64')
    """
    key, equals, value = word.partition("=")
    return word if not equals or masked(value, key.lstrip("+~")) == value else f"{key}={MASK}"


def masked_text(text: str) -> str:
    """Any text, such as a command or a message, with what follows the name of a secret, and users of URLs, masked.

    >>> masked_text("HF_TOKEN=hf_abc grpo-rl x=postgres://me:pw@db, -H 'Authorization: Bearer def'")
    "HF_TOKEN=*** grpo-rl x=postgres://***@db, -H 'Authorization: Bearer ***'"
    """

    def hidden(found: re.Match[str]) -> str:
        name, value = found.groups()
        stays = value in _NO_SECRETS or _is_count(re.sub(r"[\s\"':=,]+$", "", name), value.strip("\"'"))
        return found[0] if stays else name + MASK

    return _NAMED.sub(hidden, _USERINFO.sub(MASK, text))


def shown(text: str) -> str:
    """A text as it may be printed and logged, wherever it comes from: printable, and without secrets.

    Agents, servers and judges repeat what they were given, so that the environment's secrets are known by their values.
    """
    text = printable(text)
    for name, value in os.environ.items():
        if len(value) >= LEAST and is_secret(name):
            text = text.replace(value, MASK)
    return masked_text(text)
