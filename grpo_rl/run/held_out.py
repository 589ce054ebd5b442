"""HeldOut: held-out rewards before, during and after training."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_rl.engines.base import Sampler, Sampling
from grpo_rl.envs.base import LLMEnv
from grpo_rl.intervals import paired_gain
from grpo_rl.monitor.metrics import finite_mean
from grpo_rl.monitor.step_parts import write_held_out
from grpo_rl.run.summary import write_evaluation
from grpo_rl.settings.sections import Evaluate
from grpo_rl.training.evaluate import Evaluation, Sessions, evaluate, row_scores


class BestTracker:
    """Follows one score of each held-out row from evaluation to evaluation.

    The best evaluation is the one of the highest mean; of equal ones the first. As the highest of many it is flattered
    by chance. The run is stopped once ``patience`` evaluations in a row are no better than it. An evaluation of which
    fewer than two rows have a score is left out.

    Args:
        patience: evaluations; 0: the run is never stopped.
        score: the name of the score: one of another name, or of another number of rows, can't be compared.
    """

    def __init__(self, patience: int = 0, score: str = "reward") -> None:
        self.patience, self.score = patience, score
        self.best: tuple[int, list[float]] | None = None
        """Step and row scores of the best evaluation."""
        self._no_better = 0

    def comparable(self, scores: Sequence[float]) -> bool:
        """True if an evaluation with these row scores can be taken."""
        return int((~np.isnan(np.asarray(scores, dtype=float))).sum()) >= 2

    def add(self, step: int, scores: Sequence[float]) -> bool:
        """Takes the row scores of an evaluation, NaN where there is none; returns whether it is the best so far."""
        if not self.comparable(scores):
            return False
        is_best = self.best is None or float(np.nanmean(scores)) > float(np.nanmean(self.best[1]))
        self.best = (step, list(scores)) if is_best else self.best
        self._no_better = 0 if is_best else self._no_better + 1
        return is_best

    @property
    def stop_reason(self) -> str | None:
        """The reason to stop the run, with the numbers; None while there is none."""
        if not self.patience or self.best is None or self._no_better < self.patience:
            return None
        return (
            f"{self._no_better} evaluations in a row are no better than that of step {self.best[0]}, whose "
            f"{self.score} is {float(np.nanmean(self.best[1])):.3f} (evaluate.patience={self.patience})"
        )

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint holds."""
        return {"best": self.best, "no_better": self._no_better, "score": self.score}

    def restore(self, state: Mapping[str, Any], rows: int | None = None) -> str | None:
        """Goes on from :meth:`state`; where that is of other scores it begins anew, and returns a note for the user.

        Args:
            rows: the number of rows that the score has now.
        """
        if (best := state["best"]) is None:
            return None
        had, of = len(best[1]), state["score"]
        if of != self.score or rows not in (None, had):
            was, now = (f"{score} of {count} rows" for score, count in ((of, had), (self.score, rows or "the same")))
            return f"The evaluations before are of {was}, those from now on of {now}: the best is looked for anew"
        self.best = int(best[0]), [np.nan if score is None else float(score) for score in best[1]]
        self._no_better = int(state["no_better"])
        return None


@dataclass(frozen=True)
class HeldOutTask:
    """Another task that is evaluated next to the training one: its first rows, with so many sampled responses each."""

    name: str
    env: LLMEnv
    rows: Sequence[dict[str, Any]]
    samples: int = 0


@dataclass
class Evaluated:
    """One evaluation: its metrics, whether it is the best so far, and a note for the user."""

    metrics: dict[str, float] = field(default_factory=dict)
    is_best: bool = False
    note: str | None = None


