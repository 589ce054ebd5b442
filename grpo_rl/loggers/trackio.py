"""Metrics and responses in trackio's local store; trackio is imported only where it is used."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rl.loggers.base import run_name

LIBRARY = "trackio"
ID_FILE = "trackio_id"


class Log:
    """A trackio run of this machine: ``trackio show --project grpo_rl`` draws it, no account is needed.

    A resumed run is written anew from the run folder, as the store may hold steps after the checkpoint.

    Args:
        project: the project that the run is shown in.
        name: the run's name; None: its folder's.
    """

    needs_history = True

    def __init__(
        self, run_dir: Path, config: Mapping[str, Any], last_step: int, *, project: str, name: str | None
    ) -> None:
        import trackio

        id_file, name = run_dir / ID_FILE, name or run_name(run_dir)
        with contextlib.redirect_stdout(io.StringIO()):  # what trackio prints stays out of the terminal
            if id_file.exists():
                before = id_file.read_text().strip()
                with contextlib.suppress(ValueError):  # the project is not there: killed before it wrote anything
                    for run in [run for run in trackio.Api().runs(project) if run.id == before]:
                        run.delete()
            self._run = trackio.init(
                project, name, config=dict(config), embed=False, auto_log_gpu=False, auto_log_cpu=False
            )
        id_file.write_text(f"{self._run.id}\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import trackio

        columns = list(rows[0]) if rows else []
        table = trackio.Table(columns=columns, data=[[row[column] for column in columns] for row in rows])
        self._run.log({"completions": table}, step=step)

    def close(self, exit_code: int = 0) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
