"""The numbers of a run: how they are computed from groups, and the file they are kept in.

Every mean is over responses or over response tokens that the policy chose, never over padding: groups are ragged, so
there is none. Letters: G responses of a group, R response tokens of a group.
"""

import json
import math
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from grpo_rl.data.group import Group
from grpo_rl.storage.whole_file import naming, write_whole

METRICS_FILE = "metrics.jsonl"

FEWEST_AT_AN_END = 5
"""Steps at each end of a run that are compared, if it has twice as many; a tenth of the run where that is more."""
REWARD_STATISTICS = frozenset({"mean", "std", "zero_std_fraction"})
"""The names under ``reward/`` other than the named parts of the reward; no part may take one of them."""
STEP_PHASES = ("read", "sample", "wait", "score", "train", "sync", "other")
"""The phases of a step in the order in which they begin; SFT reads in the place of sampling.

Other metrics under ``time/`` are of no step: the run's clock, an evaluation."""


def is_reward_statistic(name: str) -> bool:
    """True if a name under ``reward/`` is a statistic, of all responses or of a mixture's task, and no part.

    >>> is_reward_statistic("mean"), is_reward_statistic("gsm8k/mean"), is_reward_statistic("gsm8k/correctness")
    (True, True, False)
    """
    return name.rpartition("/")[2] in REWARD_STATISTICS


def reward_metrics(groups: Sequence[Group], version: int | None = None) -> dict[str, float]:
    """Reward, response, advantage and staleness metrics of ``groups``, each response weighing the same.

    A part's mean and its quantiles, ``reward_distribution/<part>/p10`` and so on, are over the responses that have it.
    ``response/length_correlation`` is of length and reward inside groups, left out where either is the same in all of
    them. ``reward/std`` is the population's, over all responses. ``reward/zero_std_fraction`` is the share of
    zero-variance groups: their responses all have the same reward. Advantage metrics are left out while a group has no
    advantages yet, staleness metrics while ``version`` is not given.

    Args:
        version: the trainer's policy version; a token's staleness is how many versions ago it was sampled.

    Raises:
        ValueError: there is no group.

    >>> from grpo_rl.testing import random_group
    >>> metrics = reward_metrics([random_group(lengths=[1, 3], rewards=[0.0, 2.0]),
    ...                           random_group(lengths=[4, 4], rewards=[1.0, 1.0])])
    >>> metrics["reward/mean"], metrics["reward/zero_std_fraction"], metrics["response/mean_length"]
    (1.0, 0.5, 3.0)
    """
    if not groups:
        raise ValueError("no group to compute metrics of: every group of this step was dropped")
    rewards = torch.cat([group.rewards for group in groups]).double()
    lengths = torch.cat([group.chosen_lengths for group in groups]).double()
    metrics = {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(correction=0).item(),
        "reward/zero_std_fraction": sum(bool((g.rewards == g.rewards[0]).all()) for g in groups) / len(groups),
        "response/mean_length": lengths.mean().item(),
        "response/max_length": lengths.max().item(),
    }
    metrics |= _quantiles("total", rewards)
    for name in dict.fromkeys(name for group in groups for name in group.reward_parts):
        part = torch.cat([group.reward_parts[name] for group in groups if name in group.reward_parts]).double()
        metrics[f"reward/{name}"] = part.nanmean().item()
        metrics |= _quantiles(name, part)
    for name in dict.fromkeys(name for group in groups for name in group.measures):
        measured = torch.cat([group.measures[name] for group in groups if name in group.measures]).double()
        metrics[f"measure/{name}"] = measured.nanmean().item()
    if (correlation := _length_correlation(groups)) is not None:
        metrics["response/length_correlation"] = correlation
    metrics["response/repetition"] = repetition(groups)
    if truncated := _all_or_none([group.truncated for group in groups]):
        metrics["response/truncated_fraction"] = torch.cat(truncated).double().mean().item()
    if advantages := _all_or_none([group.advantages for group in groups]):
        flat = torch.cat(advantages).double()
        metrics |= {"advantage/mean": flat.mean().item(), "advantage/std": flat.std(correction=0).item()}
    if version is not None:
        age = version - torch.cat([group.versions[group.trainable] for group in groups])
        mean, oldest = (age.double().mean().item(), float(age.max())) if len(age) else (0.0, 0.0)
        metrics |= {"staleness/mean": mean, "staleness/max": oldest}
    return metrics


