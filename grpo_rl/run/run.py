"""Run: one object that logs, checkpoints, resumes, evaluates, and frees everything on exit, also on error."""

from __future__ import annotations

import json
import math
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.panel import Panel
from tensordict import TensorDictBase
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_rl.build.parts import make_loss, make_sampling, micro_batching, total_steps
from grpo_rl.cluster.fleet_engine import FleetEngine
from grpo_rl.collectors.broadcast import Collector, Led
from grpo_rl.data.group import Group, groups_to_score
from grpo_rl.diagnosis.causes import DiagnosisContext
from grpo_rl.diagnosis.mismatch import Mismatch, MismatchError
from grpo_rl.diagnosis.nonfinite import locate_nonfinite
from grpo_rl.distributed.ranks import Ranks
from grpo_rl.distributed.sharded_checkpoint import agreed
from grpo_rl.engines.base import EngineDeadError, Sampler, Sampling
from grpo_rl.envs.base import LLMEnv
from grpo_rl.losses.grpo import LOSSES
from grpo_rl.monitor import lineage
from grpo_rl.monitor.completions import CompletionsLog, completion_rows, printable
from grpo_rl.monitor.meter import StepMeter
from grpo_rl.monitor.metrics import MetricsLog, read_metrics, reward_metrics
from grpo_rl.monitor.progress import Progress, summary_panel
from grpo_rl.monitor.report import CONFIG, OVERRIDES, SUMMARY, versions, write_report
from grpo_rl.monitor.wandb import WandbLog
from grpo_rl.monitor.watch import RewardWatch
from grpo_rl.perf.roofline import StepRoofline
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.run.folder import MODEL, RunIsOver, check_folder, claim, export, is_finished, set_logs_aside
from grpo_rl.settings.devices import Devices
from grpo_rl.storage.whole_file import write_whole
from grpo_rl.training import checkpoint
from grpo_rl.training.evaluate import Evaluation, evaluate, paired_gain
from grpo_rl.training.optimizer import NonFiniteError, PolicyOptimizer, StepResult
from grpo_rl.training.schedules import Schedules
from grpo_rl.weights.push import WeightSync

EVALUATION, REPORT = "evaluation.json", "report.html"
BEFORE_ALL = -1
"""A step that comes before the evaluation at step 0."""
QUESTION_CHARACTERS = 60
"""Of a question, in messages that name a group."""


class _Closable(Protocol):
    def close(self) -> None: ...


Owned = TypeVar("Owned", bound=_Closable)


