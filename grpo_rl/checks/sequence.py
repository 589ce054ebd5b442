"""The checks of a run that is about to start, from cheap to dear."""

from __future__ import annotations

import math

from grpo_rl.checks.in_turn import Case, Check

MODEL = ("model", "config", "gate", "tokenizer", "chat template")
"""Findings without which data can't be tokenised, and no model be planned or loaded."""
OF_MACHINE = (
    Check("packages", "machine:packages"),
    Check("open files", "machine:open_files"),
    Check("shared memory", "machine:shared_memory"),
    Check("clock", "machine:clock"),
    Check("run folder", "folder:run_folder"),
    Check("leftovers", "folder:leftovers"),
)
OF_RUN = (
    Check("loggers", "loggers:loggers", 40.0),
    Check("model", "model:model", math.inf),  # which may have to be fetched
    Check("devices", "devices:devices", 40.0, ("engine", "ray")),
    Check("disk", "folder:disk", needs=("model", "config")),
    Check("memory", "model:memory", 40.0, (*MODEL, "devices")),
    Check("dataset", "data:dataset", 60.0, MODEL),
    Check("rewards", "data:rewards", 60.0, (*MODEL, "dataset")),
    Check("collectives", "devices:collectives", 75.0, ("devices",)),
    Check("weights", "scores:weights", math.inf, (*MODEL, "engine", "devices", "memory", "context")),
)


def checks_of(case: Case) -> tuple[Check, ...]:
    """The checks of a case; of one whose settings can't be read, those of the machine."""
    return OF_MACHINE + (OF_RUN if case.settings else ())
