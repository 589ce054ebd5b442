"""Data of the responses on a run's page: of training, by groups and token by token, and of held-out rows.

A file that can't be read is a ``ValueError`` that names it, which leaves the section out.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from grpo_rl.monitor.completions import TURN_ENDS
from grpo_rl.monitor.step_parts import COMPLETIONS_FOLDER, HELD_OUT_FOLDER, TOKENS_FOLDER, StepParts
from grpo_rl.storage.masking import printable

RESPONSES, MOST_OF_GROUP, BYTES = 1200, 64, 1_500_000
"""At most about so many responses are on the page, so many of a group, and so many bytes of them and their prompts."""
LONGEST, LONGEST_PROMPT = 8000, 3000
TOOLS = ("calculator", "search")
"""Names whose lines in a turn are calls, in the tasks that come with the package."""
STEPS, RESPONSES_OF_STEP, TOKENS_OF_RESPONSE = 30, 4, 400
"""At most so many steps are on the page, of each so many responses, and of each of these so many tokens."""
KEY = ("group_id", "response")
NUMBERS = {"sampler_log_prob": "sampler", "log_prob": "trainer", "entropy": "entropy"}
"""Columns of numbers, and their names on the page."""
SHOWN = (*KEY, "row", "token_id", "text", "special", "trainable", "policy_version", *NUMBERS)
HELD_OUT_ROWS, HELD_OUT_BYTES = 150, 500_000
"""At most so many held-out rows are on the page, and so many bytes of their texts."""
LONGEST_HELD_OUT = 4000
T = TypeVar("T")


def build(run_dir: Path) -> dict[str, Any] | None:
    """The groups to show, in the order of the run, and out of how many; None without completions.

    A run of few responses is there whole. Of any other there are groups evenly spaced over the run, and those on the
    page token by token. A part that can't be read is left out, with its name.
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


def recorded_groups(run_dir: Path) -> set[tuple[int, int]]:
    """The groups on the page token by token, each by its step and its id."""
    found = build_tokens(run_dir) or {"responses": []}
    return {(response["step"], response["group"]) for response in found["responses"]}


def build_tokens(run_dir: Path) -> dict[str, Any] | None:
    """Responses with their tokens; None where no tokens are recorded."""
    parts = StepParts(run_dir / TOKENS_FOLDER)
    steps = parts.steps()
    responses = []
    for step in evenly(steps, STEPS):
        rows = parts.read(step, SHOWN).filter(pc.field("text").is_valid()).to_pylist()
        tokens = {key: list(of_response) for key, of_response in groupby(rows, itemgetter(*KEY))}
        first = sorted(tokens, key=itemgetter(1))[:RESPONSES_OF_STEP]
        responses += [{"step": step} | _tokens_of(tokens[key]) for key in first]
    if not responses:
        return None  # with train.lineage=true and logger.token_groups=0 there are tokens without a text
    return {"responses": responses, "all_steps": len(steps)}


def _tokens_of(tokens: Sequence[dict[str, Any]]) -> dict[str, Any]:
    shown = tokens[:TOKENS_OF_RESPONSE]
    return {
        "group": tokens[0]["group_id"],
        "response": tokens[0]["response"],
        "row": tokens[0]["row"],
        "cut": len(tokens) - len(shown),
        "ids": [token["token_id"] for token in shown],
        "texts": [_text(token["text"]) for token in shown],
        "special": [i for i, token in enumerate(shown) if token["special"]],
        "read": [i for i, token in enumerate(shown) if not token["trainable"]],
        "versions": [token["policy_version"] for token in shown],
        **{label: [rounded(token[name]) for token in shown] for name, label in NUMBERS.items()},
    }


def _text(text: str) -> str:
    return printable(text) if text.strip() else text.replace("\t", " ").replace("\r", "")


