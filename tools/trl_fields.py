"""Writes docs/from_trl.md: ``python tools/trl_fields.py``. Each field of TRL's config, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from grpo_rl.migration.trl_fields import CONVERTED, DEFAULTS, MISSING, RENAMED, UNNEEDED
from grpo_rl.settings.other_names import SAME

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from_trl.md"
MARKER = "<!-- The tables are written by tools/trl_fields.py. -->\n"


def page() -> str:
    """The page's text: what is above the marker stays."""
    above = PAGE.read_text(encoding="utf-8").partition(MARKER)[0]
    same = {name: f"`{key}`" for name, key in SAME.items()}
    parts = [
        above + MARKER,
        _table("Taken over", "the same value", same),
        _table("Converted", "becomes", CONVERTED),
        _table("Not needed", "why", UNNEEDED),
        _table("Without a counterpart", "instead", MISSING),
        _table("Names of earlier versions", "today's", {old: f"`{new}`" for old, new in RENAMED.items()}),
    ]
    return "\n".join(parts)


def _table(title: str, column: str, rows: Mapping[str, str]) -> str:
    lines = [f"## {title}", "", f"| TRL | its default | {column} |", "| --- | --- | --- |"]
    for name, text in rows.items():
        default = f"`{DEFAULTS[name]}`" if name in DEFAULTS else ""
        lines.append(f"| `{name}` | {default} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
