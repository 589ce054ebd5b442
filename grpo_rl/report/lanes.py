"""Data of the lanes on a run's page: what trainer and engines did over the time of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from grpo_rl.monitor.step_parts import SAMPLING_FOLDER, StepParts
from grpo_rl.monitor.step_phases import STEP_PHASES as PHASES
from grpo_rl.report.files import read_rows
from grpo_rl.report.sample import binned

POINTS = 1500
"""An engine's curve has at most so many points."""


def build(run_dir: Path) -> dict[str, Any] | None:
    """Steps with their phases, evaluations, and groups in flight by engine; None where no step's time is recorded.

    Of very many steps, and of evaluations, neighbours are put together. Times are in seconds since the run's start.

    Raises:
        ValueError: metrics or ``sampling.parquet`` can't be read; names the file.
    """
    steps, evaluations, last, assumed = [], [], 0.0, False
    for row in read_rows(run_dir):
        spent = [row.get(f"time/{phase}_s", 0.0) for phase in PHASES]
        at = row.get("time/at_s")
        if "time/train_s" in row:
            end = last + sum(spent) if at is None else at
            assumed |= at is None
            steps.append(
                {
                    "step": int(row["step"]),
                    "begun": _rounded(max(end - sum(spent), 0.0)),
                    "phases": [_rounded(seconds) for seconds in spent],
                    "stale": [row.get("staleness/mean"), row.get("staleness/max")],
                    "open": row.get("groups/open"),
                }
            )
            last = end
        if seconds := row.get("time/evaluate_s"):
            begun = last if at is None else at
            evaluations.append([int(row["step"]), _rounded(begun), _rounded(seconds)])
            last = begun + seconds
    if not steps:
        return None
    used = [i for i in range(len(PHASES)) if any(step["phases"][i] > 0 for step in steps)]
    for step in steps:
        step["phases"] = [step["phases"][i] for i in used]
    return {
        "phases": [PHASES[i] for i in used],
        "steps": [_together(some) for some in binned(steps)],
        "evaluations": [
            [some[-1][0], some[0][1], _rounded(sum(one[2] for one in some))] for some in binned(evaluations)
        ],
        "engines": _engines(run_dir),
        "assumed": assumed,
    }


def _together(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Neighbouring steps as one, which begins with the first and is as long as all of them; ``first`` is its number."""
    if len(steps) == 1:
        return {**steps[0], "first": steps[0]["step"]}
    stale = [step["stale"] for step in steps if None not in step["stale"]]
    return {
        "first": steps[0]["step"],
        "step": steps[-1]["step"],
        "begun": steps[0]["begun"],
        "phases": [_rounded(sum(seconds)) for seconds in zip(*(step["phases"] for step in steps), strict=True)],
        "stale": [sum(mean for mean, _ in stale) / len(stale), max(top for _, top in stale)] if stale else [None, None],
        "open": steps[-1]["open"],
    }


def _engines(run_dir: Path) -> list[dict[str, Any]]:
    """Groups in flight in each engine over time, as times at which their number changes to a value."""
    parts = StepParts(run_dir / SAMPLING_FOLDER)
    changes: dict[str, dict[float, int]] = {}
    groups: dict[str, int] = {}
    for step in parts.steps():
        stat = parts.path(step).stat()
        for engine, begun, ended in _sampled(parts.folder, step, stat.st_size, stat.st_mtime_ns):
            of_engine = changes.setdefault(engine, {})
            for time, change in ((begun, 1), (ended, -1)):
                of_engine[time] = of_engine.get(time, 0) + change
            groups[engine] = groups.get(engine, 0) + 1
    return [
        {"name": engine, "groups": groups[engine], "curve": curve(of_engine)}
        for engine, of_engine in sorted(changes.items())
    ]


@lru_cache(maxsize=20_000)  # a page that is live is built again and again, and parts stay as they are
def _sampled(folder: Path, step: int, _size: int, _modified: int) -> list[tuple[str, float, float]]:
    names = ["engine", "begun_s", "ended_s"]
    columns = StepParts(folder).read(step, names).to_pydict()
    return list(zip(*(columns[name] for name in names), strict=True))


def curve(changes: Mapping[float, int]) -> list[list[float]]:
    """Times and the number from then on; where they are many, the most of each of even stretches of time.

    >>> curve({1.0: 2, 2.0: -1, 3.0: -1})
    [[1.0, 2], [2.0, 1], [3.0, 0]]
    """
    points, number = [], 0
    for time in sorted(changes):
        number += changes[time]
        points.append([time, number])
    if len(points) <= POINTS:
        return [[_rounded(time), number] for time, number in points]
    begun, length = points[0][0], (points[-1][0] - points[0][0]) / POINTS
    most: dict[int, list[float]] = {}
    before = 0
    for time, number in points:
        place = min(int((time - begun) / length), POINTS - 1)
        # What was in flight when the stretch began counts for it too.
        found = most.setdefault(place, [begun + place * length, before])
        found[1] = max(found[1], number)
        before = number
    thinned = [[_rounded(most[place][0]), most[place][1]] for place in sorted(most)]
    return [*thinned, [_rounded(points[-1][0]), points[-1][1]]]


def _rounded(seconds: float) -> float:
    return round(seconds, 3)
