"""The standard streams of a terminal that is not UTF-8."""

from __future__ import annotations

import sys


def replace_unwritable() -> None:
    """Has standard output and error write a question mark for a character that their encoding lacks, as of ``…``."""
    for stream in (sys.stdout, sys.stderr):
        if "utf" not in (getattr(stream, "encoding", None) or "utf").lower() and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
