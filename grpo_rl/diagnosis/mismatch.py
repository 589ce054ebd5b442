"""Mismatch: how far the sampler's log-probabilities are from the trainer's on each trained token, and what that stops.

On fresh weights the two compute the same model, so what differs is rounding, unless something is wrong. After an
optimizer step the policy has moved, which is staleness. The mean importance ratio sets truncated sampling apart.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
from tensordict import TensorDictBase
from torch import Tensor

from grpo_rl.data.batching import by_group
from grpo_rl.data.group import Group
from grpo_rl.diagnosis.causes import DiagnosisContext, Explanation, Scored, all_gaps, diagnose, mass_kept

JUMP = 2.0
"""A mismatch of so many times the run's own floor is looked into; what then can't be named is no alarm."""
WINDOW = 20
"""The floor is the median of so many steps; what was looked into begins a new one."""
NEGLIGIBLE = 1e-5
"""A mismatch in nats that is never looked into: ten times what fp32 rounds; it moves ratios by a thousandth of a %."""


class MismatchError(RuntimeError):
    """An error: the sampler's log-probabilities are not those of the weights that are trained."""


class Mismatch:
    """Compares sampler and trainer on every token that is trained on, and finds out why they differ.

    - Each step logs the difference on fresh weights, and apart from it that of stale tokens, by their age in versions.
    - The first steps of a run are looked into whatever the numbers are, since nothing is known of this machine's
      rounding yet; later ones where the difference doubles, or is above the bound.
    - A fault that has a name stops the run, however small. What has none stops it above the bound, and so does a
      difference of which it is only known that new responses don't have it, which is only logged below it.

    Args:
        bound: mean |difference| on fresh weights that stops the run, in nats; None: faults are only logged.
            At 0.2 the ratio of the typical token is where clipping begins before anything was learned; rounding in bf16
            gives 0.04 and less.
    """

    def __init__(self, bound: float | None = 0.2, first_tokens: int = 256, max_staleness: int = 0) -> None:
        self._bound, self._first_tokens, self._max_staleness = bound, first_tokens, max_staleness
        self._history: deque[float] = deque(maxlen=WINDOW)
        self._looked_at = 0
        self._logged: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Begins a collection: no optimizer step was taken since the push."""
        self._fresh: list[Scored] = []
        self._stale: dict[int, list[Tensor]] = defaultdict(list)
        self._moved = self._judged = False
        self._found: Explanation | None = None

    def add(self, tokens: TensorDictBase, groups: Sequence[Group], version: int) -> None:
        """Takes in a micro-batch, where the engine was given this ``version`` of the policy last."""
        by_id = {group.group_id: group for group in groups}
        for group_id, piece in by_group(tokens, tokens["log_prob"].float()).items():
            group = by_id[group_id]
            ages = torch.where(group.trainable, version - group.versions, -1)
            for age in ages.unique().tolist():
                tokens_of_age = Scored(replace(group, trainable=ages == age), piece)
                if age == 0 and not self._moved:
                    self._fresh.append(tokens_of_age)
                elif age >= 0:
                    self._stale[age].append(tokens_of_age.gaps)

    def weights_moved(self) -> None:
        """Notes that an optimizer step was taken."""
        self._moved = True

    def judge(self, context: DiagnosisContext | None) -> str | None:
        """The warning of a step, if any; a step is looked into where there is reason to, before its first update.

        Log-probabilities that are not finite are left to the optimizer step, which finds out where they come from. With
        no context, as several processes train, which can't sample and score alone, only the bound counts.

        Raises:
            MismatchError: a fault was found, or the difference is above the bound.
        """
        if (oldest := max(self._stale, default=0)) > self._max_staleness:
            text = (
                f"stale weights: tokens that are {oldest} versions old are trained on, and {self._max_staleness} are "
            )
            return self._tell(Explanation("stale_weights", f"{text}allowed. Drop groups that wait longer than that"))
        if self._judged or not self._fresh:
            return None
        gaps = all_gaps(self._fresh)
        if not gaps.isfinite().all():
            return None
        self._judged = True
        mean = gaps.mean().item()
        floor = median(self._history) if self._history else math.inf
        over = self._bound is not None and mean > self._bound
        if over:
            reason = f"more than mismatch.bound={self._bound:g}"
        elif mean > JUMP * floor and mean > NEGLIGIBLE:
            reason = f"{mean / floor:.1f} times this run's own {floor:.3g}" if floor else "and nothing before"
        elif self._looked_at < self._first_tokens and mean > NEGLIGIBLE:
            reason = "in what the run sampled first"
        else:
            self._history.append(mean)
            return None
        self._looked_at += len(gaps)
        found = Explanation("unexplained", "several processes train, and none can look into it alone. Train in one")
        if context:
            found = diagnose(context, self._fresh, thorough=over or mean > JUMP * floor)
        self._history = deque([mean], maxlen=WINDOW)
        if found.name == "unexplained" and not over:
            return None
        what = f"sampler and trainer differ by {mean:.3g} nats a token on fresh weights, {reason}: "
        return self._tell(found, what, stops=over or found.name != "stale_weights")

    def _tell(self, found: Explanation, what: str = "", stops: bool = True) -> str | None:
        self._found = found
        if stops and self._bound is not None:
            raise MismatchError(f"{what}{found.text}. (mismatch.bound=null goes on nevertheless.)")
        if found.name in self._logged:
            return None
        self._logged.add(found.name)
        return f"{what}{found.text}."

    def metrics(self) -> dict[str, float]:
        """The metrics of the step so far.

        ``mismatch/mean`` and ``mismatch/max`` of fresh weights, in nats; ``mismatch/mass_kept``, what the sampler could
        draw from, there too; ``mismatch/stale_2`` of tokens that were sampled two versions ago, ``mismatch/stale_0`` of
        this collection's later optimizer steps; ``mismatch/<fault>`` is 1 where a fault was found.
        """
        metrics: dict[str, float] = {}
        if self._fresh:
            gaps = all_gaps(self._fresh)
            metrics |= {"mismatch/mean": gaps.mean().item(), "mismatch/max": gaps.max().item()}
            metrics["mismatch/mass_kept"] = mass_kept(self._fresh)
        for age, parts in sorted(self._stale.items()):
            metrics[f"mismatch/stale_{age}"] = torch.cat(parts).mean().item()
        return metrics | ({f"mismatch/{self._found.name}": 1.0} if self._found else {})
