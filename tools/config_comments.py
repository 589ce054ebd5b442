"""Writes the comments of `config/` that differ from the settings' declarations: `python tools/config_comments.py`."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Mapping
from pathlib import Path

from grpo_rl.section import Setting
from grpo_rl.settings.sections import declarations
from grpo_rl.settings.tasks import TASKS

FOLDER = Path(__file__).resolve().parents[1] / "config"
WIDTH = 140
ENTRY = re.compile(
    r"^(?P<start>(?P<indent> *)(?P<key>\w+):(?: [^\n]*?)?)(?P<comment>(?: +# [^\n]*)?(?:\n {20,}# [^\n]*)*)$", re.M
)
"""A line with a key, its comment, and the lines in which the comment goes on."""


def with_comments(text: str, known: Mapping[str, Setting], prefix: str = "") -> str:
    """A file of YAML, with the comment of each declared setting next to its key.

    Args:
        prefix: of the file's keys in ``known``.
    """
    column = statistics.mode(line.index(" # ") for line in text.splitlines() if re.match(r" *\w+:.* # ", line)) + 1
    keys: list[str] = []

    def entry(match: re.Match[str]) -> str:
        keys[len(match["indent"]) // 2 :] = [match["key"]]
        setting = known.get(prefix + ".".join(keys))
        if setting is None or re.sub(r"\s*(^|\n| )# ", " ", match["comment"]).strip() == setting.comment:
            return match[0]
        start, margin = match["start"].ljust(column - 1) + " ", " " * column
        words = "x" * len(start) + setting.comment
        first, *rest = textwrap.wrap(
            words, WIDTH - 2, subsequent_indent=margin, break_on_hyphens=False, break_long_words=False
        )
        return "\n".join([f"{start}# {first[len(start) :]}", *(f"{margin}# {line[column:]}" for line in rest)])

    return ENTRY.sub(entry, text)


def main() -> None:
    known = declarations("gsm8k")
    files = {"grpo": (known, ""), "loss/grpo": (known, "loss.")}
    for task in TASKS:
        own = declarations(task)
        files[f"env/{task}"] = {key: own[key] for key in own if key != "env.dataset"}, "env."
    for name, (settings, prefix) in files.items():
        path = FOLDER / f"{name}.yaml"
        path.write_text(with_comments(path.read_text(), settings, prefix))


if __name__ == "__main__":
    main()
