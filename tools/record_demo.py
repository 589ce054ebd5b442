"""Makes the recorded run of ``grpo-rl report --demo`` from a run's folder: `python tools/record_demo.py RUN`.

The run is one of ``grpo-rl train +experiment=quickstart`` on a quiet machine, 7 to 15 minutes on two CPU cores.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import yaml

from grpo_rl.monitor.metrics import METRICS_FILE
from grpo_rl.monitor.step_parts import STEP_FOLDERS
from grpo_rl.report.command import NAME, RECORDED
from grpo_rl.report.files import CONFIG, EVALUATION, OVERRIDES, SUMMARY, read_config, read_overrides, read_summary
from grpo_rl.storage.masking import masked

_PLACE = re.compile(r"(?<![\w:/.~-])(?:file://)?~?/(?:[\w.@+-]+/)*([\w.@+-]*)")


def pack(run_dir: Path, path: Path) -> None:
    """Writes the archive of a run: all that its page shows, without secrets and without places on this machine.

    Raises:
        ValueError: a file of the run can't be read, or there are no metrics; names the file.
    """
    if not (run_dir / METRICS_FILE).exists():
        raise ValueError(f"{run_dir} holds no {METRICS_FILE}; give the folder of a run")
    files = {
        CONFIG: yaml.safe_dump(_without_places(masked(read_config(run_dir))), sort_keys=False).encode(),
        OVERRIDES: yaml.safe_dump(_without_places(read_overrides(run_dir))).encode(),
        SUMMARY: json.dumps(_without_places(read_summary(run_dir)), indent=2).encode() + b"\n",
    }
    whole = [run_dir / METRICS_FILE, run_dir / EVALUATION]
    whole += [part for folder in STEP_FOLDERS for part in sorted((run_dir / folder).glob("part-*.parquet"))]
    files |= {part.relative_to(run_dir).as_posix(): _content(part) for part in whole if part.exists()}
    with tarfile.open(path, "w:xz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{NAME}/{name}")  # owned by no one, and of no time
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def _content(path: Path) -> bytes:
    """The file's bytes; of a Parquet file without its metadata, which may hold the config."""
    if path.suffix != ".parquet":
        return path.read_bytes()
    written = io.BytesIO()
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), written, compression="zstd")
    return written.getvalue()


def _without_places(value: object) -> object:
    """The same with the last part alone of each absolute path.

    >>> _without_places({"path": "/home/me/data/train.jsonl", "command": "python /x/y.py a=https://host/z b=/tmp/c"})
    {'path': 'train.jsonl', 'command': 'python y.py a=https://host/z b=c'}
    """
    if isinstance(value, dict):
        return {key: _without_places(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_places(inner) for inner in value]
    return _PLACE.sub(r"\1", value) if isinstance(value, str) else value


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    pack(Path(sys.argv[1]), RECORDED)
    print(f"{RECORDED}: {RECORDED.stat().st_size:,} bytes")