def build_held_out(run_dir: Path) -> dict[str, Any] | None:
    """Held-out rows with their responses in the first and the last evaluation; None where no evaluation is stored.

    Of many rows there are the quarter that gained most, the quarter that lost most, and others, evenly spaced.
    """
    parts = StepParts(run_dir / HELD_OUT_FOLDER)
    steps = parts.steps()
    if not steps:
        return None
    first = parts.read(steps[0]).to_pylist()
    last = {row["row"]: row for row in parts.read(steps[-1]).to_pylist()} if len(steps) > 1 else {}
    pairs = [(before, last.get(before["row"])) for before in first]
    chosen = _chosen(pairs)
    texts = [row["completion"] for pair in chosen for row in pair if row]
    most = min(LONGEST_HELD_OUT, fitting(texts, HELD_OUT_BYTES - HELD_OUT_BYTES // 3))
    most_of_prompt = min(LONGEST_HELD_OUT, fitting([before["prompt"] for before, _ in chosen], HELD_OUT_BYTES // 3))
    rows = []
    for before, after in chosen:
        prompt, cut = shortened(before["prompt"], most_of_prompt)
        row = {"row": before["row"], "prompt": prompt, "prompt_cut": cut, "gain": _gain(before, after)}
        row["gold"] = printable(before["answer"] or "")[:500]
        rows.append(row | {"responses": [_held_out_response(one, most) for one in (before, after) if one]})
    gains = [gain for pair in pairs if (gain := _gain(*pair)) is not None]
    return {
        "rows": rows,
        "all": len(first),
        "steps": [steps[0], steps[-1]] if last else [steps[0]],
        "better": sum(gain > 0 for gain in gains),
        "worse": sum(gain < 0 for gain in gains),
        "same": sum(gain == 0 for gain in gains),
    }


def _chosen(pairs: list[tuple[dict[str, Any], dict[str, Any] | None]]) -> list[tuple[dict, dict | None]]:
    if len(pairs) <= HELD_OUT_ROWS:
        return pairs
    order = sorted(range(len(pairs)), key=lambda i: _gain(*pairs[i]) or 0.0)
    kept = {*order[: HELD_OUT_ROWS // 4], *order[-(HELD_OUT_ROWS // 4) :]}
    kept |= set(evenly([i for i in range(len(pairs)) if i not in kept], HELD_OUT_ROWS - len(kept)))
    return [pairs[i] for i in sorted(kept)]


def _gain(before: dict[str, Any], after: dict[str, Any] | None) -> float | None:
    if after is None or before["reward"] is None or after["reward"] is None:
        return None
    return round(after["reward"] - before["reward"], 4)


def _held_out_response(row: dict[str, Any], most: int) -> dict[str, Any]:
    text, cut = shortened(row["completion"], most)
    shown = {name: row[name] for name in ("step", "tokens", "truncated")}
    return shown | {"text": text, "cut": cut, "reward": rounded(row["reward"])}


def evenly(items: Sequence[T], count: int) -> list[T]:
    """At most so many items, 2 or more, evenly spaced, the first and the last among them.

    >>> evenly([1, 2, 3, 4, 5, 6, 7], 3), evenly([1, 2], 3)
    ([1, 4, 7], [1, 2])
    """
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def shortened(text: str, most: int) -> tuple[str, int]:
    """The text without control characters, cut to so many characters, and how many characters were cut off.

    >>> shortened("a\\x07bcde", 3)
    ('abc', 2)
    """
    text = printable(text)
    return text[:most], max(len(text) - most, 0)


def fitting(texts: Sequence[str], budget: int) -> int:
    """The characters to which longer texts can be cut so that all together take about ``budget`` bytes.

    >>> fitting(["ab", "abcdefghij", "abcdefghij"], 12), fitting(["ab", "abc"], 12)
    (5, 12)
    """
    wide = sum(len(text.encode("utf-8", "replace")) for text in texts) / max(sum(map(len, texts)), 1)
    left = whole = int(budget / max(wide, 1))
    for number, length in enumerate(sorted(map(len, texts))):
        share = max(left, 0) // (len(texts) - number)
        if length > share:
            return share
        left -= length
    return whole


def rounded(value: float | None) -> float | None:
    """The value to four decimals; None where it is missing or not finite."""
    return None if value is None or not math.isfinite(value) else round(value, 4)
