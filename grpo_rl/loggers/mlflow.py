"""Metrics and responses in MLflow; mlflow is imported only where it is used."""

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rl.loggers.base import run_name
from grpo_rl.storage.yaml_text import flat

LIBRARY = "mlflow"
ID_FILE, DATABASE, ARTIFACTS, TABLES = "mlflow_id", "mlflow.db", "mlflow_artifacts", "completions"
LONGEST_VALUE = 500
"""Characters of a setting; a longer one is cut."""


class Log:
    """An MLflow run in ``tracking_uri``, ``MLFLOW_TRACKING_URI``, or else in the run folder's ``mlflow.db``.

    A resumed run is a new MLflow run of the same name, written from the run folder: MLflow can't remove single steps.
    The earlier one is deleted.

    Args:
        project: the experiment.
        name: the run's name; None: its folder's.
        timeout_s: longest wait for a server, which is asked twice.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        last_step: int,
        *,
        project: str = "grpo_rl",
        name: str | None = None,
        tracking_uri: str | None = None,
        timeout_s: int = 10,
    ) -> None:
        # MLflow's own are two minutes and seven repetitions, for which training would wait.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(timeout_s))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("alembic").setLevel(logging.WARNING)  # it names each table of a new database
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        uri, artifacts = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), None
        if uri is None:
            uri, artifacts = f"sqlite:///{run_dir.absolute() / DATABASE}", (run_dir.absolute() / ARTIFACTS).as_uri()
        self._client = MlflowClient(uri)
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project, artifacts)
        run = self._client.create_run(experiment, run_name=name or run_name(run_dir))
        self._run_id = run.info.run_id
        params = [Param(_name(key), str(value)[:LONGEST_VALUE]) for key, value in flat(config).items()]
        for start in range(0, len(params), 100):  # the most that a server takes at once
            self._client.log_batch(self._run_id, params=params[start : start + 100])
        id_file = run_dir / ID_FILE
        self.needs_history = id_file.exists()
        if self.needs_history:
            self._client.delete_run(id_file.read_text().strip())
        id_file.write_text(f"{self._run_id}\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch = [Metric(_name(name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, batch)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = list(rows[0]) if rows else []
        # Not its log_table: that lists every file in one tag, which is full after a hundred steps.
        table = {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
        self._client.log_dict(self._run_id, table, f"{TABLES}/step_{step:06d}.json")

    def close(self, exit_code: int = 0) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if exit_code else "FINISHED")


def _name(name: str) -> str:
    """A name as MLflow takes it.

    >>> _name("reward/my.module:f"), _name("reward/50%")
    ('reward/my.module:f', 'reward/50_')
    """
    return re.sub(r"[^/\w.\- :]", "_", name)
