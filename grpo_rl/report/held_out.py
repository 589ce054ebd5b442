"""Data of the held-out responses on a run's page, before and after training, prompt by prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_rl.monitor.step_parts import HELD_OUT_FOLDER, StepParts
from grpo_rl.report.sample import evenly, fitting, rounded, shortened
from grpo_rl.storage.printable import printable

ROWS, BYTES = 150, 500_000
"""At most so many held-out rows are on the page, and so many bytes of their texts."""
LONGEST = 4000


def build(run_dir: Path) -> dict[str, Any] | None:
    """Held-out rows with their responses in the first and the last evaluation; None where no evaluation is stored.

    Of many rows there are the quarter that gained most, the quarter that lost most, and others, evenly spaced.

    Raises:
        ValueError: the responses of an evaluation can't be read; names the file.
    """
    parts = StepParts(run_dir / HELD_OUT_FOLDER)
    steps = parts.steps()
    if not steps:
        return None
    first = parts.read(steps[0]).to_pylist()
    last = {row["row"]: row for row in parts.read(steps[-1]).to_pylist()} if len(steps) > 1 else {}
    pairs = [(before, last.get(before["row"])) for before in first]
    chosen = _choose(pairs)
    texts = [row["completion"] for pair in chosen for row in pair if row]
    most = min(LONGEST, fitting(texts, BYTES - BYTES // 3))
    most_of_prompt = min(LONGEST, fitting([before["prompt"] for before, _ in chosen], BYTES // 3))
    rows = []
    for before, after in chosen:
        prompt, cut = shortened(before["prompt"], most_of_prompt)
        row = {"row": before["row"], "prompt": prompt, "prompt_cut": cut, "gain": _gain(before, after)}
        row["gold"] = printable(before["answer"] or "")[:500]
        rows.append(row | {"responses": [_response(one, most) for one in (before, after) if one]})
    gains = [gain for pair in pairs if (gain := _gain(*pair)) is not None]
    return {
        "rows": rows,
        "all": len(first),
        "steps": [steps[0], steps[-1]] if last else [steps[0]],
        "better": sum(gain > 0 for gain in gains),
        "worse": sum(gain < 0 for gain in gains),
        "same": sum(gain == 0 for gain in gains),
    }


def _choose(pairs: list[tuple[dict[str, Any], dict[str, Any] | None]]) -> list[tuple[dict, dict | None]]:
    if len(pairs) <= ROWS:
        return pairs
    order = sorted(range(len(pairs)), key=lambda i: _gain(*pairs[i]) or 0.0)
    kept = {*order[: ROWS // 4], *order[-(ROWS // 4) :]}
    kept |= set(evenly([i for i in range(len(pairs)) if i not in kept], ROWS - len(kept)))
    return [pairs[i] for i in sorted(kept)]


def _gain(before: dict[str, Any], after: dict[str, Any] | None) -> float | None:
    if after is None or before["reward"] is None or after["reward"] is None:
        return None
    return round(after["reward"] - before["reward"], 4)


def _response(row: dict[str, Any], most: int) -> dict[str, Any]:
    text, cut = shortened(row["completion"], most)
    shown = {name: row[name] for name in ("step", "tokens", "truncated")}
    return shown | {"text": text, "cut": cut, "reward": rounded(row["reward"])}
