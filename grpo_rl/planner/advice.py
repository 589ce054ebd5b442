"""Advice: a division of devices among roles, and remedies where something does not fit; each was planned itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from grpo_rl.planner.plan import Plan, make_plan, plan_layout
from grpo_rl.planner.scenario import Layout, Scenario
from grpo_rl.settings.devices import asked_devices

BEST_UTILIZATION = 0.9
"""``inference_model.gpu_memory_utilization`` of devices that sample alone."""


def best_overlapped(scenario: Scenario) -> Plan | None:
    """The plan with the shortest step where sampling and training go on at the same time; None: none fits.

    Of those that are about as short, it is the one whose phases sum up to least: its waiting side has most to spare.
    """
    fitting = [plan for plan in _overlapped(scenario) if plan.fits]
    shortest = min((plan.step_s for plan in fitting), default=0.0)
    about = [plan for plan in fitting if plan.step_s <= 1.01 * shortest]
    return min(about, key=lambda plan: (sum(plan.seconds.values()), plan.layout.engine_size), default=None)


def with_devices(scenario: Scenario) -> tuple[Scenario, str]:
    """The scenario with devices given to each role, and the overrides that do it.

    Nothing is changed where the config divides the devices itself, there is one, or sampling and training take turns.
    An engine on devices of its own may take :data:`BEST_UTILIZATION` of them; the config's share is for one that has
    to leave room for a trainer.

    Raises:
        ValueError: the devices are too few.
    """
    settings, count = scenario.settings, scenario.cluster.count
    divided = any(asked_devices(settings, role) is not None for role in ("train", "inference"))
    if count == 1 or divided or not scenario.overlaps:
        return scenario, ""
    alone = scenario.with_overrides({"inference_model.gpu_memory_utilization": BEST_UTILIZATION})
    longest = settings.inference_model.max_model_len
    if not (plans := list(_overlapped(alone))):
        raise ValueError(f"{count} devices are too few to train, to sample and for ref_model; leave ref_model null")
    # Where nothing fits, at least an engine that does: it is the smaller of both.
    plan = best_overlapped(alone) or min(plans, key=lambda p: (p.engine.tokens < longest, max(p.missing.values())))
    overrides = plan.overrides
    if plan.layout.train != 1 and settings.train_model.parallel is None:
        overrides["train_model.parallel"] = "fsdp"
    return scenario.with_overrides(overrides), written(overrides)


def _overlapped(scenario: Scenario) -> Iterator[Plan]:
    """Plans of every split of all devices; a reference shares the trainers', or has one next to a single trainer."""
    count, ref = scenario.cluster.count, asked_devices(scenario.settings, "ref") or 0
    scenario = scenario if scenario.overlaps else scenario.with_overrides({"mode": "async"})
    for size in scenario.engine_sizes(2 ** int(math.log2(max(1, count - 1)))):
        for ranks in range(1, min(count - ref, (1 if ref else scenario.most_ranks) + 1)):
            inference = count - ref - ranks
            if inference % size == 0:
                yield plan_layout(scenario, Layout(ranks, ref, inference, size))


def remedies(plan: Plan) -> dict[str, list[str]]:
    """Overrides that make a role fit that does not, by role: one setting each, or else pairs of them, or else none.

    Each was planned: with it that role fits, and no other lacks more than before.
    """
    found = {}
    for role in plan.missing:
        candidates = list(_candidates(plan, role))
        tried = ([_first(plan, role, keys) for keys in itertools.combinations(candidates, size)] for size in (1, 2))
        found[role] = next((fitting for all_of in tried if (fitting := [text for text in all_of if text])), [])
    return found


def _candidates(plan: Plan, role: str) -> Iterator[tuple[str, Sequence[object]]]:
    """Keys that may help, and their values, the least change first; those that don't help are left out once planned."""
    scenario, layout, settings = plan.scenario, plan.layout, plan.scenario.settings
    inference, utilization = settings.inference_model, settings.inference_model.gpu_memory_utilization
    longest = settings.sampling.max_new_tokens
    shares = [round(0.05 * i, 2) for i in range(2, 19)]
    lower = [share for share in shares[::-1] if share < utilization]
    if role == "train":
        yield "train_model.gradient_checkpointing", [True]
        yield "train.micro_batch_tokens", [plan.largest_tokens]
        if layout.colocated and not scenario.engine_sleeps:
            yield "inference_model.gpu_memory_utilization", lower
            yield "inference_model.sleep", [True]
        if scenario.visible and not settings.train_model.devices:
            most = layout.train + scenario.cluster.count - layout.total
            yield "train_model.num_devices", range(layout.train + 1, most + 1)
        fitting = (plan.largest_tokens - (inference.max_model_len - longest)) // scenario.batches.group_size
        if 64 <= fitting < longest:
            yield "sampling.max_new_tokens", [fitting // 64 * 64]
        yield "train_model.lora.rank", [16]
    if role == "inference":
        if not layout.colocated or plan.shared:
            yield "inference_model.gpu_memory_utilization", [share for share in shares if share > utilization]
        elif scenario.engine_sleeps:
            yield "inference_model.gpu_memory_utilization", lower
        sizes = scenario.engine_sizes(layout.inference)
        yield "inference_model.tensor_parallel_size", [size for size in sizes if size > layout.engine_size]
        if (length := plan.largest_len // 64 * 64) > longest:
            yield "inference_model.max_model_len", [length]


def _first(plan: Plan, role: str, candidates: Iterable[tuple[str, Sequence[object]]]) -> str:
    """The keys with the first of their values with which the role fits; empty: there are none."""
    keys, values = zip(*candidates, strict=True)
    for chosen in itertools.product(*values):
        overrides = dict(zip(keys, chosen, strict=True))
        try:
            other = make_plan(plan.scenario.with_overrides(overrides))
        except ValueError:
            continue  # a value that this config can't have
        if all(name != role and gib <= plan.missing.get(name, 0.0) for name, gib in other.missing.items()):
            return written(overrides)
    return ""


def written(overrides: Mapping[str, object]) -> str:
    """Overrides as they are written on a command line.

    >>> written({"train_model.gradient_checkpointing": True, "train.micro_batch_tokens": 512})
    'train_model.gradient_checkpointing=true train.micro_batch_tokens=512'
    """
    texts = {key: str(value).lower() if isinstance(value, bool) else value for key, value in overrides.items()}
    return " ".join(f"{key}={value}" for key, value in texts.items())
