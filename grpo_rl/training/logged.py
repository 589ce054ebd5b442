"""The logs of a run that lead to a checkpoint: on the disk before the checkpoint is, and known by their lengths.

A checkpoint lists ``metrics.jsonl`` as far as it goes, and the files of the steps since the checkpoint before; earlier
files are listed by older checkpoints.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from grpo_rl.monitor.metrics import METRICS_FILE, read_metrics
from grpo_rl.monitor.step_parts import STEP_FOLDERS, StepParts
from grpo_rl.storage.whole_file import sync

LOGS = "logs"
"""The entry of a checkpoint's state with what :func:`sync_logs` returned."""


def sync_logs(run: Path, last: int, step: int, metrics_bytes: int) -> dict[str, int]:
    """The lengths of what a run had logged by a step, by the path in its folder, once it is on the disk.

    A checkpoint must not outlive the steps that led to it. The run may log later steps meanwhile: they are left out.

    Args:
        last: step of the checkpoint before; files of steps until then are on the disk since then.
        metrics_bytes: length of ``metrics.jsonl`` at the end of the step.
    """
    logs: dict[str, int] = {}
    for name in STEP_FOLDERS:
        written = sorted(path for path in (run / name).glob("[!.]*.parquet") if last < step_of(path) <= step)
        for path in written:
            sync(path)
            logs[f"{name}/{path.name}"] = path.stat().st_size
        if written:
            sync(run / name)
    if (run / METRICS_FILE).exists():
        sync(run / METRICS_FILE)
        logs[METRICS_FILE] = metrics_bytes
    sync(run)
    return logs


def metrics_bytes(run: Path) -> int:
    """The length of a run's ``metrics.jsonl``; 0 where there is none."""
    return (run / METRICS_FILE).stat().st_size if (run / METRICS_FILE).exists() else 0


def last_logged(run: Path, length: int | None = None) -> int:
    """The last step in a run's metrics, or in so many bytes of them; 0 where there is none.

    Raises:
        ValueError: a line is not one of metrics; names it.
    """
    exists = (run / METRICS_FILE).exists()
    return max((int(row["step"]) for row in read_metrics(run, length)), default=0) if exists else 0


def damaged(run: Path, logs: Mapping[str, int], step: int) -> str | None:
    """Names a log that lacks entries which a checkpoint of this step lists; None if none does.

    Metrics of later steps may follow, and folders of logs may be removed as a whole.
    """
    path, length = run / METRICS_FILE, logs.get(METRICS_FILE)
    try:
        if (found := metrics_bytes(run)) < (length or 0):
            return f"{path} ends after {found} of {length} bytes: the rest is lost"
        if (last := last_logged(run, length)) < step:
            return f"{path} ends at step {last}, and it is of step {step}: the rest is lost"
        for name, length in logs.items():
            path = run / name
            if name == METRICS_FILE or not path.parent.exists():
                continue
            if not path.exists():
                return f"{path} is gone"
            if (found := path.stat().st_size) != length:
                return f"{path} has {found} bytes, and had {length} when it was written"
    except ValueError as error:  # names the line
        return str(error)
    except OSError as error:
        return f"{path} can't be read ({error.strerror})"
    return None


def truncate(run: Path, step: int) -> None:
    """Drops the files of steps after ``step``, and what a killed run left half written."""
    for name in STEP_FOLDERS:
        StepParts(run / name).truncate(step)


def step_of(path: Path) -> int:
    """The step that a file is named by; -1 where it is named otherwise.

    >>> step_of(Path("checkpoint_000012.pt")), step_of(Path("part-00000003.parquet")), step_of(Path("copied.pt"))
    (12, 3, -1)
    """
    number = re.search(r"\d+", path.name)
    return int(number[0]) if number else -1
