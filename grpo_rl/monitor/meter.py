"""What a training step did and how long it took, summed up while it runs."""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict

import torch
from jaxtyping import Bool, Shaped
from tensordict import TensorDictBase
from torch import Tensor

from grpo_rl.losses.grpo import LOSSES
from grpo_rl.monitor.metrics import time_metrics
from grpo_rl.training.optimizer import StepResult


class StepMeter:
    """Sums and times of one step, from which its metrics are made; the clock starts with the object."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.phases_s: dict[str, float] = {}
        self._sums: dict[str, float] = defaultdict(float)
        self._results: list[StepResult] = []
        self._trained_tokens = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._started

    def add_phase(self, name: str, seconds: float) -> None:
        """Adds to the time of a phase: sample, score, train, sync."""
        self.phases_s[name] = self.phases_s.get(name, 0.0) + seconds

    def add_losses(self, tokens: TensorDictBase, losses: TensorDictBase) -> None:
        """Adds a micro-batch: what `GRPOLoss` was given, and what it returned."""
        for name, value in losses.items():
            self._sums[name] += value.item()
        self._trained_tokens += len(tokens)

    def add_step(self, result: StepResult) -> None:
        """Adds an optimizer step."""
        self._results.append(result)

    def metrics(self, sampled_tokens: int, step_s: float) -> dict[str, float]:
        """The metrics of a step that sampled so many tokens and took so many seconds."""
        steps = max(len(self._results), 1)
        metrics = {name.replace("_", "/"): self._sums[name] / steps for name in LOSSES}
        metrics["loss/total"] = sum(metrics.values())
        if tokens := self._sums["tokens"]:
            metrics |= {
                "kl/sampler": self._sums["kl_sampler"] / tokens,
                "entropy": self._sums["entropy"] / tokens,
                "clip/low_fraction": self._sums["clip_low"] / tokens,
                "clip/high_fraction": self._sums["clip_high"] / tokens,
                # Kish's effective sample size, as a fraction of the tokens.
                "ess": self._sums["ratio"] ** 2 / (self._sums["ratio_squared"] * tokens),
            }
            # Without a reference, a dual clip or a correction there is nothing to tell, not even 0.
            if "kl_ref" in self._sums:
                metrics["kl/ref"] = self._sums["kl_ref"] / tokens
            if "clip_dual" in self._sums:
                metrics["clip/dual_fraction"] = self._sums["clip_dual"] / tokens
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
        metrics |= time_metrics(self.phases_s, step_s, sampled_tokens, self._trained_tokens)
        return metrics | {"memory/peak_gib": _peak_gib()}


def by_group(tokens: TensorDictBase, values: Shaped[Tensor, "*K N"]) -> dict[int, Shaped[Tensor, "*K R"]]:
    """Values of a micro-batch's N tokens on the CPU, by the id of the group whose R tokens they are of.

    >>> from tensordict import TensorDict
    >>> tokens = TensorDict(group_id=torch.tensor([7, 7, 2]), batch_size=[3])
    >>> by_group(tokens, torch.tensor([0.5, 1.0, 2.0]))
    {7: tensor([0.5000, 1.0000]), 2: tensor([2.])}
    """
    ids, sizes = tokens["group_id"].cpu().unique_consecutive(return_counts=True)
    return dict(zip(ids.tolist(), values.detach().cpu().split(sizes.tolist(), dim=-1), strict=True))


def clipped_at_all(terms: TensorDictBase) -> Bool[Tensor, " N"]:
    """Which tokens met a bound of the surrogate, by what `GRPOLoss.terms` says of them."""
    return torch.stack([value for name, value in terms.items() if name.startswith("clip_")]).any(0)


def _peak_gib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
