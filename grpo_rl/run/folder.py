"""RunFolder: a run's folder, locked while the run lasts, with the checkpoint that the run resumes from."""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_rl.distributed.liveness import Stopped
from grpo_rl.distributed.ranks import Ranks, agreed
from grpo_rl.monitor.metrics import METRICS_FILE, MetricsLog, read_metrics
from grpo_rl.report.files import (
    BEGAN_FROM,
    CONFIG,
    EVALUATION,
    OVERRIDES,
    REPORT,
    SUMMARY,
    read_evaluation,
    read_summary,
)  # fmt: skip
from grpo_rl.run.claim import Claim, claim, is_finished, refuse_other_run, set_logs_aside, trained
from grpo_rl.run.resumed import check_config, length_setting
from grpo_rl.run.summary import try_write_report, write_overrides
from grpo_rl.settings.config import REFUSED, RunIsOver
from grpo_rl.settings.sections import Train
from grpo_rl.storage.whole_file import remove_left, sync, write_whole
from grpo_rl.training import checkpoint, logged
from grpo_rl.training.checkpoint import Background

BEFORE_ALL = -1
"""The step to truncate logs to so that even the evaluation at step 0 is removed."""


@dataclass(frozen=True)
class Room:
    """Disk space that a run needs: the kept checkpoints, the one being written included, and the exported models.

    Args:
        models: 2 where the best model is kept next to the last one.
    """

    checkpoints: int
    checkpoint_bytes: float
    model_bytes: float
    models: int = 1

    @property
    def needed(self) -> float:
        """The bytes of all of them."""
        return self.checkpoint_bytes * self.checkpoints + self.model_bytes * self.models

    def lacking(self, folder: Path, step: float = math.inf) -> float:
        """The bytes that the run still has to write into its folder.

        Args:
            step: that it resumes after; its checkpoints up to there are some of those that it needs.
        """
        steps = map(logged.step_of, checkpoint.checkpoints(folder / checkpoint.CHECKPOINTS))
        there = sum(at <= step for at in steps)
        return self.needed - min(there, self.checkpoints - 1) * self.checkpoint_bytes

    def described(self, lacking: float) -> str:
        """The text of what the run needs, and of how much of it is still to be written."""
        model = "the exported model" if self.models == 1 else f"{self.models} exported models"
        whole = f"{self.checkpoints} checkpoints and {model} take about {self.needed / 2**30:.1f} GiB"
        return whole + ("" if lacking == self.needed else f", of which {lacking / 2**30:.1f} GiB are to be written")


