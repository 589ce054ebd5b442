"""Data of the responses on a run's page: a sample of groups, each with its prompt and all it earned."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from grpo_rl.monitor.completions import TURN_ENDS, read_step
from grpo_rl.monitor.step_parts import COMPLETIONS_FOLDER, StepParts
from grpo_rl.monitor.stored_tokens import shown_tokens
from grpo_rl.report.sample import evenly, fitting, rounded, shortened
from grpo_rl.storage.printable import printable

RESPONSES, BYTES = 1200, 1_500_000
"""At most about so many responses are on the page, and so many bytes of them and their prompts."""
MOST_STEPS = 30
EXTREMES = 5
"""Number of the best, and of the worst, responses of the whole run that the page shows."""
LONGEST, LONGEST_PROMPT = 8000, 3000
MOST_OF_GROUP = 64
"""Responses shown of one group."""
TOOLS = ("calculator", "search")
"""Names whose lines in a turn are calls, in the tasks that come with the package."""


Rewards = Mapping[int, Sequence[float]]
"""Rewards of a step's responses, by group in the order of the part."""


def build(run_dir: Path) -> dict[str, Any] | None:
    """The groups to show, in the order of the run, and what was chosen out of how many; None without completions.

    A run of few responses is there whole. Of any other: evenly spaced steps, and of each the first group, the one that
    is recorded token by token, those whose rewards differ most and least, those with the highest and the lowest mean;
    and the groups of the best and the worst responses of the whole run.

    Raises:
        ValueError: the first and every other part of ``completions.parquet`` can't be read; names the last.
    """
    steps, unread = _read_rewards(run_dir)
    if not steps:
        if unread:
            raise ValueError(unread[-1])
        return None
    every = [
        (reward, step, group_id, number)
        for step, of_group in steps.items()
        for group_id, rewards in of_group.items()
        for number, reward in enumerate(rewards)
    ]
    chosen = _choose(run_dir, steps, len(every))
    known = [one for one in every if math.isfinite(one[0]) and one[3] < MOST_OF_GROUP]
    best = heapq.nlargest(EXTREMES, known, key=itemgetter(0))  # of equal ones those that came first
    worst = heapq.nsmallest(EXTREMES, known, key=itemgetter(0))
    for _, step, group_id, _ in (*best, *worst):
        chosen.setdefault(step, {}).setdefault(group_id, "best or worst of the run")
    groups = [group for step in sorted(chosen) for group in _groups(run_dir, step, chosen[step])]
    _shorten(groups)
    counts = Counter(reward for reward, *_ in every)
    place = {(group["step"], group["id"]): number for number, group in enumerate(groups)}

    def mark(reward: float, step: int, group_id: int, number: int) -> dict[str, Any]:
        return {"group": place[step, group_id], "response": number, "reward": rounded(reward), "alike": counts[reward]}

    return {
        "groups": groups,
        "best": [mark(*one) for one in best],
        "worst": [mark(*one) for one in worst],
        "all_groups": sum(map(len, steps.values())),
        "all_steps": len(steps),
        "all_responses": len(every),
        "shown_steps": len(chosen),
        "shown_responses": sum(len(group["responses"]) for group in groups),
        "tools": list(TOOLS),
        "unread": [printable(text) for text in unread],
    }


def _read_rewards(run_dir: Path) -> tuple[dict[int, Rewards], list[str]]:
    """The rewards of each step that has any, and what can't be read."""
    parts = StepParts(run_dir / COMPLETIONS_FOLDER)
    found: dict[int, Rewards] = {}
    unread = []
    for step in parts.steps():
        rewards: dict[int, list[float]] = {}
        try:
            table = parts.read(step, ["group_id", "reward"])
            for group_id, reward in zip(table["group_id"].to_pylist(), table["reward"].to_pylist(), strict=True):
                rewards.setdefault(group_id, []).append(math.nan if reward is None else reward)
        except ValueError as error:
            unread.append(str(error))
        except KeyError as error:
            unread.append(f"{parts.path(step)}: {error}; remove it to do without it")
        if rewards:
            found[step] = rewards
    return found, unread


