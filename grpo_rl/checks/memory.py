"""The check of a model's memory, by the planner."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from grpo_rl.checks.finding import Finding, unfit
from grpo_rl.planner.advice import remedies, with_devices
from grpo_rl.planner.errors import NotPlannedError
from grpo_rl.planner.hardware import GIB, Cluster
from grpo_rl.planner.plan import make_plan
from grpo_rl.planner.scenario import Scenario
from grpo_rl.settings.schema import Settings


def memory_findings(settings: Settings, model: PreTrainedModel) -> Iterator[Finding]:
    """The memory that `grpo-rl plan` predicts on this machine; tests compare its peaks with measured ones."""
    with unfit("memory"):
        dtype = settings.train_model.dtype
        try:
            scenario, _ = with_devices(
                Scenario(settings, model.to(getattr(torch, dtype)), Cluster.parse("here", dtype))
            )
            plan = make_plan(scenario)
        except NotPlannedError as error:
            yield Finding("note", "memory", f"not planned: {error}; whether it fits, a short run tells")
            return
        roles = (f"{role.name} {role.needed / GIB:,.1f} of {role.usable / GIB:,.1f} GiB" for role in plan.roles)
        text = f"planned for the longest responses: {', '.join(roles)}"
        if plan.fits:
            yield Finding("OK", "memory", text)
            return
        found = [remedy for of_role in remedies(plan).values() for remedy in of_role]
        remedy = f"set {' or '.join(found)}" if found else "take a smaller model, or more devices"
        yield Finding("FIX", "memory", f"{text}; {remedy} (grpo-rl plan says more)")
