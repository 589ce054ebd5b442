"""Data of the responses on a run's page: a sample of groups, each with its prompt and all it earned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from grpo_rl.monitor.completions import TURN_ENDS
from grpo_rl.monitor.step_parts import COMPLETIONS_FOLDER, StepParts
from grpo_rl.report.sample import evenly, fitting, rounded, shortened
from grpo_rl.report.tokens import recorded_groups
from grpo_rl.storage.printable import printable

RESPONSES, MOST_OF_GROUP, BYTES = 1200, 64, 1_500_000
"""At most about so many responses are on the page, so many of a group, and so many bytes of them and their prompts."""
LONGEST, LONGEST_PROMPT = 8000, 3000
TOOLS = ("calculator", "search")
"""Names whose lines in a turn are calls, in the tasks that come with the package."""


def build(run_dir: Path) -> dict[str, Any] | None:
    """The groups to show, in the order of the run, and out of how many; None without completions.

    A run of few responses is there whole. Of any other there are groups evenly spaced over the run, and those on the
    page token by token. A part that can't be read is left out, with its name.

    Raises:
        ValueError: no part of ``completions.parquet`` can be read; names the last.
    """
    parts, unread = StepParts(run_dir / COMPLETIONS_FOLDER), list[str]()

    def read(step: int, columns: Sequence[str] | None = None) -> pa.Table | None:
        try:
            return parts.read(step, columns)
        except ValueError as error:
            unread.append(str(error))
            return None

    tables = {step: table for step in parts.steps() if (table := read(step, ["group_id"]))}
    keys = [(step, group_id) for step, table in tables.items() for group_id in table["group_id"].unique().to_pylist()]
    if not keys:
        if unread:
            raise ValueError(unread[-1])
        return None
    count, on_page = sum(map(len, tables.values())), set[tuple[int, int]]()
    with suppress(ValueError, KeyError, TypeError):  # the section of the tokens names what is wrong
        on_page = recorded_groups(run_dir)
    room = RESPONSES * len(keys) // count - len(on_page)
    chosen = {*evenly(keys, max(2, room)), *on_page}
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {key: [] for key in keys if key in chosen}
    for step in dict.fromkeys(step for step, _ in rows):
        if table := read(step):
            for row in table.filter(pc.field("group_id").isin([i for of, i in rows if of == step])).to_pylist():
                rows[step, row["group_id"]].append(row)
    groups = _groups({key: found[:MOST_OF_GROUP] for key, found in rows.items() if found})
    about = {"all_groups": len(keys), "all_responses": count, "unread": unread, "tools": list(TOOLS)}
    return {"groups": groups} | about


def _groups(chosen: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The groups with these rows, their texts cut so that all together stay in bounds."""
    most_of_prompt = min(LONGEST_PROMPT, fitting([rows[0]["prompt"] for rows in chosen.values()], BYTES // 3))
    texts = [row["completion"] for rows in chosen.values() for row in rows]
    most = min(LONGEST, fitting(texts, BYTES - BYTES // 3))
    groups = []
    for (step, group_id), rows in chosen.items():
        prompt, cut = shortened(rows[0]["prompt"], most_of_prompt)
        about = {"step": step, "id": group_id, "row": rows[0]["row"], "prompt": prompt, "prompt_cut": cut}
        gold = printable(rows[0]["answer"] or "")[:500]
        groups.append(about | {"gold": gold, "responses": [_response(row, most) for row in rows]})
    return groups


def _response(row: Mapping[str, Any], most: int) -> dict[str, Any]:
    """A response, its text cut to so many characters; ``cut`` is the number of those cut off."""

    def named(prefix: str) -> dict[str, float]:
        return {
            name.removeprefix(prefix): number
            for name, value in row.items()
            if name.startswith(prefix) and (number := rounded(value)) is not None
        }

    text, cut = shortened(row["completion"], most)
    response = {
        "text": text,
        "cut": cut,
        "reward": rounded(row["reward"]),
        "parts": named("reward_"),
        "measures": named("measure_"),
        "advantage": rounded(row["advantage"]),
        "tokens": row["tokens"],
        "truncated": row["truncated"],
        "version": row["policy_version"],
    }
    if ends := row.get(TURN_ENDS):  # the policy's turns and the replies between them, in turns, the policy's first
        spans = zip([0, *ends], ends, strict=False)
        turns = [printable(row["completion"][start : min(end, most)]) for start, end in spans]
        response |= {"text": "", "turns": turns}
    return response
