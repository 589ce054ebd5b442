"""The checks of a run that is about to start, from cheap to dear."""

from __future__ import annotations

import math

from grpo_rl.checks.check import Case, Check

MODEL = ("model", "config", "gate", "tokenizer", "chat template")
"""Findings without which data can't be tokenised, and no model be planned or loaded."""
OF_MACHINE = (
    Check("packages", "grpo_rl.checks.machine:packages"),
    Check("open files", "grpo_rl.checks.machine:open_files"),
    Check("shared memory", "grpo_rl.checks.machine:shared_memory"),
    Check("clock", "grpo_rl.checks.machine:clock"),
    Check("run folder", "grpo_rl.checks.folder:run_folder", 40.0),  # the first that imports torch
    Check("leftovers", "grpo_rl.checks.folder:leftovers", 40.0),
)
OF_RUN = (
    Check("loggers", "grpo_rl.checks.loggers:loggers", 40.0),
    Check("model", "grpo_rl.checks.model_of_run:model", math.inf),  # which may have to be fetched
    Check("devices", "grpo_rl.checks.devices:devices", 40.0, ("engine", "ray")),
    Check("disk", "grpo_rl.checks.model_of_run:disk", needs=("model", "config", "run folder")),
    Check("memory", "grpo_rl.checks.model_of_run:memory", 40.0, (*MODEL, "devices")),
    Check("dataset", "grpo_rl.checks.data:dataset", 60.0, MODEL),
    Check("rewards", "grpo_rl.checks.data:rewards", 60.0, (*MODEL, "dataset")),
    Check("collectives", "grpo_rl.checks.devices:collectives", 75.0, ("devices",)),
    Check(
        "weights", "grpo_rl.checks.model_of_run:weights", math.inf, (*MODEL, "engine", "devices", "memory", "context")
    ),
)


def checks_of(case: Case) -> tuple[Check, ...]:
    """The checks of a case; of one whose settings can't be read, those of the machine."""
    return OF_MACHINE + (OF_RUN if case.settings else ())
