"""Data of the token strips on a run's page: responses token by token, with what sampler and trainer made of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from grpo_rl.monitor.step_parts import COMPLETIONS_FOLDER, TOKENS_FOLDER, StepParts
from grpo_rl.report.sample import evenly
from grpo_rl.storage.printable import printable

TOKENS, TOKENS_OF_RESPONSE = 30_000, 512
"""At most about so many tokens are on the page, and at most so many of one response."""
RESPONSES_OF_STEP = 4
NUMBERS = {"sampler_log_prob": "sampler", "log_prob": "trainer", "entropy": "entropy"}
"""Columns of numbers, and their names on the page."""
SHOWN = ("group_id", "response", "token_id", "special", "trainable", "policy_version", *NUMBERS)


def build(run_dir: Path) -> dict[str, Any] | None:
    """Responses with their tokens, and the scales to colour them by; None where no tokens are recorded.

    A scale ends at the 99th percentile of its values: a few outliers would leave all others pale.

    Raises:
        ValueError: ``tokens.parquet`` can't be read; names the part.
    """
    parts = StepParts(run_dir / TOKENS_FOLDER)
    steps = parts.steps()
    # Steps are alike, so that the newest one says how many there is room for; the bound below holds in any case.
    rows = len(parts.read(steps[-1], ["text"])["text"].drop_null()) if steps else 0
    if not rows:
        return None  # with train.lineage=true and logger.token_groups=0 there are tokens without a text
    texts: dict[str, int] = {}
    responses: list[dict[str, Any]] = []
    left = TOKENS
    for step in evenly(steps, max(2, TOKENS // min(rows, RESPONSES_OF_STEP * TOKENS_OF_RESPONSE))):
        for response in _responses(run_dir, step, texts):
            if left - len(response["ids"]) < 0:
                break
            left -= len(response["ids"])
            responses.append(response)
    pairs = [pair for r in responses for pair in zip(r["sampler"], r["trainer"], strict=True) if None not in pair]
    return {
        "texts": list(texts),
        "responses": responses,
        "scales": {
            "log_prob": _top([-x for r in responses for x in r["sampler"] if x is not None], 1.0),
            "entropy": _top([x for r in responses for x in r["entropy"] if x is not None], 0.1),
            "mismatch": _top([abs(a - b) for a, b in pairs], 0.01),
        },
        "all_steps": len(steps),
        "shown_steps": len({response["step"] for response in responses}),
    }


def _responses(run_dir: Path, step: int, texts: dict[str, int]) -> list[dict[str, Any]]:
    """The responses of a step to show: the first of each group, then its best, its worst, and others."""
    table = StepParts(run_dir / TOKENS_FOLDER).read(step, [*SHOWN, "text"])
    table = table.filter(table["text"].is_valid())
    about = _about(run_dir, step)
    columns = {name: table[name].to_numpy(zero_copy_only=False) for name in SHOWN}
    words = table["text"].to_pylist()
    spans: dict[tuple[int, int], list[int]] = {}
    for i, key in enumerate(zip(columns["group_id"].tolist(), columns["response"].tolist(), strict=True)):
        spans.setdefault(key, []).append(i)
    found = []
    for key in _choose(list(spans), about):
        start, size = spans[key][0], len(spans[key])
        shown = slice(start, start + min(size, TOKENS_OF_RESPONSE))
        found.append(
            {
                "step": step,
                "group": key[0],
                "response": key[1],
                **about.get(key, {}),
                "cut": size - (shown.stop - start),
                "ids": columns["token_id"][shown].tolist(),
                "texts": [texts.setdefault(_shown(text), len(texts)) for text in words[shown]],
                "special": _places(columns["special"][shown]),
                "read": _places(~columns["trainable"][shown].astype(bool)),
                "versions": columns["policy_version"][shown].tolist(),
                **{label: _numbers(columns[name][shown]) for name, label in NUMBERS.items()},
            }
        )
    return found


def _about(run_dir: Path, step: int) -> dict[tuple[int, int], dict[str, Any]]:
    """Row, reward and advantage of each response of a step, where completions are recorded, by group and number."""
    try:
        parts, names = StepParts(run_dir / COMPLETIONS_FOLDER), ["group_id", "row", "reward", "advantage"]
        rows = parts.read(step, names).to_pylist()  # without the texts, which are most of it
    except ValueError:
        return {}
    counts: dict[int, int] = defaultdict(int)
    found = {}
    for row in rows:
        group_id = row.pop("group_id")
        found[group_id, counts[group_id]] = row
        counts[group_id] += 1
    return found


def _choose(
    keys: Sequence[tuple[int, int]], about: Mapping[tuple[int, int], Mapping[str, float | None]]
) -> list[tuple[int, int]]:
    """Responses of a step that are shown, in its order: of each group in turn the first, best, worst, second, …"""
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for key in keys:
        groups[key[0]].append(key)

    def reward(key: tuple[int, int]) -> float:
        return about.get(key, {}).get("reward") or 0.0

    orders = [dict.fromkeys([of[0], max(of, key=reward), min(of, key=reward), *of]) for of in groups.values()]
    turn = [key for turn in zip_longest(*orders) for key in turn if key]
    return [key for key in keys if key in turn[:RESPONSES_OF_STEP]]


def _shown(text: str) -> str:
    return printable(text) if text.strip() else text.replace("\t", " ").replace("\r", "")


def _places(flags: np.ndarray) -> list[int]:
    return np.flatnonzero(flags.astype(bool)).tolist()


def _numbers(values: np.ndarray) -> list[float | None]:
    return [round(x, 4) if x is not None and math.isfinite(x) else None for x in values.astype(float).tolist()]


def _top(values: Sequence[float], least: float) -> float:
    """The end of a scale over these values."""
    return max(round(float(np.quantile(values, 0.99)), 3), least) if values else least
