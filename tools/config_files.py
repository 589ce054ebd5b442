"""Writes `config/` as the settings are declared, and the README's table of losses: `python tools/config_files.py`.

The settings that all tasks share, with defaults and comments, are `config/grpo.yaml`; of the other files the comments.
"""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic.fields import FieldInfo

from grpo_rl.section import REQUIRED, Setting, is_section, plain
from grpo_rl.settings.sections import Sections, declarations
from grpo_rl.settings.tasks import TASKS

FOLDER = Path(__file__).resolve().parents[1] / "config"
WIDTH, COLUMN = 140, 30
ENTRY = re.compile(
    r"^(?P<start>(?P<indent> *)(?P<key>\w+):(?: [^\n]*?)?)(?P<comment>(?: +# [^\n]*)?(?:\n {20,}# [^\n]*)*)$", re.M
)
"""A line with a key, its comment, and the lines in which the comment goes on."""


def with_comments(text: str, known: Mapping[str, Setting], prefix: str = "") -> str:
    """A file of YAML, with the comment of each declared setting next to its key.

    Args:
        prefix: of the file's keys in ``known``.
    """
    columns = [line.index(" # ") for line in text.splitlines() if re.match(r" *\w+:.* # ", line)]
    column = statistics.mode(columns) + 1 if columns else COLUMN
    keys: list[str] = []

    def replaced(match: re.Match[str]) -> str:
        keys[len(match["indent"]) // 2 :] = [match["key"]]
        setting = known.get(prefix + ".".join(keys))
        if setting is None or re.sub(r"\s*(^|\n| )# ", " ", match["comment"]).strip() == setting.comment:
            return match[0]
        return "\n".join(entry(match["start"], setting.comment, column))

    return ENTRY.sub(replaced, text)


def shared_settings(text: str) -> str:
    """The text of `config/grpo.yaml`, with its settings, but not what stands before and after them, made anew."""
    begin, end = text.index("\nmode:") + 1, text.index("\nhydra:")
    lines: list[str] = []
    for name, field in Sections.model_fields.items():
        if name == "loss":
            continue
        if is_section(field.annotation) and lines and lines[-1]:
            lines.append("")
        lines += entries(name, field, "")
        if is_section(field.annotation) or name == "mode":
            lines.append("")
    return text[:begin] + "\n".join(lines) + "\n" + text[end:]


def entries(name: str, field: FieldInfo, indent: str) -> list[str]:
    """The lines of a setting, or of a section with all that is in it."""
    if is_section(field.annotation):
        inner = field.annotation.model_fields.items()
        lines = entry(f"{indent}{name}:", (field.annotation.__doc__ or "").split("\n\n")[0].removesuffix("."))
        return lines + [line for each in inner if each[0] != "task" for line in entries(*each, indent + "  ")]
    if not field.description:
        return []
    return entry(f"{indent}{name}: {written(field.default)}", Setting.of(field).comment)


def written(default: object) -> str:
    """A default as YAML, in a line."""
    if default is REQUIRED:
        return "???"
    text = yaml.safe_dump(plain(default), default_flow_style=True, width=WIDTH).removesuffix("...\n").strip()
    return re.sub(r"e-0(\d)$", r"e-\1", text)


def entry(start: str, comment: str, column: int = COLUMN) -> list[str]:
    """A key and its comment, in as many lines as it takes."""
    start, margin = start.ljust(column - 1) + " ", " " * column
    rest = {"subsequent_indent": margin, "break_on_hyphens": False, "break_long_words": False}
    first, *more = textwrap.wrap("x" * len(start) + " ".join(comment.split()), WIDTH - 2, **rest)
    return [f"{start}# {first[len(start) :]}", *(f"{margin}# {line[column:]}" for line in more)]


def table_of_losses() -> str:
    """A row for each preset of `config/loss/`: its factors, the settings that differ from GRPO's, its source."""
    base = yaml.safe_load((FOLDER / "loss" / "grpo.yaml").read_text())
    rows = ["| `loss` | surrogate | mean | advantage | differs by | source |", "| --- | --- | --- | --- | --- | --- |"]
    for path in sorted((FOLDER / "loss").glob("*.yaml"), key=lambda path: (path.stem != "grpo", path.stem)):
        text = path.read_text()
        loss = base | yaml.safe_load(text)
        factors = [f"`{loss[name]}`" for name in ("surrogate", "aggregate", "advantage")]
        shown = ("defaults", "surrogate", "aggregate", "advantage")
        others = [
            f"`{name}={written(value)}`" for name, value in loss.items() if name not in shown and value != base[name]
        ]
        source = re.match(r"# ([^,(:]+)[^(]*\((https://[^,;)]+)", text)
        link = f"[{source[1].strip()}]({source[2]})" if source else re.match(r"# ([^.:]+)", text)[1]
        rows.append(f"| `{path.stem}` | {' | '.join(factors)} | {' '.join(others)} | {link} |")
    return "\n".join(rows)


def files() -> dict[Path, str]:
    """The files of `config/` with settings and the README, and their texts."""
    path = FOLDER / "grpo.yaml"
    texts, known = {path: shared_settings(path.read_text())}, {"loss/grpo": (declarations("gsm8k"), "loss.")}
    for task in TASKS:
        own = declarations(task)
        known[f"env/{task}"] = {key: own[key] for key in own if key != "env.dataset"}, "env."
    for name, (settings, prefix) in known.items():
        path = FOLDER / f"{name}.yaml"
        texts[path] = with_comments(path.read_text(), settings, prefix)
    readme = FOLDER.parent / "README.md"
    texts[readme] = re.sub(r"\| `loss` \|(.*\n\|)*.*", lambda _: table_of_losses(), readme.read_text())
    return texts


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
