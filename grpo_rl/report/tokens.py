"""Data of the token strips on a run's page: responses token by token, with what sampler and trainer made of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts
from grpo_rl.report.sample import evenly, rounded
from grpo_rl.storage.printable import printable

STEPS, RESPONSES_OF_STEP, TOKENS_OF_RESPONSE = 30, 4, 400
"""At most so many steps are on the page, of each so many responses, and of each of these so many tokens."""
KEY = ("group_id", "response")
NUMBERS = {"sampler_log_prob": "sampler", "log_prob": "trainer", "entropy": "entropy"}
"""Columns of numbers, and their names on the page."""
SHOWN = (*KEY, "row", "token_id", "text", "special", "trainable", "policy_version", *NUMBERS)


def recorded_groups(run_dir: Path) -> set[tuple[int, int]]:
    """The groups on the page token by token, each by its step and its id."""
    found = build(run_dir) or {"responses": []}
    return {(response["step"], response["group"]) for response in found["responses"]}


def build(run_dir: Path) -> dict[str, Any] | None:
    """Responses with their tokens; None where no tokens are recorded.

    Raises:
        ValueError: ``tokens.parquet`` can't be read; names the part.
    """
    parts = StepParts(run_dir / TOKENS_FOLDER)
    steps = parts.steps()
    responses = []
    for step in evenly(steps, STEPS):
        rows = parts.read(step, SHOWN).filter(pc.field("text").is_valid()).to_pylist()
        tokens = {key: list(of_response) for key, of_response in groupby(rows, itemgetter(*KEY))}
        first = sorted(tokens, key=itemgetter(1))[:RESPONSES_OF_STEP]
        responses += [{"step": step} | _response(tokens[key]) for key in first]
    if not responses:
        return None  # with train.lineage=true and logger.token_groups=0 there are tokens without a text
    return {"responses": responses, "all_steps": len(steps)}


def _response(tokens: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
