"""Checks of the model of a run that is about to start: what `grpo-rl check-model` looks at, with the run's devices."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from grpo_rl.assembly.run import needed_room
from grpo_rl.checks.check import Case
from grpo_rl.checks.finding import Finding
from grpo_rl.checks.folder import folder_of, place_of
from grpo_rl.checks.memory import memory_findings
from grpo_rl.checks.model import source_of_name, unloaded_findings
from grpo_rl.checks.scores import loaded_findings
from grpo_rl.checks.trial import in_one_process
from grpo_rl.policies.hub import weight_files
from grpo_rl.policies.loading import skeleton
from grpo_rl.settings.derived import total_steps


def model(case: Case) -> Iterator[Finding]:
    """The findings on the model without its weights, but for memory."""
    yield Finding("OK", "model", source := source_of(case))
    yield from unloaded_findings(case.read, source, plans=False, needs_template=True)


def disk(case: Case) -> Iterator[Finding]:
    """The free space against what the run will write."""
    settings, source, folder = case.read, Path(source_of(case)), folder_of(case)
    files = weight_files(source) if source.is_dir() else []
    size = sum(path.stat().st_size for path in files) or 2 * sum(p.numel() for p in skeleton(str(source)).parameters())
    room = needed_room(settings, size)
    if not settings.train.keep_checkpoints and settings.train.checkpoint_frequency:  # all of them are kept
        room = replace(room, checkpoints=1 + total_steps(settings) // settings.train.checkpoint_frequency)
    free, lacking = shutil.disk_usage(place_of(folder)).free, room.lacking(folder)
    text = f"{free / 2**30:,.1f} GiB are free at {place_of(folder)}, and {room.described(lacking)}"
    if free < lacking:
        raise ValueError(f"{text}; free some space, set hydra.run.dir, or keep fewer (train.keep_checkpoints)")
    yield Finding("OK", "disk", text)


def memory(case: Case) -> Iterator[Finding]:
    """The memory of the longest responses, planned, against what is free."""
    if case.cluster:
        yield Finding("SKIP", "memory", "the nodes' devices are not this machine's; grpo-rl plan cluster=... plans it")
        return
    yield from memory_findings(case.read, skeleton(source_of(case)), divides=False)


def weights(case: Case) -> Iterator[Finding]:
    """The findings on the model with its weights, in one process of its own."""
    if case.quick or case.cluster:
        elsewhere = "each node has its own; `grpo-rl doctor` without --ray on one tells"
        yield Finding("SKIP", "weights", "--quick reads none" if case.quick else elsewhere)
        return
    yield from loaded_findings(in_one_process(case.read, torch.cuda.device_count()), Path(source_of(case)))


def source_of(case: Case) -> str:
    """The model's folder; without weights also its name on the hub.

    Raises:
        ValueError: it is not there, or can't be fetched.
    """
    return _source(case.read.model.name, case.quick)


_source = cache(source_of_name)
