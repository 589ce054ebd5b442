"""Run: the lifecycle of a training run, from the first collection to the exported model."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tensordict import TensorDict

from grpo_rl.data.group import Group
from grpo_rl.distributed.ranks import Ranks
from grpo_rl.engines.base import EngineDeadError, OutOfMemoryError, is_out_of_memory, reason
from grpo_rl.monitor.step_record import StepRecord
from grpo_rl.run.diagnosis import DIAGNOSED, NAMED_CAUSES, RunDiagnosis
from grpo_rl.run.folder import RunFolder
from grpo_rl.run.hooks import Hook
from grpo_rl.run.logs import RunLogs
from grpo_rl.run.parts import CommonParts
from grpo_rl.settings.sections import Train
from grpo_rl.training.optimizer import StepResult

if TYPE_CHECKING:
    from grpo_rl.run.sft import AnyHeldOut

P = TypeVar("P", bound=CommonParts)


@dataclass(frozen=True)
class RunOptions:
    """Options of a run.

    Args:
        evaluate_frequency: steps between evaluations; 0: none between the first and the last.
        collecting: the name of the phase of collecting groups: sample, wait or, of demonstrations, read.
        engine_sleeps: whether the engine frees its memory until weights are pushed into it.
        origin: how to make the run again, as found at its start: the code may change while it lasts.
    """

    train: Train
    evaluate_frequency: int
    model: str
    task: str
    collecting: str
    engine_sleeps: bool
    origin: Mapping[str, str]


class Interrupt:
    """Ctrl-C: the first ends the run after this step, with a checkpoint; the second ends it now. A context manager.

    Outside the main thread no handler is installed: the main thread's owner handles Ctrl-C.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.asked = False

    def _on_interrupt(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say("Finishing this step, then a checkpoint. Ctrl-C again stops now.")

    def __enter__(self) -> Interrupt:
        try:
            self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        except ValueError:
            self._before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


class Run(Generic[P]):
    """A run over its parts, which it logs, evaluates and saves; used as a context manager.

    Args:
        folder: the run's folder, with the checkpoint that it resumes from.
        parts: what the run trains with; restored here to the checkpoint.
        step_metrics: the numbers of a step, from the parts, its groups and its record.
        ranks: the processes that train together, each with a run of its own and the same numbers.
        hooks: called one after the other; those of the logs are among them.
    """

    def __init__(
        self,
        folder: RunFolder,
        logs: RunLogs,
        parts: P,
        diagnosis: RunDiagnosis,
        held_out: AnyHeldOut,
        step_metrics: Callable[[P, Sequence[Group], StepRecord], dict[str, float]],
        interrupt: Interrupt,
        options: RunOptions,
        ranks: Ranks | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.folder, self.logs, self.parts, self.options = folder, logs, parts, options
        self._diagnosis, self._held_out = diagnosis, held_out
        self._step_metrics, self._interrupt = step_metrics, interrupt
        self._ranks, self.hooks = ranks, hooks
        self.step, self.collected = folder.step, folder.collected
        self._totals: dict[str, int] = folder.restored[1]["totals"] if folder.restored else {}
        self._training = False
        self.is_best = False
        """True if the newest evaluation is the best so far, whose model is kept."""
        parts.optimizer.before_step = self._before_weights_change
        parts.begin(folder.restored[1] if folder.restored else None, options.train.seed)
        if held_out.note:
            logs.note(held_out.note)
        if folder.restored:
            logs.note(f"Resumed after step {self.step} from {folder.restored[0]}")

    def __enter__(self) -> Run[P]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if is_out_of_memory(error) and not isinstance(error, EngineDeadError | OutOfMemoryError):
            # Beyond what begins again with less at a time, as in the optimizer's own step.
            error = OutOfMemoryError(f"memory ran out ({reason(error)}); docs/memory.md has ways to use less")
        if not self._training:
            if isinstance(error, NAMED_CAUSES):
                raise SystemExit(f"Stopped before the first step: {error}") from error
            return
        if isinstance(error, DIAGNOSED):
            for hook in self.hooks:
                try:  # the failed step's lineage is what the user needs most
                    hook.on_error(self, error)
                except OSError as failed:
                    failed.add_note(self.folder.how_to_go_on)
                    raise
                except Exception as failed:  # the error that ends the run is the one to see
                    error.add_note(f"{type(hook).__name__}.on_error failed: {type(failed).__name__}: {failed}")
        if isinstance(error, OSError):
            error.add_note(self.folder.how_to_go_on)
        if isinstance(error, ValueError):
            # A ValueError means wrong input, and is reported without a traceback; a failure from here on is a bug.
            raise RuntimeError(f"failed after step {self.step}: {error}") from error
        if isinstance(error, NAMED_CAUSES):
            raise SystemExit(f"Stopped after step {self.step}: {error}. {self.folder.how_to_go_on}") from error

    def _call(self, event: str, *arguments: Any) -> None:
        for hook in self.hooks:
            getattr(hook, event)(self, *arguments)

    @property
    def seconds(self) -> float:
        """Wall time of the run, including that before a resume."""
        return self.folder.seconds_before + time.perf_counter() - self.logs.started

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows and times a part of the step: score, train, sync."""
        self.logs.progress.phase(name)
        start = time.perf_counter()
        yield
        self.record.add_phase(name, time.perf_counter() - start)

    def _on_micro_batch(self, tokens: TensorDict, losses: TensorDict, _groups: Sequence[Group]) -> None:
        self._call("on_micro_batch", tokens, losses)

    def _before_weights_change(self) -> None:
        """Waits for a checkpoint that is being written, which has the weights of before; this time is no training."""
        start = time.perf_counter()
        self.folder.settle()
        self.record.add_phase("train", start - time.perf_counter())

    def collections(self) -> Iterator[list[Group]]:
        """Samples the next collection (rollout batch), starts the step's record, and stops on Ctrl-C."""
        parts, total = self.parts, self.options.train.total_dialog_turns
        self._training = True
        parts.begin_collecting()
        self._call("on_start")
        while self.collected < total and not self._held_out.tracker.stop_reason:
            observers = [self._diagnosis.observe, self._on_micro_batch]
            self.record = StepRecord(self._ranks, observers, self.logs.progress.goes_on)
            self._diagnosis.mismatch.begin()
            self.logs.progress.phase(self.options.collecting)
            groups = parts.collector.collect()
            self.collected = parts.collector.collected
            if not groups:
                break  # the last groups were dropped
            self.record.add_phase(self.options.collecting, parts.collector.sample_s)
            if self.options.engine_sleeps and self.folder.rank_zero:
                parts.engine.sleep()  # until weights are pushed into it
            for hook in self.hooks:
                changed = hook.on_groups(self, groups)
                groups = groups if changed is None else changed
                if not groups:
                    raise ValueError(f"{type(hook).__name__}.on_groups returned no groups; return at least one")
            yield groups
            # After the last step there is nothing to stop: the run ends as it would have.
            asked = self._ranks.any([self._interrupt.asked])[0] if self._ranks else self._interrupt.asked
            if asked and self.collected < total:
                self.folder.check_place(self.step)
                path = self.save_checkpoint()
                self.folder.settle()
                self._call("on_stop", self._summary(path))
                raise self.folder.stopped(self.step)

    def optimizer_steps(self, batches: Iterable[list[Group]]) -> Iterator[list[Group]]:
        """Yields the groups for each optimizer step in turn, and adds them to the record."""
        for batch in batches:
            # Each rank draws a batch's groups by itself; rank zero's draw counts.
            batch = self._ranks.broadcast(batch) if self._ranks else batch
            self.record.begin(batch)
            self._call("on_batch", batch)
            yield batch

    def micro_batches(self, batch: Sequence[Group]) -> Iterator[AbstractContextManager[TensorDict]]:
        """The optimizer step's micro-batches, scored: blocks at whose end the gradient goes through the model.

        Where memory runs out, the step begins again with smaller ones: see
        :meth:`grpo_rl.training.micro_batches.WithinMemory.micro_batches`.
        """
        return self.parts.within_memory.micro_batches(batch, self._begin_again)

    @property
    def max_tokens(self) -> int:
        """The tokens that are scored at a time; fewer than configured once memory has run out."""
        return self.parts.within_memory.max_tokens

    def _begin_again(self, why: str) -> None:
        self.record.begin_again()
        self.logs.note(why)

    def check_mismatch(self) -> None:
        """Compares sampler and trainer over the optimizer step, once its micro-batches are in the record.

        Raises:
            MismatchError: sampler and trainer differ although their weights should be the same.
        """
        self.record.complete()
        if warning := self._diagnosis.check_mismatch():
            self.logs.note(f"Warning. {warning}")

    def locate_nonfinite(self) -> str:
        """A sentence on where the optimizer step's loss or gradient is first not finite."""
        return self._diagnosis.locate_nonfinite(self.record.groups)

    def add_result(self, result: StepResult) -> None:
        """Adds an optimizer step's result to the record and the mismatch check."""
        if result.trouble:
            self.logs.note(f"An optimizer step of step {self.step + 1} is left out: {result.trouble}")
        if not result.skipped:
            self._diagnosis.mismatch.weights_moved()
        self.record.add_result(result)

    def finish_step(self, groups: Sequence[Group]) -> None:
        """Logs the step with its groups as trained on; evaluates and saves when due."""
        self.folder.check_place(self.step)
        self.step += 1
        parts = self.parts
        metrics = self._step_metrics(parts, groups, self.record) | {"time/at_s": self.seconds}
        for event in parts.collector.events():
            self.logs.note(event)
        frequency = self.options.evaluate_frequency
        if self._held_out.rows and frequency and self.step % frequency == 0:
            metrics |= self._evaluate()
        metrics |= parts.schedules.after_step(metrics)
        metrics |= self._count(parts.collector.sampled)
        if self._ranks:
            metrics |= {"ranks/size": self._ranks.size, "ranks/restarts": self.folder.restarts}
        self._call("on_step", metrics, groups)
        self._call("on_log", metrics, groups)
        self._held_out.keep(self.folder.path, self.step)
        frequency = self.options.train.checkpoint_frequency
        if frequency and self.step % frequency == 0:
            self.save_checkpoint()

    def _count(self, sampled: Sequence[Group]) -> dict[str, float]:
        """The run's totals after a step, those before a resume included.

        Responses and tokens are of training alone; ``seconds`` is all of the run's wall time, evaluations included.
        """
        counts = {"trained_tokens": self.record.trained_tokens}
        if sampled:  # demonstrations are not
            counts["sampled_tokens"] = sum(int(group.trainable.sum()) for group in sampled)
        for name, count in counts.items():
            self._totals[name] = self._totals.get(name, 0) + count
        totals = {"responses": self.collected, **self._totals, "seconds": self.seconds}
        return {f"total/{name}": float(value) for name, value in totals.items()}

    def evaluate_before(self) -> None:
        """Evaluates the initial model on held-out data; a resumed run has done so already."""
        if self._held_out.rows and self.step == 0:
            what = f"evaluating {len(self._held_out.rows)} held-out rows"
            with self.logs.progress.start_phase(what):
                metrics = {"time/at_s": self.seconds} | self._evaluate()
            self.folder.check_place(self.step)
            self._call("on_log", metrics, ())
            self._held_out.keep_responses(self.folder.path)

    def _evaluate(self) -> dict[str, float]:
        self.logs.progress.phase("evaluating")
        start = time.perf_counter()
        evaluated = self._held_out.evaluate(self.step, self.parts.engine, self.parts.weights.on_rank_zero)
        self.is_best = evaluated.is_best
        if evaluated.note:
            self.logs.note(evaluated.note)
        if reason := self._stopped_early:
            self.logs.note(f"Stopped early: {reason}")
        metrics = evaluated.metrics | {"time/evaluate_s": time.perf_counter() - start}
        self._call("on_evaluate", metrics)
        metrics["time/evaluate_s"] = time.perf_counter() - start  # a model that is kept included
        return metrics

    @property
    def _stopped_early(self) -> str | None:
        """The reason why the run stopped before its budget was used up; None if it did not."""
        return self._held_out.tracker.stop_reason if self.collected < self.options.train.total_dialog_turns else None

    def save_checkpoint(self) -> Path:
        """Begins to write a checkpoint of the current step, unless there is one; see `RunFolder.save`."""
        self.logs.progress.phase("checkpoint")
        return self.folder.save(self.step, self._state, self.options.train.keep_checkpoints)

    def _state(self) -> dict[str, object]:
        return {
            "step": self.step,
            "collected": self.collected,
            "config": json.dumps(self.folder.config, sort_keys=True),
            "eval_before": self._held_out.before,
            "eval_best": self._held_out.tracker.state(),
            "seconds": self.seconds,
            "totals": dict(self._totals),  # written while the run counts on
            "ranks": self._ranks.size if self._ranks else 1,
            "restarts": self.folder.restarts,
            "origin": dict(self.options.origin),
        } | self.parts.state()

    def finish(self) -> dict[str, object]:
        """Writes the last checkpoint, evaluates, and lets the hooks write the results.

        A run that is killed here and resumed repeats this, except for an evaluation that it has already.
        """
        self.folder.check_place(self.step)
        path = self.save_checkpoint()
        self.folder.settle()  # a finished run has its checkpoint
        if self._held_out.rows and self._held_out.evaluated_at != self.step:
            metrics = self._evaluate()
            known, metrics = next(iter(metrics)), {"time/at_s": self.seconds} | metrics
            if not self.folder.has_logged(self.step, known):
                self._call("on_log", metrics, ())
            else:
                self.logs.progress.update(self.step, metrics)
            self._held_out.keep(self.folder.path, self.step)
        kept = self.options.train.keep_final_checkpoint
        summary = self._summary(path if kept else None)
        self._call("on_end", summary)
        if not kept:  # until now: a run killed here is finished, or can be resumed
            self.folder.remove_checkpoints()
        return summary

    def _summary(self, checkpoint: Path | None) -> dict[str, object]:
        stopped = {"stopped_early": self._stopped_early} if self._stopped_early else {}
        return (
            {
                "finished": self.collected >= self.options.train.total_dialog_turns or bool(stopped),
                "steps": self.step,
                "seconds": round(self.seconds, 1),
                "seed": self.options.train.seed,
                "model": self.options.model,
                "task": self.options.task,
                **self.options.origin,
            }
            | self._held_out.summary(self.step)
            | ({"ranks": self._ranks.size, "restarts": self.folder.restarts} if self._ranks else {})
            | stopped
            | {"checkpoint": checkpoint and str(checkpoint)}
        )
