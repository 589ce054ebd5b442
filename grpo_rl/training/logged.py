"""The logs of a run, as a checkpoint vouches for them: on the disk before the checkpoint is, and known by digest.

A checkpoint lists ``metrics.jsonl`` as far as it goes, and the files of the steps since the checkpoint before; earlier
files are older checkpoints' to vouch for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from grpo_rl.monitor.metrics import METRICS_FILE
from grpo_rl.monitor.step_parts import STEP_FOLDERS, StepParts
from grpo_rl.storage.whole_file import sync

LOGS = "logs"
"""The entry of a checkpoint's state with what :func:`sync_logs` returned."""


class GrowingDigest:
    """The SHA-256 of a file that only grows, of which each byte is read once."""

    def __init__(self) -> None:
        self._sha256, self._length = hashlib.sha256(), 0

    def until(self, path: Path, length: int) -> list[int | str]:
        """Length and SHA-256 of the file's first bytes, which are no fewer than those of the call before."""
        with path.open("rb") as file:
            file.seek(self._length)
            content = file.read(length - self._length)
        self._sha256.update(content)
        self._length += len(content)
        return [self._length, self._sha256.hexdigest()]


def sync_logs(
    run: Path, last: int, step: int, metrics_bytes: int, metrics: GrowingDigest
) -> dict[str, list[int | str]]:
    """Length and SHA-256 of what a run had logged by a step, by the path in its folder, once it is on the disk.

    A checkpoint must not outlive the steps that led to it. The run may log later steps meanwhile: they are left out.

    Args:
        run: the run's folder.
        last: step of the checkpoint before; files of steps until then are on the disk since then.
        metrics_bytes: length of ``metrics.jsonl`` at the end of the step.
        metrics: digest of ``metrics.jsonl``, kept from one checkpoint of a run to the next.
    """
    logs: dict[str, list[int | str]] = {}
    for name in STEP_FOLDERS:
        written = sorted(path for path in (run / name).glob("[!.]*.parquet") if last < step_of(path) <= step)
        for path in written:
            sync(path)
            logs[f"{name}/{path.name}"] = _digest(path)
        if written:
            sync(run / name)
    if (run / METRICS_FILE).exists():
        sync(run / METRICS_FILE)
        logs[METRICS_FILE] = metrics.until(run / METRICS_FILE, metrics_bytes)
    sync(run)
    return logs


def _digest(path: Path, length: int | None = None) -> list[int | str]:
    content = path.read_bytes()[:length]
    return [len(content), hashlib.sha256(content).hexdigest()]


def metrics_bytes(run: Path) -> int:
    """The length of a run's ``metrics.jsonl``; 0 where there is none."""
    return (run / METRICS_FILE).stat().st_size if (run / METRICS_FILE).exists() else 0


def vouched_bytes(logs: Mapping[str, list]) -> int | None:
    """Bytes of ``metrics.jsonl`` that a checkpoint vouches for; None where it was written without metrics."""
    return logs[METRICS_FILE][0] if METRICS_FILE in logs else None


def damaged(run: Path, logs: Mapping[str, list]) -> str | None:
    """Says which log is not as a checkpoint lists it; None if all are. Metrics of later steps may follow.

    Folders that were removed as a whole are nobody's damage.
    """
    for name, (length, digest) in logs.items():
        try:
            if found := _damage_of(run / name, length, digest, grows=name == METRICS_FILE):
                return found
        except OSError as error:
            return f"{run / name} can't be read ({error.strerror})"
    return None


def _damage_of(path: Path, length: int, digest: str, grows: bool) -> str | None:
    if not path.exists():
        return f"{path} is gone" if grows or path.parent.exists() else None
    if not grows and path.stat().st_size != length:
        return f"{path} has {path.stat().st_size} bytes, and had {length} when it was written"
    found = _digest(path, length)
    if found[0] < length:
        return f"{path} ends after {found[0]} of {length} bytes: the rest is lost"
    return f"{path} is not as it was written (another SHA-256)" if found[1] != digest else None


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