class Run:
    """A training run in its folder; used as a context manager.

    Args:
        cfg: the whole config.
        env: the training environment, for its data position and its texts.
        folder: where the run writes; a resumed run goes on in the folder of its checkpoint.
        eval_rows: held-out rows, judged before and after.
        model_bytes: size of the model's files, to see beforehand whether checkpoints fit on the disk.
        ranks: the processes that train together, each with a run of its own, and the same numbers in all of them. That
            of rank 0 is the one that is kept; others write to a folder that goes with them.

    Raises:
        ValueError: the folder can't be written or another process writes there, the disk is too small, or the
            checkpoint is of another config.
        RunIsOver: the run to go on with has nothing left to do, and has said so.
    """

    def __init__(
        self,
        cfg: DictConfig,
        env: LLMEnv,
        folder: str | Path,
        eval_rows: Sequence[dict] = (),
        model_bytes: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        self.cfg, self.env = cfg, env
        self._ranks, self._leads = ranks, ranks is None or ranks.rank == 0
        self._stack = ExitStack()
        if ranks:
            self._stack.callback(ranks.close)
        self._config = json.dumps(OmegaConf.to_container(cfg, resolve=True), sort_keys=True)
        self._config_text = OmegaConf.to_yaml(cfg, resolve=True)
        self._eval_rows = list(eval_rows)
        self._eval_before: list[float] = []
        self._eval_after: list[float] = []
        self._evaluated_at: int | None = None
        self.step = 0
        self.collected = 0
        self._seconds_before = 0.0
        try:
            self._open(Path(folder), model_bytes)
        except BaseException:
            self._stack.close()  # the caller gets no run that it could close
            raise
        self._collected_state: dict | None = None
        self._saved_at: int | None = None
        self._meter = StepMeter()
        staleness = cfg.train.max_staleness if cfg.mode == "async" else 0
        self._mismatch = Mismatch(**cfg.mismatch, max_staleness=staleness)
        self._batch: Sequence[Group] = ()
        self._loss_is_finite = True
        self._limit: StepRoofline | None = None
        self._interrupted = False
        self._training = False
        self._last_words: Panel | None = None

    def _open(self, own: Path, model_bytes: int) -> None:
        """Takes the folder, and what is there to go on from.

        Raises:
            ValueError: see the class.
            RunIsOver: there is nothing left to do.
        """
        self._notes: list[str] = []
        self._again = False
        # Started a second apart, ranks may have been given different folders; and one of them locks it for all.
        where = agreed(self._ranks, lambda: self._claim(own) if self._leads else (own, None, False, False))
        where = self._ranks.broadcast(where) if self._ranks else where
        self._shared_folder, self.cfg.resume, self._inside, over = where
        if over:
            raise RunIsOver
        self._restored = self._find_checkpoint()

        def check() -> None:
            resumed = self._again or self._restored is not None
            check_folder(self.folder, self.cfg, model_bytes, resumed=resumed)

        agreed(self._ranks, lambda: check() if self._leads else None)
        if not self._leads:
            self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        if self._restored:
            state = self._restored[1]
            checkpoint.check_config(state["config"], self._config)
            self.step, self.collected = state["step"], state["collected"]
            self._seconds_before, self._eval_before = state["seconds"], state["eval_before"]
            evaluated, over = agreed(self._ranks, lambda: self._end_of_before() if self._leads else (None, False))
            if self._ranks:
                evaluated, over = self._ranks.broadcast((evaluated, over))
            if evaluated is not None:
                self._eval_after, self._evaluated_at = evaluated, self.step
            if over:
                raise RunIsOver

    def _claim(self, own: Path) -> tuple[Path, str | None, bool, bool]:
        """Takes the folder: where it is for all ranks, what it goes on with, whether that is of this folder's run, and
        whether that run is over."""
        frequency = self.cfg.train.checkpoint_frequency
        claimed = claim(own, self.cfg.resume, Path("outputs"), self._config, frequency)
        self._stack.callback(claimed.lock.close)
        self._notes += [*claimed.notes, *([claimed.lock.warning] if claimed.lock.warning else [])]
        self.folder, self._again = claimed.folder, claimed.again
        self._started_in = own
        if claimed.over:
            print(*claimed.notes, sep="\n")
        return self.folder.absolute(), claimed.resume and str(claimed.resume), claimed.inside, claimed.over

    def _end_of_before(self) -> tuple[list[float] | None, bool]:
        """The evaluation of the run's last step, if it was stored, and whether nothing is left to do.

        Then the report is written where there is none, and the user is told.
        """
        evaluated = None
        try:
            stored = json.loads((self.folder / EVALUATION).read_text())
            if stored["step"] == self.step:
                evaluated = [math.nan if reward is None else float(reward) for reward in stored["rewards"]]
        except (OSError, ValueError, TypeError, KeyError):
            pass  # there is none, or none that can be read: it is done again
        over = self.collected >= self.cfg.train.total_dialog_turns and is_finished(self.folder)
        if over:
            if not (self.folder / REPORT).exists():
                self._write_report(print)
            print(
                f"The run in {self.folder} is finished after {self.step} steps, and nothing is left to do; to go on, "
                f"raise train.total_dialog_turns above {self.collected} (with optimizer.schedule=constant)"
            )
        return evaluated, over

    def _find_checkpoint(self) -> tuple[Path, dict] | None:
        if self.cfg.resume is None:
            return None
        return checkpoint.restore(self.cfg.resume, self._shared_folder if self._inside else None, self._ranks)

    def _how_to_go_on(self) -> str:
        return f"Go on with: resume={self._shared_folder if self._ranks else self.folder}"

    def __enter__(self) -> Run:
        try:
            self._start()
        except BaseException:
            self._stack.close()  # without __enter__ there is no __exit__
            raise
        return self

    def _start(self) -> None:
        """Makes the folder what it was at the checkpoint, and opens what is logged to."""
        logger = self.cfg.logger
        if self._leads:
            self._keep_config()
        if self._again:
            set_logs_aside(self.folder)
        self.metrics = MetricsLog(self.folder)
        self.completions = CompletionsLog(self.folder) if logger.completions and self._leads else None
        self._lineage = None
        if self.cfg.train.lineage and self._leads:
            self._lineage = lineage.LineageLog(self.folder, self._config, make_loss(self.cfg))
        self._watch = RewardWatch()
        if self._restored or self._again:
            # Whatever was written after the checkpoint is of another future.
            last = self.step if self._restored else BEFORE_ALL
            self.metrics.truncate(last)
            for name in (SUMMARY, REPORT, *([] if self._evaluated_at == last else [EVALUATION])):
                (self.folder / name).unlink(missing_ok=True)
            checkpoint.set_aside_later(self.folder / checkpoint.CHECKPOINTS, last)
            self._watch = RewardWatch.over(read_metrics(self.folder))  # what it warned of is not told again
            CompletionsLog(self.folder).truncate(last)
            lineage.truncate(self.folder, last)
        self.wandb = None
        if logger.backend == "wandb" and self._leads:
            self.wandb = WandbLog(
                self.folder, json.loads(self._config), project=logger.project, name=logger.name, mode=logger.mode
            )
        console = None if self._leads else Console(quiet=True)
        self.progress = self._stack.enter_context(Progress(total_steps(self.cfg), console, first_step=self.step))
        for note in self._notes:
            self.progress.note(note)
        self.env.guard.tell_in(self.folder, self.progress.note)
        if self.env.skipped:
            self.progress.note(f"{self.env.skipped} of {len(self.env.task.rows)} prompts are too long and left out")
        self._install_interrupt()
        self._started = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self.wandb:
            self.wandb.close(exit_code=int(kind is not None))
        self._stack.close()
        if self._training and isinstance(error, OSError):
            error.add_note(self._how_to_go_on())
        if self._training and isinstance(error, ValueError):
            # A ValueError says that the input was wrong, and is told without a traceback; what fails now is a bug.
            raise RuntimeError(f"failed after step {self.step}: {error}") from error
        if self._training and isinstance(error, EngineDeadError):
            raise SystemExit(f"Stopped after step {self.step}: {error}. {self._how_to_go_on()}") from error
        if self._last_words:
            self.progress.console.print(self._last_words)

    def own(self, thing: Owned) -> Owned:
        """The thing itself, which the run closes when it ends, however it ends."""
        self._stack.callback(thing.close)
        return thing

    def _keep_config(self) -> None:
        """Writes what the run was started with: Hydra's own copy may become that of a start which is refused."""
        write_whole(self.folder / CONFIG, self._config_text)
        overrides = self._started_in / ".hydra" / OVERRIDES
        if overrides.exists():
            write_whole(self.folder / OVERRIDES, overrides.read_bytes())

    def _install_interrupt(self) -> None:
        def on_interrupt(*_: object) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            self.progress.note("Finishing this step, then a checkpoint. Ctrl-C again stops now.")

        try:
            before = signal.signal(signal.SIGINT, on_interrupt)
        except ValueError:
            return  # not in the main thread: whoever owns it handles Ctrl-C
        self._stack.callback(signal.signal, signal.SIGINT, before)

    def measure_limit(self, model: PreTrainedModel, devices: Devices) -> None:
        """Finds out what this machine does at its best, so that every step logs how near it came (``limit_fraction``).

        Takes about a second the first time, while no engine holds the machine's memory yet. Not where several processes
        train: what they could do together is more than this one measures.
        """
        if self._ranks:
            return
        batching, lora = micro_batching(self.cfg), self.cfg.train_model.lora
        self._limit = StepRoofline(
            model,
            self.cfg.train.epochs,
            batching["skip_zero_advantage"],
            batching["mask_truncated"],
            len(devices.inference),
            pushes_adapters=bool(lora.rank) and lora.push == "adapter",
        )

    def attach(
        self,
        policy: TrainPolicy,
        optimizer: PolicyOptimizer,
        weights: WeightSync,
        engine: Sampler,
        schedules: Schedules,
    ) -> None:
        """Takes the parts that checkpoints, evaluations and diagnoses need, and puts them back to where it resumes.

        A resumed run gets its optimizer, weights, schedules, policy version and random state; its collector, data
        position included, gets its own when it is given to :meth:`steps`.
        """
        self._schedules = schedules
        self.led = Led(self._ranks, weights.deliver)
        if isinstance(engine, FleetEngine):
            engine.deliver = self.led.deliver
        self._policy, self._optimizer, self._weights, self._engine = policy, optimizer, weights, engine
        if not self._restored:
            # After the parts are built: what building them draws is not the run's.
            checkpoint.seed_rng(self.cfg.train.seed)
            return
        path, state = self._restored
        weights.check_base(state["base"])  # a checkpoint of adapters does not hold what they were trained on
        optimizer.load_state_dict(state["optimizer"])
        schedules.restore(state["schedules"])
        # The push that follows gives the version that the checkpointed run went on with.
        weights.version = state["version"] - 1
        checkpoint.set_rng_state(state["rng"])
        self._collected_state, self._restored = state["collector"], None
        if self._inside:  # it need not be written again
            self.checkpoint, self._saved_at = path, self.step
        self.progress.note(f"Resumed after step {self.step} from {path}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows and times a part of the step: sample, score, train, sync."""
        self.progress.phase(name)
        start = time.perf_counter()
        yield
        self._meter.add_phase(name, time.perf_counter() - start)

    def steps(self, collector: Collector) -> Iterator[list[Group]]:
        """The collections of the run, one a step, until the end or Ctrl-C."""
        self._training, self._collector = True, collector
        if self._collected_state:
            collector.restore(self._collected_state)
            self._collected_state = None
        while self.collected < self.cfg.train.total_dialog_turns:
            self._meter = StepMeter()
            self._mismatch.begin()
            self.progress.phase(waits := "wait" if self.cfg.mode == "async" else "sample")
            collector.repeats = self._schedules.group_size(self.step + 1)
            groups = collector.collect()
            self.collected = collector.collected
            if not groups:
                break  # the last ones were dropped
            self._meter.add_phase(waits, collector.sample_s)
            if self.cfg.inference_model.sleep and self._leads:
                self._engine.sleep()  # until weights are pushed into it
            yield groups
            # After the last step there is nothing to stop: the run ends as it would have.
            interrupted = self._ranks.any([self._interrupted])[0] if self._ranks else self._interrupted
            if interrupted and self.collected < self.cfg.train.total_dialog_turns:
                self.save_checkpoint()
                self._write_summary()
                self._write_report(self.progress.note)
                raise SystemExit(f"Stopped after step {self.step}. {self._how_to_go_on()}")

    def batches(self, batches: Iterable[list[Group]]) -> Iterator[list[Group]]:
        """The groups of each optimizer step, until the policy is ``policy.stop_kl`` away from the sampler."""
        stop_kl = math.inf if self.cfg.policy.stop_kl is None else self.cfg.policy.stop_kl
        for batch in batches:
            # Which groups a batch has is drawn, by each rank for itself.
            batch = self._ranks.broadcast(batch) if self._ranks else batch
            self._batch = batch
            self._kl_sum = self._kl_tokens = 0.0
            self._computed: list[tuple[TensorDictBase, TensorDictBase]] = []
            if self._lineage:
                self._lineage.begin(batch)
            yield batch
            if self._kl_sum > stop_kl * self._kl_tokens:
                break

    def count(self, tokens: TensorDictBase, losses: TensorDictBase) -> None:
        """Adds a micro-batch to the step's metrics; those of all ranks are added before the optimizer step."""
        if self._ranks:
            # With FSDP a rank that has nothing left goes on in step with tokens that are trained on elsewhere.
            if tokens["trainable"].any():
                self._computed.append((tokens.detach().cpu(), losses.detach().cpu()))
        else:
            self._count(tokens, losses)

    def _count(self, tokens: TensorDictBase, losses: TensorDictBase) -> None:
        self._meter.add_losses(tokens, losses)
        self._mismatch.add(tokens, self._batch, self._weights.version)
        self._kl_sum += losses["kl_sampler"].item()
        self._kl_tokens += losses["tokens"].item()
        self._loss_is_finite &= all(bool(losses[name].isfinite()) for name in LOSSES)
        if self._lineage:
            self._lineage.add(tokens, losses)

    def take_step(self, optimizer: PolicyOptimizer) -> None:
        """The optimizer step over what was counted, and adds it to the step's metrics.

        Nothing is learned from a loss or a gradient that is not finite.

        Raises:
            MismatchError: sampler and trainer differ, on weights that should be the same.
            NonFiniteError: too many steps in a row were not finite.
        """
        if self._ranks:
            for of_rank in self._ranks.gather(self._computed):
                for tokens, losses in of_rank:
                    self._count(tokens, losses)
        try:
            if warning := self._mismatch.judge(None if self._ranks else self._scene()):
                self.progress.note(f"Warning. {warning}")
            result = optimizer.step(self._loss_is_finite, self._blame)
        except (MismatchError, NonFiniteError):
            if self._lineage:  # of this step, where there is most to ask
                self._lineage.write(self.step + 1, None, self._schedules.kl_coef)
            raise
        if result.trouble:
            self.progress.note(f"An optimizer step of step {self.step + 1} is left out: {result.trouble}")
        if not result.skipped:
            self._mismatch.weights_moved()
        self._loss_is_finite = True
        self.count_step(result)

    def _scene(self) -> DiagnosisContext:
        sampling, max_tokens = make_sampling(self.cfg), self.cfg.train.micro_batch_tokens
        return DiagnosisContext(
            self._policy, self._weights, self._engine, sampling, max_tokens, self._describe, self.env.tokenizer.decode
        )

    def _blame(self) -> str:
        """Which group of the optimizer step is not finite, and where in the model."""
        batching, loss = micro_batching(self.cfg), make_loss(self.cfg)
        if self.cfg.loss.kl_in == "loss":
            loss.kl_coef = self._schedules.kl_coef
        return locate_nonfinite(self._policy, loss, self._optimizer, self._batch, batching, self._describe)

    def _describe(self, group: Group) -> str:
        question = " ".join(printable(self.env.query(group.row)).split())
        shown = question if len(question) <= QUESTION_CHARACTERS else f"{question[:QUESTION_CHARACTERS]}…"
        return f"group {group.group_id} (row {group.row}, {shown!r})"

    def count_step(self, result: StepResult) -> None:
        """Adds an optimizer step to the step's metrics."""
        self._meter.add_step(result)
        if self._lineage:
            self._lineage.end(result.grad_norm, result.lr, result.skipped)

    def finish_step(self, groups: Sequence[Group]) -> None:
        """Logs the step, evaluates and checkpoints where it is time to.

        Args:
            groups: with advantages, as they were trained on.
        """
        self.step += 1
        step_s = self._meter.elapsed_s
        # The push that ended the step has already raised the version.
        sampled_under = self._weights.version - 1
        metrics = (
            reward_metrics(groups, sampled_under)
            | self._meter.metrics(sum(int(group.trainable.sum()) for group in self._collector.sampled), step_s)
            | {"policy_version": sampled_under, "optimizer/skipped_steps": self._optimizer.bad_steps}
        )
        batching = micro_batching(self.cfg)
        scored = groups_to_score(groups, batching["skip_zero_advantage"], batching["mask_truncated"])
        metrics["train/skipped_groups"] = len(groups) - len(scored)
        # Of the whole run so far, held-out answers too: rare as they are, a step's own would hardly ever show.
        failed, _ = self.env.guard.failures()
        metrics |= {f"failed/{kind}": count for kind, count in failed.items()}
        metrics |= self._collector.metrics()
        for news in self._collector.news():
            self.progress.note(news)
        if self.cfg.train.max_refills:
            metrics["reward/sampled_mean"] = float(torch.cat([g.rewards for g in self._collector.sampled]).mean())
        metrics |= self._mismatch.metrics()
        if self._limit:
            metrics |= self._limit.metrics(groups, self._meter.phases_s, step_s)
        if self._eval_rows and self.cfg.evaluate.frequency and self.step % self.cfg.evaluate.frequency == 0:
            metrics |= self._evaluate().metrics()
        metrics |= self._schedules.after_step(metrics)
        self._log(metrics, groups)
        self._keep_evaluation()
        if self._lineage:
            self._lineage.write(self.step, groups, metrics.get("kl/coef", 0.0))
        frequency = self.cfg.train.checkpoint_frequency
        if frequency and self.step % frequency == 0:
            self.save_checkpoint()

    def _log(self, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        self._log_metrics(self.step, metrics)
        if self.completions or self.wandb:
            rows = completion_rows(groups, self.env.decode, self.env.gold)
            if self.completions:
                self.completions.log(self.step, rows)
            if self.wandb:
                self.wandb.table(self.step, rows)
        answer = self.env.decode(groups[0].responses[0])
        self.progress.update(self.step, metrics, sample=f"{self.env.query(groups[0].row)}\n{answer}")

    def _log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics.log(step, metrics)
        for warning in self._watch.update({"step": step, **metrics}):
            self.progress.note(f"Warning. {warning}")
        if self.wandb:
            self.wandb.log(step, metrics)

    def save_checkpoint(self) -> Path:
        """Writes a checkpoint of this moment, unless there is one."""
        if self._saved_at == self.step:
            return self.checkpoint
        self.progress.phase("checkpoint")
        state = {
            "step": self.step,
            "collected": self.collected,
            "optimizer": self._optimizer.state_dict(),
            "schedules": self._schedules.state(),
            "collector": self._collector.state(),
            "version": self._weights.version,
            "base": self._weights.base_fingerprints(),
            "rng": checkpoint.rng_state(),
            "config": self._config,
            "eval_before": self._eval_before,
            "seconds": self.seconds,
        }
        folder = (self._shared_folder if self._ranks else self.folder) / checkpoint.CHECKPOINTS
        keep = self.cfg.train.keep_checkpoints
        agreed(self._ranks, lambda: checkpoint.sync_logs(self.folder))
        self.checkpoint = checkpoint.save(folder, self.step, state, keep, self._ranks)
        self._saved_at = self.step
        return self.checkpoint

    @property
    def seconds(self) -> float:
        """Wall time of the run, that before a resume included."""
        return self._seconds_before + time.perf_counter() - self._started

    def evaluate_before(self) -> None:
        """Held-out reward of the model that training starts from; a resumed run has it already."""
        if self._eval_rows and self.step == 0:
            evaluation = self._evaluate()
            self._eval_before = evaluation.rewards
            self._log_metrics(0, evaluation.metrics())
            self.progress.update(0, evaluation.metrics())

    def _evaluate(self) -> Evaluation:
        self.progress.phase("evaluating")
        sampling = Sampling(temperature=0.0, max_new_tokens=self.cfg.sampling.max_new_tokens)
        evaluation = self.led(lambda: evaluate(self.env, self._engine, self._eval_rows, sampling))
        self._eval_after, self._evaluated_at = evaluation.rewards, self.step
        return evaluation

    def _keep_evaluation(self) -> None:
        """Writes the rewards of an evaluation after this step, once its metrics are logged: a killed run has both."""
        if self._evaluated_at == self.step:
            # JSON has no NaN, the reward of a response that has none.
            rewards = [None if math.isnan(reward) else reward for reward in self._eval_after]
            stored = json.dumps({"step": self.step, "rewards": rewards}, allow_nan=False)
            write_whole(self.folder / EVALUATION, stored + "\n")

    def finish(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict:
        """Last checkpoint, evaluation, exported model, summary and report; shows where they are.

        A run that is killed here and resumed goes through this again, and repeats no evaluation that it has.
        """
        path = self.save_checkpoint()
        if self._eval_rows and self._evaluated_at != self.step:
            evaluation = self._evaluate()
            if not any(row["step"] == self.step and "eval/reward" in row for row in read_metrics(self.folder)):
                self._log_metrics(self.step, evaluation.metrics())
            self._keep_evaluation()
            self.progress.update(self.step, evaluation.metrics())
        exported = self.folder / MODEL
        export(model, tokenizer, exported, self.cfg.train_model.lora.export, self._ranks)
        summary = self._write_summary()
        report = self._write_report(self.progress.note)
        self._last_words = summary_panel(summary, checkpoint=path, model=exported, report=report)
        return summary

    def _write_report(self, say: Callable[[str], None]) -> Path | None:
        """The report's path; None where it can't be written, which is said: all else of the run is there."""
        try:
            return write_report(self.folder)
        except Exception as error:  # of whatever kind: it must not make a failure of a run that is not one
            say(
                f"Warning. The report can't be written ({type(error).__name__}: {error}); all else is there. Once that "
                f"is mended: python -m grpo_rl.monitor.report {self.folder}"
            )
            return None

    def _write_summary(self) -> dict:
        summary: dict[str, object] = {
            "finished": self.collected >= self.cfg.train.total_dialog_turns,
            "steps": self.step,
            "seconds": round(self.seconds, 1),
            "seed": self.cfg.train.seed,
            "model": self.cfg.model.name,
            "versions": versions(),
            "checkpoint": str(self.checkpoint),
        }
        if self._eval_before:
            summary["eval_before"] = float(np.nanmean(self._eval_before))
        if self._eval_before and self._evaluated_at == self.step > 0:
            gain = paired_gain(self._eval_before, self._eval_after)
            summary |= {
                "eval_after": float(np.nanmean(self._eval_after)),
                "eval_gain": gain.mean,
                "eval_gain_ci95": gain.ci95,
            }
        write_whole(self.folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
        return summary
