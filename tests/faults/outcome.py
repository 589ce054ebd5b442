"""The outcome of a run that was killed and went on, beside that of one that no one disturbed."""

import json
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from starts import GROUPS, STEPS
from tiny_runs import same, without_clocks

from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.training.checkpoint import checkpoints, load

SET_ASIDE = (".log", ".abandoned", ".old")
"""Ends of names that no one reads: set aside, or half written by a process that was killed and that none followed."""


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint in a run's folder; None where there is none."""
    found = checkpoints(folder / "checkpoints")
    return int(found[-1].stem.rpartition("_")[2]) if found else None


def began_wrongly(said: str, status: int, newest: int | None) -> str | None:
    """The fault in how a start began, in the folder whose newest checkpoint was of this step; None: nothing."""
    if "is finished after" in said:
        return None
    resumed = [int(step) for step in re.findall(r"Resumed after step (\d+)", said)]
    expected = [newest] if newest is not None else []
    # One that was killed before it said anything is judged by those after it.
    if resumed != expected and (resumed or status != -signal.SIGKILL):
        return f"went on from {resumed or 'the beginning'}, the newest checkpoint being of step {newest}"
    return None


def counted(run: Path) -> list[str]:
    """Losses and doublings among the steps and the groups that a run trains on."""
    rows = [row for row in read_metrics(run) if "reward/mean" in row]
    lineage = pq.read_table(run / "tokens.parquet", columns=["step", "group_id", "epoch"]).to_pylist()
    trained = {(row["step"], row["group_id"], row["epoch"]) for row in lineage}
    responses = pq.read_table(run / "completions.parquet", columns=["step", "group_id"]).to_pylist()
    stored = [group for _, group in {(row["step"], row["group_id"]) for row in responses}]
    faults = []
    for what, found, expected in (
        ("step", [row["step"] for row in rows], range(1, STEPS + 1)),
        ("group of the lineage", [group for _, group, _ in trained], range(GROUPS * STEPS)),
        ("group of the completions", stored, range(GROUPS * STEPS)),
    ):
        counts = Counter(found)
        faults += [f"lost: {what} {i}" for i in expected if not counts[i]]
        faults += [f"doubled: {what} {i}" for i, count in counts.items() if count > 1]
    for row in rows:
        if "groups/started" in row:
            dropped = sum(value for name, value in row.items() if name.startswith("groups/dropped"))
            if row["groups/started"] != row["groups/trained"] + row["groups/open"] + dropped:
                faults.append(f"lost: a group started by step {row['step']}")
    return faults


def _checkpoint(run: Path) -> dict[str, Any]:
    state = load(checkpoints(run / "checkpoints")[-1])
    return {name: value for name, value in state.items() if name not in ("seconds", "config", "origin", "logs")}


def _summary(run: Path) -> dict[str, Any]:
    found = without_clocks(json.loads((run / "summary.json").read_text()))
    return {name: value for name, value in found.items() if name != "git_commit"}  # of the start that ended


def _evaluation(run: Path) -> dict[str, Any]:
    found = json.loads((run / "evaluation.json").read_text())
    return {name: value for name, value in found.items() if name not in ("line", "sha256")}  # of metrics with clocks


def _files(run: Path) -> list[str]:
    """All files but hidden ones and those of late waits, which a busy machine has."""
    left = (path.relative_to(run) for path in run.rglob("*") if not path.name.startswith((".", "waits.")))
    return sorted(str(path) for path in left if not any(part.endswith(SET_ASIDE) for part in path.parts))


def _table(name: str) -> Callable[[Path], list[dict]]:
    return lambda run: pq.read_table(run / name).to_pylist()


def certain(run: Path) -> dict[str, Any]:
    """The counts of a run's last checkpoint, and the names and shapes of its tensors with those that are not finite."""
    state = load(checkpoints(run / "checkpoints")[-1])
    optimizer = state["optimizer"]
    tensors = {**optimizer["masters"]}
    for number, of_weight in optimizer["optimizer"]["state"].items():
        tensors |= {f"{number} {name}": tensor for name, tensor in of_weight.items()}
    return {
        "counters": [optimizer["counters"], state["step"], state["version"], state["collected"]],
        "responses": [row["total/responses"] for row in read_metrics(run) if "total/responses" in row],
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "not finite": [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())],
    }


def _responses(run: Path) -> dict[tuple[int, int], str]:
    rows = pq.read_table(run / "tokens.parquet", columns=["group_id", "response", "token_id"]).to_pylist()
    texts: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        texts.setdefault((row["group_id"], row["response"]), []).append(row["token_id"])
    return {key: str(ids) for key, ids in texts.items()}


EXACT: dict[str, Callable[[Path], Any]] = {
    "metrics": lambda run: [without_clocks(row) for row in read_metrics(run)],
    "completions": _table("completions.parquet"),
    "tokens": _table("tokens.parquet"),
    "held_out": _table("held_out.parquet"),
    "checkpoint": _checkpoint,
    "model": lambda run: (run / "model" / "model.safetensors").read_bytes(),
    "evaluation": _evaluation,
    "summary": _summary,
    "files": _files,
}
"""Views of a run that are equal to the last bit where a mode promises it."""
SAMPLED_ALIKE: dict[str, Callable[[Path], Any]] = {
    "responses": _responses,
    "prompts": lambda run: {(row["group_id"], row["row"]) for row in _table("tokens.parquet")(run)},
    "certain": certain,
    "files": lambda run: [name for name in _files(run) if not name.startswith("sampling.parquet/")],
}
"""Views of an async run, whose batches, weights and steps in which nothing was sampled depend on when groups end."""


def differences(folder: Path, whole: Path, exact: bool = True) -> list[str]:
    """The differences of a finished run from the undisturbed one."""
    views = EXACT if exact else SAMPLED_ALIKE
    return [f"{name} differs" for name, view in views.items() if not same(view(folder), view(whole))]


def compared(folder: Path, whole: Path, exact: bool = True) -> list[str]:
    """The entries that a finished run lost, has twice, or has different from the undisturbed one."""
    return [*counted(folder), *differences(folder, whole, exact)]
