"""Data of the token strips on a run's page: responses token by token, with what sampler and trainer made of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from grpo_rl.monitor.step_parts import COMPLETIONS_FOLDER, TOKENS_FOLDER, StepParts
from grpo_rl.monitor.stored_tokens import shown_tokens
from grpo_rl.report.sample import evenly, rounded
from grpo_rl.storage.printable import printable

TOKENS, TOKENS_OF_RESPONSE = 30_000, 512
"""At most about so many tokens are on the page, and at most so many of one response."""
RESPONSES_OF_STEP = 4
NUMBERS = {"sampler_log_prob": "sampler", "log_prob": "trainer", "entropy": "entropy"}
"""Columns of numbers, and their names on the page."""
KEY = ("group_id", "response")
SHOWN = (*KEY, "token_id", "special", "trainable", "policy_version", *NUMBERS)


def build(run_dir: Path) -> dict[str, Any] | None:
    """Responses with their tokens, and the scales to colour them by; None where no tokens are recorded.

    A scale ends at the 99th percentile of its values: a few outliers would leave all others pale.

    Raises:
        ValueError: ``tokens.parquet`` can't be read; names the part.
    """
    steps = StepParts(run_dir / TOKENS_FOLDER).steps()
    # Steps are alike, so that the newest one shows how many fit; the bound below holds in any case.
    rows = len(shown_tokens(run_dir, steps[-1], [])) if steps else 0
    if not rows:
        return None  # with train.lineage=true and logger.token_groups=0 there are tokens without a text
    texts: dict[str, int] = {}
    responses: list[dict[str, Any]] = []
    left = TOKENS
    for step in evenly(steps, max(2, TOKENS // min(rows, RESPONSES_OF_STEP * TOKENS_OF_RESPONSE))):
        for response in _responses(run_dir, step, texts):
            if len(response["ids"]) <= left:
                left -= len(response["ids"])
                responses.append(response)
    sampler, trainer, entropy = ([x for r in responses for x in r[name]] for name in NUMBERS.values())
    gaps = [abs(a - b) for a, b in zip(sampler, trainer, strict=True) if a is not None and b is not None]
    return {
        "texts": list(texts),
        "responses": responses,
        "scales": {
            "log_prob": _top([-x for x in sampler if x is not None], 1.0),
            "entropy": _top([x for x in entropy if x is not None], 0.1),
            "mismatch": _top(gaps, 0.01),
        },
        "all_steps": len(steps),
        "shown_steps": len({response["step"] for response in responses}),
    }


def _responses(run_dir: Path, step: int, texts: dict[str, int]) -> list[dict[str, Any]]:
    """The responses of a step to show: the first of each group, then its best, its worst, and others."""
    table, about = shown_tokens(run_dir, step, SHOWN), _about(run_dir, step)
    sizes = Counter(zip(*(table[name].to_pylist() for name in KEY), strict=True))
    starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    found = []
    for key in _choose(sizes, about):
        tokens = table.slice(starts[key], min(sizes[key], TOKENS_OF_RESPONSE)).to_pydict()
        found.append(
            {
                "step": step,
                "group": key[0],
                "response": key[1],
                **about.get(key, {}),
                "cut": sizes[key] - len(tokens["text"]),
                "ids": tokens["token_id"],
                "texts": [texts.setdefault(_shown(text), len(texts)) for text in tokens["text"]],
                "special": [i for i, special in enumerate(tokens["special"]) if special],
                "read": [i for i, trainable in enumerate(tokens["trainable"]) if not trainable],
                "versions": tokens["policy_version"],
                **{label: [rounded(x) for x in tokens[name]] for name, label in NUMBERS.items()},
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
    counts, found = Counter[int](), {}
    for row in rows:
        group_id = row.pop("group_id")
        found[group_id, counts[group_id]] = row
        counts[group_id] += 1
    return found


def _choose(
    keys: Iterable[tuple[int, int]], about: Mapping[tuple[int, int], Mapping[str, float | None]]
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


def _top(values: Sequence[float], least: float) -> float:
    """The end of a scale over these values."""
    return max(round(float(np.quantile(values, 0.99)), 3), least) if values else least
