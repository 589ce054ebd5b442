"""Metrics and completions in Weights & Biases, online or offline; wandb is imported only where it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import wandb

ID_FILE = "wandb_id"


class WandbLog:
    """A W&B run that belongs to the run folder: its files lie there, and a resumed run goes on under the same id.

    Points are placed by the metric ``step``, not by W&B's own counter: that one only grows, and would drop what a
    run resumed from an older checkpoint logs again.

    Args:
        run_dir: the run folder; the id is kept in its ``wandb_id``.
        mode: ``online``, or ``offline`` to upload later with ``wandb sync``.

    Raises:
        ValueError: wandb is not installed, or online has no key or no connection.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: Mapping[str, Any],
        *,
        project: str = "grpo_rl",
        name: str | None = None,
        mode: Literal["online", "offline"] = "online",
    ) -> None:
        try:
            import wandb
            import wandb.errors
        except ImportError as error:
            raise ValueError(
                "logger.backend=wandb, but wandb is not installed: pip install wandb, or set logger.backend=none"
            ) from error
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        id_file = run_dir / ID_FILE
        run_id = id_file.read_text().strip() if id_file.exists() else None  # None: W&B makes one
        try:
            self._run: wandb.Run = wandb.init(
                project=project,
                name=name,
                id=run_id,
                resume="allow" if mode == "online" else None,  # offline has no server to ask; syncing joins by id
                mode=mode,
                dir=run_dir,
                config=dict(config),
                # A live terminal view is on: W&B must neither draw over it nor record it.
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            raise ValueError(
                f"W&B cannot start online: {error}. Log in with `wandb login` or WANDB_API_KEY, or set "
                "logger.mode=offline or logger.backend=none"
            ) from error
        id_file.write_text(self._run.id + "\n")
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step."""
        self._run.log({"step": step, **metrics})

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Sends the rows of a step (see `grpo_rl.monitor.completions.completion_rows`) as a table."""
        import wandb

        if rows:
            columns = list(rows[0])
            data = [[row[column] for column in columns] for row in rows]
            self._run.log({"step": step, "completions": wandb.Table(columns=columns, data=data)})

    def close(self, exit_code: int = 0) -> None:
        """Sends what is left and ends the run; a non-zero ``exit_code`` marks it as failed."""
        self._run.finish(exit_code=exit_code)