def _choose(run_dir: Path, steps: Mapping[int, Rewards], total: int) -> dict[int, dict[int, str]]:
    """The groups to show by step, each with why."""
    largest = max(len(rewards) for step in steps.values() for rewards in step.values())
    if total <= RESPONSES and largest <= MOST_OF_GROUP:
        return {step: dict.fromkeys(rewards, "") for step, rewards in steps.items()}
    size = min(largest, MOST_OF_GROUP)
    each = max(1, min(6, RESPONSES // (10 * size)))
    shown = evenly(list(steps), max(2, min(MOST_STEPS, RESPONSES // (each * size))))
    return {step: _choose_of(run_dir, step, steps[step], each) for step in shown}


def _choose_of(run_dir: Path, step: int, rewards: Rewards, each: int) -> dict[int, str]:
    ids = [group_id for group_id, values in rewards.items() if all(map(math.isfinite, values))] or list(rewards)
    mean = {i: sum(rewards[i]) / len(rewards[i]) for i in ids}
    spread = {i: sum((reward - mean[i]) ** 2 for reward in rewards[i]) / len(rewards[i]) for i in ids}
    try:
        recorded = shown_tokens(run_dir, step, ["group_id"])["group_id"].unique().to_pylist()
    except (ValueError, KeyError):  # the run records no tokens, or not of this step
        recorded = []
    wanted = [
        (ids[0], "first of its step"),
        *((group_id, "recorded token by token") for group_id in recorded if group_id in rewards),
        (max(ids, key=spread.__getitem__), "rewards differ most"),
        (max(ids, key=mean.__getitem__), "highest mean"),
        (min(ids, key=mean.__getitem__), "lowest mean"),
        (min(ids, key=spread.__getitem__), "rewards differ least"),
    ]
    chosen: dict[int, str] = {}
    for group_id, why in wanted:
        if len(chosen) < each:
            chosen.setdefault(group_id, why)
    return chosen


def _groups(run_dir: Path, step: int, chosen: Mapping[int, str]) -> list[dict[str, Any]]:
    """The chosen groups of a step, in the order of its part."""
    of_group: dict[int, list[dict[str, Any]]] = {}
    for row in read_step(run_dir, step):
        if row["group_id"] in chosen:
            of_group.setdefault(row["group_id"], []).append(row)
    return [
        {
            "step": step,
            "id": group_id,
            "row": rows[0].get("row"),
            "why": chosen[group_id],
            "prompt": rows[0].get("prompt") or "",
            "gold": printable(rows[0].get("answer") or "")[:500],
            "size": len(rows),
            "responses": [_response(row) for row in rows[:MOST_OF_GROUP]],
        }
        for group_id, rows in of_group.items()
    ]


def _response(row: Mapping[str, Any]) -> dict[str, Any]:
    def named(prefix: str) -> dict[str, float]:
        return {
            name.removeprefix(prefix): number
            for name, value in row.items()
            if name.startswith(prefix) and (number := rounded(value)) is not None
        }

    text = row.get("completion") or ""
    return {
        "text": text,
        "reward": rounded(row.get("reward")),
        "parts": named("reward_"),
        "measures": named("measure_"),
        "advantage": rounded(row.get("advantage")),
        "tokens": row.get("tokens"),
        "truncated": row.get("truncated"),
        "version": row.get("policy_version"),
        "turns": turns(text, row[TURN_ENDS]) if row.get(TURN_ENDS) else None,
    }


def turns(text: str, ends: Sequence[int]) -> list[str]:
    """The policy's turns and the replies between them, in turns, the policy's first.

    >>> turns("2+2?4So 4", [4, 5, 9])
    ['2+2?', '4', 'So 4']
    """
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _shorten(groups: Sequence[dict[str, Any]]) -> None:
    """Cuts texts, in place, so that all together stay in bounds; ``cut`` has the number of characters cut."""
    responses = [response for group in groups for response in group["responses"]]
    most_of_prompt = min(LONGEST_PROMPT, fitting([group["prompt"] for group in groups], BYTES // 3))
    most = min(LONGEST, fitting([response["text"] for response in responses], BYTES - BYTES // 3))
    for group in groups:
        group["prompt"], group["prompt_cut"] = shortened(group["prompt"], most_of_prompt)
    for response in responses:
        parts, kept = response.pop("turns"), most
        if parts:
            response["turns"] = []
            for part in parts:
                response["turns"].append(shortened(part, kept)[0])
                kept = max(kept - len(part), 0)
        text, response["cut"] = shortened(response.pop("text"), most)
        if not parts:
            response["text"] = text
