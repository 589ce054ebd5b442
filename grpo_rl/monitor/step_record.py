"""StepRecord: what one step adds up, from sampling to the push."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from tensordict import TensorDictBase

from grpo_rl.data.group import Group
from grpo_rl.distributed.ranks import Ranks
from grpo_rl.losses.grpo import LOSSES
from grpo_rl.monitor.metrics import begin_peak, time_metrics


class StepResult(Protocol):
    """The outcome of an optimizer step: `grpo_rl.training.optimizer.StepResult`."""

    grad_norm: float
    lr: float


Observer = Callable[[TensorDictBase, TensorDictBase, Sequence[Group]], None]
"""A function of each micro-batch: what the loss was given, what it returned, and the optimizer step's groups."""


class StepRecord:
    """Losses and tokens of each optimizer step of a collection, and seconds by phase; the clock starts with the object.

    Args:
        ranks: the processes that train together. Each adds the micro-batches that it scored; :meth:`complete` adds
            those of all ranks, in rank order, so that all have the same sums.
        goes_on: called as each micro-batch of this rank is added, before the gradient goes back through the model.
    """

    def __init__(
        self, ranks: Ranks | None = None, observers: Sequence[Observer] = (), goes_on: Callable[[], None] = lambda: None
    ) -> None:
        self._ranks, self._observers, self._goes_on = ranks, observers, goes_on
        self._started = time.perf_counter()
        begin_peak()
        self.phases_s: dict[str, float] = {}
        self._sums: dict[str, float] = defaultdict(float)
        self._results: list[StepResult] = []
        self._micro_batches = self._out_of_memory = self.trained_tokens = 0
        """Response tokens that went through forward and backward."""
        self.begin(())

    def begin(self, groups: Sequence[Group]) -> None:
        """Starts an optimizer step on these groups."""
        self.groups = groups
        self.loss_is_finite = True
        self._kl_sum = self._kl_tokens = 0.0
        self._pending: list[tuple[TensorDictBase, TensorDictBase]] = []

    def add(self, tokens: TensorDictBase, losses: TensorDictBase) -> None:
        """Adds a micro-batch: what the loss was given, and what it returned. It counts from :meth:`complete` on."""
        self._goes_on()
        if self._ranks is None:
            self._pending.append((tokens.detach(), losses.detach()))
        # With FSDP a rank that has nothing left goes on in step with tokens that are trained on elsewhere.
        elif tokens["trainable"].any():
            self._pending.append((tokens.detach().cpu(), losses.detach().cpu()))

    def begin_again(self) -> None:
        """Forgets the optimizer step's micro-batches: memory ran out, and it begins again with smaller ones."""
        self._out_of_memory += 1
        self._pending = []

    def complete(self) -> None:
        """Adds the micro-batches of all ranks; called by all of them, before the optimizer step."""
        for of_rank in self._ranks.gather(self._pending) if self._ranks else [self._pending]:
            for tokens, losses in of_rank:
                self._add(tokens, losses)
        self._pending = []

    def _add(self, tokens: TensorDictBase, losses: TensorDictBase) -> None:
        # Each value is read once: on a GPU, reading waits for all that was launched before.
        values = {name: float(value.detach()) for name, value in losses.items() if name != "loss"}
        for name, value in values.items():
            self._sums[name] += value
        self.trained_tokens += len(tokens)
        self._micro_batches += 1
        self._kl_sum += values.get("kl_sampler", 0.0)
        self._kl_tokens += values["tokens"]
        self.loss_is_finite &= all(math.isfinite(value) for name, value in values.items() if name.startswith("loss_"))
        for observe in self._observers:
            observe(tokens, losses, self.groups)

    @property
    def kl_sampler(self) -> float:
        """KL to the sampler, in nats a token, over the present optimizer step."""
        return self._kl_sum / self._kl_tokens if self._kl_tokens else 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._started

    def add_phase(self, name: str, seconds: float) -> None:
        """Adds to the seconds of a phase: sample, score, train, sync."""
        self.phases_s[name] = self.phases_s.get(name, 0.0) + seconds

    def add_result(self, result: StepResult) -> None:
        """Adds what an optimizer step came to."""
        self._results.append(result)

    def metrics(self, sampled_tokens: int, step_s: float) -> dict[str, float]:
        """The metrics of a step that sampled so many tokens and took so many seconds.

        ``train/micro_batches`` counts those of all its optimizer steps; ``train/micro_batch_tokens`` is the mean number
        of response tokens in one, prompts aside; ``train/out_of_memory`` counts how often a step had to begin again.
        """
        steps = max(len(self._results), 1)
        terms = [name for name in self._sums if name.startswith("loss_")] or LOSSES
        metrics = {name.replace("_", "/"): self._sums[name] / steps for name in terms}
        metrics["loss/total"] = sum(metrics.values())
        if tokens := self._sums["tokens"]:
            metrics["entropy"] = self._sums["entropy"] / tokens
        if tokens and "ratio" in self._sums:  # demonstrations were not sampled
            metrics |= {
                "kl/sampler": self._sums["kl_sampler"] / tokens,
                "clip/low_fraction": self._sums["clip_low"] / tokens,
                "clip/high_fraction": self._sums["clip_high"] / tokens,
                # Kish's effective sample size, as a fraction of the tokens.
                "ess": self._sums["ratio"] ** 2 / (self._sums["ratio_squared"] * tokens),
            }
            # Without a reference, a dual clip or a correction there is nothing to log, not even 0.
            if "kl_ref" in self._sums:
                metrics["kl/ref"] = self._sums["kl_ref"] / tokens
            for name in ("dual", "off_policy"):
                if f"clip_{name}" in self._sums:
                    metrics[f"clip/{name}_fraction"] = self._sums[f"clip_{name}"] / tokens
            if "correction" in self._sums:
                squared = self._sums["correction_squared"] * tokens
                metrics |= {
                    "correction/mean": self._sums["correction"] / tokens,
                    "correction/bounded_fraction": self._sums["corrected"] / tokens,
                    "correction/ess": self._sums["correction"] ** 2 / squared if squared else 0.0,
                }
        if self._results:
            metrics |= {
                "grad_norm": sum(r.grad_norm for r in self._results) / steps,
                "lr": self._results[-1].lr,
                "train/optimizer_steps": len(self._results),
            }
        if self._micro_batches:
            metrics |= {
                "train/micro_batches": self._micro_batches,
                "train/micro_batch_tokens": self.trained_tokens / self._micro_batches,
                "train/out_of_memory": self._out_of_memory,
            }
        return metrics | time_metrics(self.phases_s, step_s, sampled_tokens, self.trained_tokens)
