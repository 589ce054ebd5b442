"""Text for terminals: of models and of other processes, and where the terminal is not UTF-8."""

from __future__ import annotations

import re
import sys
import unicodedata

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