def task_metrics(groups: Mapping[str, Sequence[Group]]) -> dict[str, float]:
    """The metrics of each task of a mixture that show whether it is learnt, from its groups of a step.

    >>> from grpo_rl.testing import random_group
    >>> metrics = task_metrics({"gsm8k": [random_group(lengths=[1, 3], rewards=[0.0, 2.0])]})
    >>> metrics["reward/gsm8k/mean"], metrics["reward/gsm8k/zero_std_fraction"], metrics["mixture/gsm8k"]
    (1.0, 0.0, 1)
    """
    metrics: dict[str, float] = {}
    for task, own in groups.items():
        found = reward_metrics(own) if own else {}
        for name in ("reward/mean", "reward/zero_std_fraction", "response/mean_length", "response/truncated_fraction"):
            if name in found:
                metrics[name.replace("/", f"/{task}/")] = found[name]
        metrics[f"mixture/{task}"] = len(own)
    return metrics


def repetition(groups: Sequence[Group], n: int = 4) -> float:
    """Share of a response's n-grams of tokens that it had before, averaged over responses; only what the policy chose.

    A response of fewer than ``n`` tokens repeats nothing.

    Of the five 2-grams of "a b a b a b", two are new, (a b) and (b a), and three repeated.

    >>> from grpo_rl.testing import random_group
    >>> from dataclasses import replace
    >>> group = replace(random_group(lengths=[6, 1]), response_ids=torch.tensor([1, 2, 1, 2, 1, 2, 3]))
    >>> repetition([group], n=2)  # (3 / 5 + 0) / 2
    0.3
    """
    shares = []
    for group in groups:
        owner = torch.arange(group.size).repeat_interleave(group.lengths)
        if len(owner) < n:
            shares.append(np.zeros(group.size))
            continue
        inside = (owner[n - 1 :] == owner[: len(owner) - n + 1]) & group.trainable.unfold(0, n, 1).all(1)
        grams = group.response_ids.unfold(0, n, 1)[inside].numpy()
        owners = owner[: len(inside)][inside].numpy()
        _, first = np.unique(np.column_stack([owners, grams]), axis=0, return_index=True)
        total, new = (np.bincount(who, minlength=group.size) for who in (owners, owners[first]))
        shares.append(1 - new / np.maximum(total, 1) - (total == 0))
    return float(np.concatenate(shares).mean())


