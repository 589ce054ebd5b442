"""Metrics and responses in Weights & Biases, online or offline; wandb is imported only where it is used."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

LIBRARY = "wandb"
ID_FILE = "wandb_id"
SERVER, KEYS = "https://api.wandb.ai", ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
SECTION = "a_overview"
"""The section of the overview: W&B sorts sections by name, so that it comes first."""
OVERVIEW = {
    "reward/mean": "reward",
    "eval/reward": "held-out reward",
    "loss/sft": "loss of demonstrations",
    "eval/loss": "held-out loss",
    "reward/zero_std_fraction": "zero-variance groups",
    "response/mean_length": "response length",
    "response/truncated_fraction": "truncated responses",
    "entropy": "entropy",
    "kl/ref": "KL to the reference",
    "mismatch/mean": "sampler against trainer",
    "clip/high_fraction": "clipped tokens",
    "grad_norm": "gradient norm",
    "throughput/sample_tokens_per_s": "sampled tokens per second",
    "throughput/train_tokens_per_s": "trained tokens per second",
}
"""Metrics that the overview shows again, by the names that they have there."""
TOKENS = "total/sampled_tokens"
STEPS = {"eval/": "eval/step", "": "step"}
"""The last step of metrics with these beginnings, as W&B's summary has it."""
FINISH_S = 300.0
"""Longest wait for an upload at the end of a run."""


class Log:
    """A W&B run that belongs to the run folder: its files lie there, and a resumed run goes on under the same id.

    Points are placed by the metric ``step``; ``tokens`` is there as another axis. W&B draws a panel for each metric, in
    sections by the first part of their names: a dozen of them are logged twice, in a section that comes first.

    What a resumed run logs again is there once. W&B takes nothing back: online the points that it has stay, and those
    of the same steps are left out. Offline the run is written anew from the run folder, and the earlier files that
    were not uploaded are set aside.

    Args:
        mode: ``online``, or ``offline`` to upload later with ``wandb sync``.
        more: further arguments of `wandb.init`, such as entity, group, tags.

    Raises:
        ValueError: wandb is not installed, or online has no key or no connection.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        last_step: int = -1,
        *,
        project: str = "grpo_rl",
        name: str | None = None,
        mode: Literal["online", "offline"] = "online",
        **more: Any,
    ) -> None:
        import wandb
        import wandb.errors

        id_file = run_dir / ID_FILE
        run_id = id_file.read_text().strip() if id_file.exists() else None  # None: W&B makes one
        self.needs_history = mode == "offline" and _set_aside(run_dir)
        try:
            self._run: wandb.Run = wandb.init(
                project=project,
                name=name,
                id=run_id,
                resume="allow" if mode == "online" else None,  # offline has no server to ask; syncing joins by id
                mode=mode,
                dir=run_dir,
                config=dict(config),
                # A live terminal view is on: W&B must neither draw over it nor record it. A server that is away must
                # not hold up the end of a run: what was not uploaded stays on the disk for `wandb sync`. Its own record
                # of the command line would have the secrets in it; the run's summary has the command without them.
                settings=wandb.Settings(
                    silent=True, console="off", finish_timeout=FINISH_S, finish_timeout_raises=True, x_disable_meta=True
                ),
                **more,
            )
        except wandb.errors.Error as error:
            remedy = "Log in with `wandb login` or WANDB_API_KEY, or set logger.mode=offline or logger.backend=none"
            raise ValueError(f"W&B cannot start online: {error}. {remedy}") from error
        self._offline = mode == "offline"
        id_file.write_text(self._run.id + "\n")
        self._there = {kind: int(self._run.summary.get(name, -1)) for kind, name in STEPS.items()}
        self._last_step = last_step
        for axis in (*STEPS.values(), "tokens"):
            self._run.define_metric(axis, hidden=True)
        self._run.define_metric("*", step_metric="step")

    @staticmethod
    def check_account(logger: Mapping[str, Any]) -> str:
        """The line of `grpo-rl doctor` on W&B's key, or a ValueError if it is missing; no server is contacted."""
        import requests  # which wandb brings

        mode = logger["settings"].get("wandb", {}).get("mode", logger["mode"])
        server = os.environ.get("WANDB_BASE_URL", SERVER)
        if mode != "online":
            return f"{mode}: no key is needed, and nothing is sent; `wandb sync` uploads it later"
        if any(map(os.environ.get, KEYS)) or requests.utils.get_netrc_auth(server):  # the latter by `wandb login`
            return f"online, with a key for {server}"
        remedy = f"wandb login, or {KEYS[0]}; or set logger.mode=offline or logger.backend=none"
        raise ValueError(f"online, and no key is here: {remedy}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step, but for those that W&B has already; those of the overview twice."""
        if not (new := missing(step, metrics, self._there, self._last_step)):
            return
        row = {"step": step, **new}
        row |= {f"{SECTION}/{title}": new[name] for name, title in OVERVIEW.items() if name in new}
        if TOKENS in new:
            row["tokens"] = new[TOKENS]
        if any(name.startswith("eval/") for name in new):
            row[STEPS["eval/"]] = step
        self._run.log(row)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Sends the rows of a step (see `grpo_rl.monitor.completions.completion_rows`) as a table."""
        import wandb

        # What W&B has of this step came from a continuation that was abandoned; a table can't be replaced either.
        if rows and step > self._there[""]:
            columns = list(rows[0])
            data = [[row[column] for column in columns] for row in rows]
            self._run.log({"step": step, "completions": wandb.Table(columns=columns, data=data)})

    def close(self, exit_code: int = 0) -> None:
        """Sends what is left and ends the run; a non-zero ``exit_code`` marks it as failed.

        The end of an offline run also ends other runs of this process that are not `wandb.run`, as those made with
        ``reinit="create_new"``.
        """
        import wandb

        self._run.finish(exit_code=exit_code)
        # W&B's own process writes the end of an offline run's file once `finish` has returned, on a busy machine some
        # time later. It has written it when it has ended.
        if self._offline and wandb.run is None:
            wandb.teardown()


def missing(step: int, metrics: Mapping[str, float], there: Mapping[str, int], last_step: int) -> dict[str, float]:
    """The metrics of a step that W&B does not have.

    Args:
        there: the last step of held-out and of other metrics that W&B has, by the beginnings of their names.
        last_step: the last step of the run so far: W&B has its rows up to there, and a later call has other names.

    >>> there = {"eval/": 2, "": 5}  # W&B got to step 5, and the run resumes after step 3
    >>> missing(3, {"eval/reward": 1.0}, there, 3)  # the evaluation that follows the last step
    {'eval/reward': 1.0}
    >>> missing(4, {"entropy": 0.5, "eval/reward": 1.0}, there, 3), missing(6, {"entropy": 0.5}, there, 3)
    ({'eval/reward': 1.0}, {'entropy': 0.5})
    """
    if step <= last_step:
        return dict(metrics)
    last = {name: there["eval/" if name.startswith("eval/") else ""] for name in metrics}
    return {name: value for name, value in metrics.items() if step > last[name]}


def _set_aside(run_dir: Path) -> bool:
    """Renames the folders of earlier offline runs, and returns whether there were any; uploaded ones stay."""
    found = [folder for folder in (run_dir / "wandb").glob("offline-run-*") if not any(folder.glob("*.synced"))]
    for folder in found:
        folder.rename(folder.with_name(f"abandoned-{folder.name}"))
    return bool(found)