class HeldOut:
    """Evaluates held-out rows greedily, and remembers the first and the last evaluation.

    Sampled responses and other tasks are evaluated, too, and the best evaluation is followed.

    Args:
        rows: held-out rows; an empty list turns evaluation off.
        sampling: of training, whose lengths and ends of responses are kept.
        wanted: the settings of ``evaluate``; the rows and tasks that it names are given as ``rows`` and ``tasks``.
        seed: of sampled responses, the same in every evaluation.
        before: rewards of the evaluation before training, if the resumed run has it.
        last: step and rewards of the newest evaluation, if the resumed run has it.
        best: state of the tracker of the best evaluation, if the resumed run has it; :attr:`note` says where it is of
            another score.
        sessions: of agents, in the place of responses to rows of the training task.
    """

    def __init__(
        self,
        env: LLMEnv,
        rows: Sequence[dict[str, Any]],
        sampling: Sampling,
        wanted: Evaluate,
        tasks: Sequence[HeldOutTask] = (),
        seed: int = 0,
        before: Sequence[float] = (),
        last: tuple[int, Sequence[float]] | None = None,
        best: Mapping[str, Any] | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        self._env, self.rows, self._sessions = env, list(rows), sessions
        ends = {"max_new_tokens": sampling.max_new_tokens, "stop": sampling.stop, "ignore_eos": sampling.ignore_eos}
        self._sampling = Sampling(temperature=0.0, **ends)
        self._wanted, self._tasks, self._seed = wanted, tasks, seed
        self.tracker = BestTracker(wanted.patience, wanted.score)
        rows_of = {"": len(self.rows)} | {task.name: len(task.rows) for task in tasks}
        rows_of |= {name: len(own) for name, own in env.by_task(self.rows).items()}
        self.note = self.tracker.restore(best, rows_of.get(wanted.score.rpartition("/")[0])) if best else None
        self.before = list(before)
        self._newest: Evaluation | None = None
        self.evaluated_at, self.after = (last[0], list(last[1])) if last else (None, [])

    def evaluate(self, step: int, engine: Sampler, on_rank_zero: Callable[[Callable[[], Any]], Any]) -> Evaluated:
        """Evaluates after a step, on rank zero for all ranks; step 0 is the evaluation before training."""
        evaluation, scores = on_rank_zero(
            lambda: self._evaluate(self._env, self.rows, self._wanted.samples, engine, self._sessions)
        )
        self.evaluated_at, self.after, self._newest = step, evaluation.rewards, evaluation
        if step == 0:
            self.before = evaluation.rewards
        metrics, whole = evaluation.metrics(), dict(scores)
        for name, own in self._env.by_task(self.rows).items():
            of_task = evaluation.of_rows(own)
            metrics |= {key.replace("eval/", f"eval/{name}/", 1): value for key, value in of_task.metrics().items()}
            of_rows = {f"{name}/{score}": [values[i] for i in own] for score, values in whole.items() if own}
            scores |= {score: values for score, values in of_rows.items() if not np.isnan(values).all()}
        for task in self._tasks:
            of_task, more = on_rank_zero(lambda task=task: self._evaluate(task.env, task.rows, task.samples, engine))
            metrics |= {name.replace("eval/", f"eval/{task.name}/", 1): v for name, v in of_task.metrics().items()}
            scores |= {f"{task.name}/{name}": values for name, values in more.items()}
        metrics |= {f"eval/{name}": finite_mean(values) for name, values in scores.items()}
        wanted, note = self._wanted, None
        if not (wanted.keep_best or wanted.patience):
            return Evaluated(metrics)
        if wanted.score not in scores:
            raise ValueError(f"evaluate.score={wanted.score} is none of {', '.join(scores)}")
        followed = scores[wanted.score]
        if not self.tracker.comparable(followed):
            note = f"Too few rows have evaluate.score={wanted.score} at step {step}: best and patience pass it over"
        return Evaluated(metrics, self.tracker.add(step, followed) and wanted.keep_best, note)

    def _evaluate(
        self,
        env: LLMEnv,
        rows: Sequence[dict[str, Any]],
        samples: int,
        engine: Sampler,
        sessions: Sessions | None = None,
    ) -> tuple[Evaluation, dict[str, list[float]]]:
        """The greedy evaluation of a task, and all scores of its rows."""
        with sessions.for_now() if sessions else nullcontext():
            greedy, sampled = evaluate(env, engine, rows, self._sampling, sessions=sessions), None
            if samples:
                sampling = replace(self._sampling, temperature=self._wanted.temperature)
                sampled = evaluate(env, engine, rows, sampling, samples, self._seed, sessions)
        return greedy, row_scores(greedy, sampled)

    def keep(self, folder: Path, step: int) -> None:
        """Stores the rewards and responses of this step's evaluation; called after its metrics are logged."""
        if self.evaluated_at == step:
            self.keep_responses(folder)
            write_evaluation(folder, step, self.after, self.tracker.state())

    def keep_responses(self, folder: Path) -> None:
        """Stores the responses of the newest evaluation as text, next to those of earlier evaluations."""
        if self._newest is not None and self.evaluated_at is not None:
            gold = [self._env.task.gold(row) for row in self.rows]
            write_held_out(folder, self.evaluated_at, self._newest, gold)

    def summary(self, step: int) -> dict[str, object]:
        """Held-out reward before and after ``step``, with the paired gain and its 95 % interval, as far as known."""
        if not self.before:
            return {}
        before: dict[str, object] = {"eval_before": float(np.nanmean(self.before))}
        if self.tracker.best:
            best_step, scores = self.tracker.best
            before |= {"best_step": best_step, f"best_{self._wanted.score}": finite_mean(scores)}
        if self.evaluated_at != step or step == 0:
            return before
        after: dict[str, object] = before | {"eval_after": float(np.nanmean(self.after))}
        if (~np.isnan([self.before, self.after]).any(axis=0)).sum() < 2:
            return after  # too few rows were judged both times
        gain = paired_gain(self.before, self.after)
        return after | {"eval_gain": gain.mean, "eval_gain_ci95": gain.ci95}
