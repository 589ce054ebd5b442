"""The check of a run's memory, by the planner."""

from collections.abc import Iterator

import torch

from grpo_rl.checks.check import Case, Finding
from grpo_rl.checks.machine import free_memory
from grpo_rl.checks.model import source_of
from grpo_rl.planner.hardware import GIB, Cluster
from grpo_rl.planner.memory import NotPlannedError
from grpo_rl.planner.plan import Plan, make_plan, remedies
from grpo_rl.planner.scenario import Scenario
from grpo_rl.policies.loading import skeleton
from grpo_rl.settings import derived
from grpo_rl.settings.devices import allocate


def memory(case: Case) -> Iterator[Finding]:
    """The memory that `grpo-rl plan` predicts for the longest responses, against what is free on this machine."""
    if case.cluster:
        yield Finding("SKIP", "memory", "the nodes' devices are not this machine's; grpo-rl plan cluster=... plans it")
        return
    settings, dtype = case.read, derived.dtype(case.read)
    try:
        model = skeleton(source_of(case)).to(getattr(torch, dtype))
        plan = make_plan(Scenario(settings, model, Cluster.parse("here", dtype)))
    except NotPlannedError as error:
        yield Finding("note", "memory", f"not planned: {error}; a short run shows whether it fits")
        return
    needed, free, bound = _room(plan)
    roles = (f"{role.name} {role.needed / GIB:,.1f} of {role.usable / GIB:,.1f} GiB" for role in plan.roles)
    text = f"planned for the longest responses: {', '.join(roles)}; {free / GIB:,.1f} GiB are free ({bound})"
    if not plan.fits:
        found = [remedy for of_role in remedies(plan).values() for remedy in of_role]
        remedy = f"set {' or '.join(found)}" if found else "take a smaller model, or more devices"
        yield Finding("FIX", "memory", f"{text}; {remedy} (grpo-rl plan has details)")
    elif free < needed:
        text = f"{text}, and {needed / GIB:,.1f} GiB are needed at once; end what else takes memory"
        yield Finding("FIX", "memory", f"{text}, or raise the limit")
    else:
        yield Finding("OK", "memory", text)


def _room(plan: Plan) -> tuple[float, float, str]:
    """Bytes needed at once and free, of the fullest GPU or for this machine's processes, and what bounds them."""
    scenario, needed = plan.scenario, max(role.needed for role in plan.roles)
    if scenario.cluster.device.kind == "cpu":
        if scenario.overlaps:
            train, *others = plan.roles
            needed = plan.layout.train * train.needed + plan.layout.engines * sum(role.needed for role in others)
        return needed, *free_memory()
    devices = allocate(scenario.settings, scenario.settings.mode or "sync")
    indices = {device.index for device in (*devices.train, *devices.ref, *devices.inference)}
    free, index = min((torch.cuda.mem_get_info(index)[0], index) for index in indices)
    return needed, free, f"on cuda:{index}"