def _quantiles(name: str, values: Tensor) -> dict[str, float]:
    tenths = torch.nanquantile(values, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return {f"reward_distribution/{name}/p{p}": x for p, x in zip((10, 50, 90), tenths, strict=True)}


def _length_correlation(groups: Sequence[Group]) -> float | None:
    """Correlation of reward and length inside groups; None where either has no spread."""
    centred = [
        torch.cat([(x - x.mean()) for x in columns])
        for columns in ([g.rewards.double() for g in groups], [g.chosen_lengths.double() for g in groups])
    ]
    norms = [x.norm() for x in centred]
    return None if min(norms) < 1e-6 else (centred[0] @ centred[1] / (norms[0] * norms[1])).item()


def time_metrics(
    phases_s: Mapping[str, float], step_s: float, sampled_tokens: int, trained_tokens: int
) -> dict[str, float]:
    """Seconds of each phase of a step, what is left as ``time/other_s``, and the rates of sampling and training.

    Args:
        phases_s: seconds of ``sample``, ``score``, ``train``, ``sync``, those that the step had; ``wait`` stands in the
            place of ``sample`` where sampling goes on during the whole step.
        sampled_tokens: response tokens that the engine produced.
        trained_tokens: response tokens that went through forward and backward.

    >>> time_metrics({"sample": 2.0, "train": 4.0}, 7.0, sampled_tokens=100, trained_tokens=600)
    ... # doctest: +NORMALIZE_WHITESPACE
    {'time/sample_s': 2.0, 'time/train_s': 4.0, 'time/other_s': 1.0,
     'throughput/sample_tokens_per_s': 50.0, 'throughput/train_tokens_per_s': 150.0}
    """
    metrics = {f"time/{name}_s": seconds for name, seconds in phases_s.items()}
    metrics["time/other_s"] = max(step_s - sum(phases_s.values()), 0.0)
    if sample_s := step_s if "wait" in phases_s else phases_s.get("sample", 0.0):
        metrics["throughput/sample_tokens_per_s"] = sampled_tokens / sample_s
    if train_s := phases_s.get("train", 0.0):
        metrics["throughput/train_tokens_per_s"] = trained_tokens / train_s
    return metrics


def begin_peak() -> None:
    """Begins a new peak of a GPU's memory, that of a step; a process's own peak can't be begun anew."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def memory_metrics(engine_gib: float = 0.0) -> dict[str, float]:
    """``memory/peak_gib``: of the GPU since :func:`begin_peak`, where there is one, else of this process so far.

    ``memory/limit_gib`` is what the GPU has, or what this machine, or the container, lets its processes have together.
    An engine in this process holds ``engine_gib`` of the GPU; ``memory/peak_beside_engine_gib`` is the rest of the
    peak, which may come in sampling: then some of it is what the engine took for a batch.
    """
    if not torch.cuda.is_available():
        # Linux counts in KiB, macOS in bytes.
        unit = 2**30 if sys.platform == "darwin" else 2**20
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
        return {"memory/peak_gib": peak, "memory/limit_gib": memory_limit() / 2**30}
    peak = torch.cuda.max_memory_allocated() / 2**30
    roles = {"memory/engine_gib": engine_gib, "memory/peak_beside_engine_gib": peak - engine_gib} if engine_gib else {}
    limit = torch.cuda.get_device_properties().total_memory / 2**30
    return {"memory/peak_gib": peak, "memory/limit_gib": limit} | roles


@cache
def memory_limit(bound: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes that this machine has, or that the container may take where it has a bound of its own."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(bound.read_text()))
    except (OSError, ValueError):  # no such file, or "max": no bound
        return machine


def _all_or_none(tensors: list[Tensor | None]) -> list[Tensor]:
    """The tensors where every group has one; a mean over some of the groups would pass for a mean over all."""
    return [t for t in tensors if t is not None] if all(t is not None for t in tensors) else []


def finite_mean(values: Sequence[float] | np.ndarray) -> float:
    """The mean of the finite values; NaN where there is none."""
    finite = np.asarray(values)[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def steps_at_an_end(steps: int) -> int:
    """The number of steps at each end of a run that are compared: a tenth, at least 5, at most half, and one at least.

    >>> [steps_at_an_end(steps) for steps in (1, 6, 10, 40, 1000)]
    [1, 3, 5, 5, 100]
    """
    return max(steps // 10, min(FEWEST_AT_AN_END, steps // 2), 1)


def first_and_last(values: Sequence[float]) -> tuple[float, float]:
    """The means of the finite ones of the first and of the last values, as many as :func:`steps_at_an_end` returns.

    >>> first_and_last([1.0] * 5 + [0.0] * 10 + [3.0, 4.0, 5.0, 4.0, 4.0]), first_and_last([1.0, math.nan, 2.0])
    ((1.0, 4.0), (1.0, 2.0))
    """
    ends = steps_at_an_end(len(values))
    return finite_mean(values[:ends]), finite_mean(values[-ends:])


class MetricsLog:
    """Appends one line of strict JSON to ``metrics.jsonl`` for each call, on disk before the call returns.

    JSON has no NaN or infinity: such a value is written as null and spelled out under ``nonfinite``
    (``{"step": 3, "grad_norm": null, "nonfinite": {"grad_norm": "inf"}}``), and :func:`read_metrics` puts it back.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A run killed in the middle of a line must not have its next line glued to the torn one.
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            self._rewrite(_whole_lines(self.path))
        self.path.touch()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step; a step may have several lines (training, evaluation).

        Raises:
            OSError: the disk is full or read-only; names the file.
        """
        line = json.dumps(_encode({"step": step, **metrics}), allow_nan=False)
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def truncate(self, step: int, readable: int | None = None) -> int:
        """Drops what came after ``step``, so that a run resumed there writes the file an uninterrupted run writes.

        Lines behind the first ``readable`` bytes (None: all) that can't be read are dropped, too, and counted.

        Raises:
            ValueError: another line is not one of metrics; names it.
        """
        lines = _whole_lines(self.path)
        kept, end, unread = [], 0, 0
        for number, line in enumerate(lines, start=1):
            end += len(line) + 1
            try:
                if _row(self.path, number, line)["step"] <= step:
                    kept.append(line)
            except ValueError:
                if readable is None or end <= readable:
                    raise
                unread += 1
        if len(kept) < len(lines):
            self._rewrite(kept)
        return unread

    def _rewrite(self, lines: Sequence[bytes]) -> None:
        write_whole(self.path, b"".join(line + b"\n" for line in lines))


def read_metrics(path: str | Path, length: int | None = None) -> list[dict[str, float]]:
    """The lines of a ``metrics.jsonl`` (or of the one in a run folder), a torn last line left out.

    Raises:
        ValueError: a line of the first ``length`` bytes is not one of metrics; names it.
    """
    path = Path(path)
    if path.is_dir():
        path = path / METRICS_FILE
    return [_row(path, number, line) for number, line in enumerate(_whole_lines(path, length), start=1)]


def _whole_lines(path: Path, length: int | None = None) -> list[bytes]:
    # What follows the last line break is empty, or a line that a killed run did not finish.
    return path.read_bytes()[:length].split(b"\n")[:-1]


def _row(path: Path, number: int, line: bytes) -> dict[str, float]:
    """The metrics of a line."""
    try:
        row = json.loads(line.decode())
        row |= {name: float(value) for name, value in row.pop("nonfinite", {}).items()}
        if wrong := [name for name, value in row.items() if not isinstance(value, int | float)]:
            raise ValueError(f"{wrong[0]} is {row[wrong[0]]!r}")
        if not isinstance(row.get("step"), int):
            raise ValueError("it has no step")
    # It is not JSON, not an object, or has something else where a number belongs.
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}, line {number} is not one of metrics ({error}); remove that line") from error
    return row


def _encode(row: Mapping[str, float]) -> dict[str, object]:
    # A metric may come as a tensor or a NumPy scalar; JSON needs Python's numbers.
    numbers = {name: getattr(value, "item", lambda value=value: value)() for name, value in row.items()}
    nonfinite = {name: str(float(value)) for name, value in numbers.items() if not math.isfinite(value)}
    encoded: dict[str, object] = {name: None if name in nonfinite else value for name, value in numbers.items()}
    return encoded | ({"nonfinite": nonfinite} if nonfinite else {})


def step_seconds(row: Mapping[str, float]) -> float | None:
    """The seconds of a step, all of its phases together; None where the line has none of them.

    >>> step_seconds({"time/sample_s": 3.0, "time/other_s": 1.0, "time/at_s": 500.0, "time/evaluate_s": 60.0})
    4.0
    """
    phases = [row[name] for name in (f"time/{phase}_s" for phase in STEP_PHASES) if name in row]
    return sum(phases) if phases else None