class RunFolder:
    """A run's folder, locked against other processes until it is closed; used as a context manager.

    Args:
        own: the folder of a new run; a resumed run continues in the folder of its checkpoint.
        resume: a checkpoint, the folder of a run, ``auto``, or None for a new run.
        config: the whole config; a checkpoint's config is compared with it.
        config_text: the same config as YAML, for people.
        ranks: the processes that train together. Rank zero's folder is kept; each other rank writes to a temporary
            folder, removed when it closes.

    Raises:
        ValueError: the folder can't be written or is in use by another process, the disk is too small, or the
            checkpoint is of another config.
        RunIsOver: the run to resume has nothing left to do, which was reported.
    """

    def __init__(
        self,
        own: str | Path,
        resume: str | None,
        config: Mapping[str, Any],
        config_text: str,
        room: Room,
        train: Train,
        ranks: Ranks | None = None,
    ) -> None:
        self.config, self._config_text, self._ranks = config, config_text, ranks
        self._own, self._train = Path(own), train
        self.rank_zero = ranks is None or ranks.rank == 0
        self.notes: list[str] = []
        """Messages for the user, shown once there is a terminal view."""
        self.step = self.collected = 0
        self.seconds_before = 0.0
        self.restarts = 0
        """The number of times that the ranks of the run were started again, as stored in its checkpoint."""
        self.eval_before: list[float] = []
        self.eval_after: tuple[int, list[float]] | None = None
        """Step and rewards of the evaluation at the step the run resumes after, if stored."""
        self.best: dict[str, Any] | None = None
        """State of the tracker of the best evaluation at that step, if the run had one."""
        self._again = False
        self._claimed: Claim | None = None
        self._is_new = False
        """True once a new run of one process has its first files here, which a refused start removes."""
        self._saved: tuple[int, Path] | None = None
        self._stack, self._writer = ExitStack(), Background()
        try:
            self._open(resume, room)
        except BaseException as error:
            self._leave(type(error))
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(kind)
        try:
            self.settle()
        except OSError as error:
            if kind is None:
                raise
            # The error that ends the run is reported by itself; this one is logged, too, and does not replace it.
            print(f"The last checkpoint could not be written: {error}", file=sys.stderr, flush=True)

    def _leave(self, kind: type[BaseException] | None) -> None:
        """Closes; a start that was refused takes with it what it has written into the folder of a new run."""
        if kind and issubclass(kind, REFUSED) and self._is_new and not trained(self.path):
            metrics = self.path / METRICS_FILE
            if not (metrics.exists() and metrics.stat().st_size):  # no evaluation either
                for name in (CONFIG, OVERRIDES, BEGAN_FROM, METRICS_FILE):
                    (self.path / name).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Unlocks the folder, once a checkpoint that is being written is written."""
        self._writer.close()
        self._stack.close()

    def _open(self, resume: str | None, room: Room) -> None:
        # Ranks started a second apart may have got different folders; rank zero's counts, and is locked for all.
        nothing = (self._own, None, False, False)
        found = agreed(self._ranks, lambda: self._claim(resume) if self.rank_zero else nothing)
        found = self._ranks.broadcast(found) if self._ranks else found
        self.shared, resume, self.inside, over = found
        if over:
            raise RunIsOver
        self.restored = None
        if resume is not None:
            path, state = checkpoint.restore(resume, self.shared if self.inside else None, self._ranks)
            self.restored = path, checkpoint.with_own_rng(state, self._ranks)
            if self.inside and self.rank_zero:
                sync(path.parent)  # the run may have been cut off before, and goes on from this name alone
        agreed(self._ranks, lambda: self._check(room) if self.rank_zero else None)
        if not self.rank_zero:
            self.path = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        if self.restored:
            self._read(self.restored[1])
            self._saved = (self.step, self.restored[0]) if self.inside else None  # no need to write it again

    def _claim(self, resume: str | None) -> tuple[Path, str | None, bool, bool]:
        """Claims the folder; returns its path, the checkpoint, whether that is of this folder's run, and whether that
        run is over."""
        claimed = claim(self._own, resume, Path("outputs"), self.config, self._train.checkpoint_frequency)
        self._claimed = claimed
        self._stack.callback(claimed.lock.close)
        remove_left(claimed.folder)
        self.notes += [*claimed.notes, *([claimed.lock.warning] if claimed.lock.warning else [])]
        self.path, self._again = claimed.folder, claimed.again
        if claimed.over:
            print(*claimed.notes, sep="\n")
        return self.path.absolute(), str(claimed.resume) if claimed.resume else None, claimed.inside, claimed.over

    def _check(self, room: Room) -> None:
        """Refuses a folder that holds a run already, or whose disk is too small."""
        folder = self.path
        if not self.resumes:
            refuse_other_run(folder)
        lacking = room.lacking(folder, self.restored[1]["step"] if self.restored else 0)
        free = shutil.disk_usage(folder).free
        if free < lacking:
            needs = f"{folder} has {free / 2**30:.1f} GiB free, and {room.described(lacking)}"
            raise ValueError(f"{needs}; free some space or set hydra.run.dir")
        kept = room.checkpoints - 1
        count = f"{kept} checkpoint{'s' * (kept > 1)}" if kept else "checkpoints"
        what = f"{count} of {room.checkpoint_bytes / 1e9:.1f} GB and " if room.checkpoint_bytes else ""
        models = "a model" if room.models == 1 else f"{room.models} models, the last and the best one,"
        stays = "" if self._train.keep_final_checkpoint else f" (in the end the model{'s' * (room.models - 1)} alone)"
        self.notes.append(
            f"The run writes {what}{models} of {room.model_bytes / 1e9:.1f} GB{stays} to {folder}, where "
            f"{free / 1e9:.0f} GB are free"
        )

    def _read(self, state: dict) -> None:
        """Restores the progress of the checkpointed run."""
        if lacking := {"config", "ranks", "totals", "within_memory"} - state.keys():
            what = f"the checkpoint has no {', '.join(sorted(lacking))}"
            raise ValueError(f"{what}: another version wrote it; go on with that version, or begin a new run")
        saved = json.loads(state["config"])
        check_config(saved, self.config)
        self._check_ranks(state)
        self.step, self.collected = state["step"], state["collected"]
        self.seconds_before, self.eval_before = state["seconds"], state["eval_before"]
        found = agreed(self._ranks, lambda: self._end_of_before(saved) if self.rank_zero else (None, False))
        evaluated, over = self._ranks.broadcast(found) if self._ranks else found
        self.best = state.get("eval_best")
        if evaluated is not None:
            # The last evaluation comes after the checkpoint, whose tracker lacks it.
            self.eval_after, self.best = (self.step, evaluated[0]), evaluated[1] or self.best
        if over:
            raise RunIsOver

    def _check_ranks(self, state: dict) -> None:
        """Refuses another number of ranks than the checkpoint's, unless the run is elastic."""
        self.restarts = state.get("restarts", 0)
        size = self._ranks.size if self._ranks else 1
        before = state["ranks"]
        if before == size:
            return
        if not self._train.elastic:
            raise ValueError(
                f"{before} ranks trained until step {state['step']}, and {size} would go on; start {before} "
                f"(torchrun --nproc-per-node {before} on one node), or set train.elastic=true"
            )
        self.notes.append(f"Trained by {before} ranks until step {state['step']}, and by {size} from there on")

    def _end_of_before(self, saved: dict) -> tuple[tuple[list[float], dict[str, Any] | None] | None, bool]:
        """The evaluation of the run's last step, if it was stored, and whether nothing is left to do.

        If nothing is left, a missing report is written, and the user gets a message.
        """
        complete = self.collected >= self._train.total_dialog_turns
        over = (complete or self._stopped_early(saved)) and is_finished(self.path)
        if over:
            if not (self.path / REPORT).exists():
                try_write_report(self.path, print)
            longer = length_setting({**self.config, "train.steps": self._train.steps})
            done = self.collected
            if longer == "train.steps":
                done = -(-done // (self.config["env"]["num_envs"] * self.config["env"]["repeats"]))
            if longer == "train.epochs":
                done = -(-done * self._train.epochs // self._train.total_dialog_turns)
            remedy = f"raise {longer} above {done} (with optimizer.schedule=constant)"
            print(
                f"The run in {self.path} is finished after {self.step} steps, and nothing is left to do; to go on, "
                f"{remedy if complete else 'set evaluate.patience=0, or another one: it stopped early'}"
            )
        return read_evaluation(self.path, self.step), over

    def _stopped_early(self, saved: dict) -> bool:
        """True if the run was stopped early, and would be again: by the same patience with the same score."""
        before, now = (config.get("evaluate", {}) for config in (saved, self.config))
        same = all(before.get(name) == now.get(name) for name in ("patience", "score", "tasks"))
        return same and bool(read_summary(self.path).get("stopped_early"))

    def has_logged(self, step: int, name: str) -> bool:
        """True if a number of a step is in ``metrics.jsonl``."""
        return any(row["step"] == step and name in row for row in read_metrics(self.path))

    @property
    def resumes(self) -> bool:
        """True if a run was here before, so that its logs have to be truncated."""
        return self._again or self.restored is not None

    @property
    def how_to_go_on(self) -> str:
        """The message for a user whose run stops."""
        return f"Go on with: resume={self.shared if self._ranks else self.path}"

    def check_place(self, step: int) -> None:
        """Ends all ranks after a step if the folder was moved or removed: by now another run's may be at its place."""
        lost = self._claimed is not None and self._claimed.lock.is_lost()
        if self._ranks.any([lost])[0] if self._ranks else lost:
            raise SystemExit(
                f"Stopped after step {step}: {self.shared} was moved or removed while the run wrote there. Go on with: "
                "resume=FOLDER, once it is where no other run writes"
            )

    def stopped(self, step: int) -> Stopped:
        """The end of all ranks in order after a step, as the run was asked to stop."""
        return Stopped(f"Stopped after step {step}. {self.how_to_go_on}")

    @property
    def checkpoints(self) -> Path:
        """The folder that all ranks write checkpoints to."""
        return (self.shared if self._ranks else self.path) / checkpoint.CHECKPOINTS

    def save(self, step: int, state: Callable[[], dict[str, Any]], keep: int) -> Path:
        """Begins to write the checkpoint of this step, unless it exists, and returns its path; the ``keep`` newest ones
        stay, 0 for all.

        A thread writes it while the run goes on. It reads the tensors themselves and no copies, so that
        :meth:`settle` has to be called before they change. Ranks write theirs before this returns: they talk meanwhile.

        Raises:
            OSError: the disk is full or read-only; or was so when the checkpoint before was written.
        """
        if self._saved is None or self._saved[0] != step:
            parts = state()
            if self._ranks:  # dropout draws on each of them, and rank zero's generators sample as well
                parts["rng_of_ranks"] = self._ranks.gather(parts.get("rng"))
            path = self.checkpoints / checkpoint.PATTERN.format(step=step)
            metrics_bytes = logged.metrics_bytes(self.path)  # the run may log on while the thread works

            def write() -> None:
                parts[logged.LOGS] = agreed(self._ranks, lambda: checkpoint.sync_logs(self.path, step, metrics_bytes))
                checkpoint.save(self.checkpoints, step, parts, keep, self._ranks)

            if self._ranks:
                write()
            else:
                self._writer.start(write)
            self._saved = step, path
        return self._saved[1]

    def settle(self) -> None:
        """Returns when no checkpoint is being written; one that could not be is an OSError."""
        self._writer.wait()

    def remove_checkpoints(self) -> None:
        """Removes the checkpoints of a run that is finished; rank zero does."""
        if self.rank_zero:
            checkpoint.remove_all(self.checkpoints)

    def prepare(self) -> None:
        """Restores the folder's logs to the checkpoint's step, or prepares it for a new run."""
        if self.rank_zero and not self.restored:
            (self.path / BEGAN_FROM).unlink(missing_ok=True)
        elif self.rank_zero and self.restored and not self.inside:
            path, state = self.restored
            began = {"checkpoint": str(path.absolute()), "step": state["step"]}
            write_whole(self.path / BEGAN_FROM, json.dumps(began))
        if self._again:  # before the config is replaced: it has the first checkpoint's due step
            set_logs_aside(self.path)
        if self.rank_zero:
            self._is_new = not (self.inside or self._again or self._ranks)  # restarted ranks look for these files
            write_whole(self.path / CONFIG, self._config_text)
            write_overrides(self.path)
        if not self.resumes:
            return
        # Whatever was written after the checkpoint belongs to an abandoned continuation.
        last = self.step if self.restored else BEFORE_ALL
        if self.restored:
            evaluation = agreed(self._ranks, self._truncate_metrics)
            evaluation = self._ranks.broadcast(evaluation) if self._ranks else evaluation
            if not evaluation:  # all ranks repeat it
                self.eval_after, self.best = None, self.restored[1].get("eval_best")
        evaluated = self.eval_after and self.eval_after[0] == last
        for name in (SUMMARY, REPORT, *([] if evaluated else [EVALUATION])):
            (self.path / name).unlink(missing_ok=True)
        checkpoint.set_aside_later(self.path / checkpoint.CHECKPOINTS, last)
        checkpoint.keep_newest(self.path / checkpoint.CHECKPOINTS, self._train.keep_checkpoints)
        logged.truncate(self.path, last)

    def _truncate_metrics(self) -> bool:
        """Drops the metrics of after the checkpoint, and returns whether those of its step's evaluation are there."""
        assert self.restored
        path, state = self.restored
        readable = None
        if self.inside and self.rank_zero:  # lines of a checkpoint that was named itself may be damaged
            is_damaged = checkpoint.damaged_logs(self.path, path) is not None
            readable = 0 if is_damaged else state.get(logged.LOGS, {}).get(METRICS_FILE)
        if unread := MetricsLog(self.path).truncate(self.step, readable):
            what = "a line that can't" if unread == 1 else f"{unread} lines that can't"
            self.notes.append(f"{self.path / METRICS_FILE} had {what} be read: dropped")
        of_step = (row for row in read_metrics(self.path) if row["step"] == self.step)
        return any(name.startswith("eval/") for row in of_step for name in row)
