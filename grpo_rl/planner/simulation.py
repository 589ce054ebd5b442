"""Simulates a plan with responses that differ in length: on its layout, on layouts near it, and in turns.

A plan takes all responses to be alike. Here their lengths are log-normal and the collector is that of a run
(`grpo_rl.planner.simulator`); rates are the plan's own, so that with responses alike and phases in turns the same
seconds come out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from grpo_rl.planner.advice import best_in_turns, neighbours
from grpo_rl.planner.assumed import TAIL
from grpo_rl.planner.plan import Plan, plan_layout
from grpo_rl.planner.scenario import Scenario
from grpo_rl.planner.simulator import LogNormal, Outcome, SimulatorConfig, simulate
from grpo_rl.planner.time import sample_s

RESPONSES = 60_000
"""A simulation counts about so many, as far as they make :data:`STEPS`."""
STEPS = (6, 40)
"""Fewest and most steps that a simulation counts."""


@dataclass(frozen=True)
class Simulated:
    """A plan, simulated.

    Args:
        max_staleness: the bound; 0: sampling and training in turns.
    """

    plan: Plan
    max_staleness: int
    outcome: Outcome

    @property
    def step_s(self) -> float:
        return self.plan.scenario.batches.responses / self.outcome.responses_per_s

    @property
    def idle(self) -> float:
        """Share of the time in which an engine has nothing to sample; of devices that do both, while they sample."""
        outcome = self.outcome
        return outcome.idle - (1 - outcome.waiting) if self.plan.layout.colocated else outcome.idle


@dataclass(frozen=True)
class Simulation:
    """The plan's layout and what else could be done with the devices.

    Args:
        planned: the plan as it is; in turns where nothing can go on at once.
        turns: the plan's layout, in turns.
        colocated: all devices sample, then all train; None: it does not fit.
        others: layouts near the plan's, at once; none where the plan is in turns.
    """

    lengths: LogNormal
    planned: Simulated
    turns: Simulated
    colocated: Simulated | None = None
    others: tuple[Simulated, ...] = ()

    @property
    def all(self) -> list[Simulated]:
        """Each once, also all devices in turns, which no script does with several trainers."""
        found = [self.planned, *([] if self.turns is self.planned else [self.turns])]
        return [*found, *([self.colocated] if self.colocated else []), *self.others]

    @property
    def best(self) -> Simulated:
        """The one with the shortest step that can be run; within 1 % of it the first, as the plan's own is."""
        can_run = [simulated for simulated in self.all if simulated is not self.colocated]
        shortest = min(simulated.step_s for simulated in can_run)
        return next(simulated for simulated in can_run if simulated.step_s <= 1.01 * shortest)

    @property
    def best_overrides(self) -> dict[str, object]:
        plan = self.best.plan
        bound = {"train.max_staleness": self.best.max_staleness} if plan.scenario.overlaps else {}
        return {"mode": plan.scenario.settings.mode, **bound, **plan.overrides}

    @property
    def gain(self) -> float:
        """The speed of the plan over that of its layout in turns."""
        return self.turns.step_s / self.planned.step_s

    @property
    def ideal(self) -> float:
        r"""The gain of overlapping two phases of these lengths: $(T_s + T_t) / \max(T_s, T_t)$."""
        sample, train = self.turns.outcome.waiting, self.turns.outcome.training
        return (sample + train) / max(sample, train)


def response_lengths(scenario: Scenario, tail: float = TAIL) -> LogNormal:
    """Lengths with the scenario's mean; where it has none, 1 response in 100 reaches ``sampling.max_new_tokens``.

    Raises:
        ValueError: a number is out of range.
    """
    limit, mean = scenario.settings.sampling.max_new_tokens, scenario.response_tokens
    if tail < 1:
        raise ValueError(f"--length-tail is {tail:g}; the 99th percentile is 1 median or more")
    if mean is None:
        return LogNormal(max(1.0, limit / tail), tail, limit)
    if mean >= limit:
        raise ValueError(
            f"--response-tokens={mean} as the mean of lengths up to sampling.max_new_tokens={limit}; give fewer, or "
            "leave it out"
        )
    return LogNormal.of_mean(mean, tail, limit)


def simulate_plan(plan: Plan, tail: float = TAIL) -> Simulation:
    """A plan that fits, simulated, beside what else could be done with its devices.

    Raises:
        ValueError: the lengths can't be had.
    """
    lengths = response_lengths(plan.scenario, tail)
    scenario = replace(plan.scenario, response_tokens=round(lengths.mean))
    plan, bound = plan_layout(scenario, plan.layout), scenario.settings.train.max_staleness

    def run(plan: Plan, bound: int) -> Simulated:
        return Simulated(plan, bound, simulate(simulator_config(plan, lengths, bound)))

    turns = run(plan, 0)
    if plan.layout.colocated:
        return Simulation(lengths, turns, turns)
    everything = best_in_turns(scenario)
    colocated = run(everything, 0) if everything else None
    if not scenario.overlaps or bound == 0:
        return Simulation(lengths, turns, turns, colocated)
    others = tuple(run(other, bound) for other in neighbours(plan))
    return Simulation(lengths, run(plan, bound), turns, colocated, others)


def simulator_config(plan: Plan, lengths: LogNormal, max_staleness: int) -> SimulatorConfig:
    """A plan as the simulator takes it; its responses are as long as ``lengths`` are in the mean."""
    b = plan.scenario.batches
    slots, token_s, token_s_per_response = engine_rates(plan, max_staleness)
    return SimulatorConfig(
        engines=plan.layout.engines,
        slots=slots,
        token_s=token_s,
        token_s_per_response=token_s_per_response,
        lengths=lengths,
        group_size=b.group_size,
        groups_per_step=b.prompts,
        train_tokens_per_s=b.responses * lengths.mean / (plan.seconds["score"] + plan.seconds["train"]),
        push_s=plan.seconds["sync"],
        max_staleness=max_staleness,
        steps=max(STEPS[0], min(STEPS[1], RESPONSES // b.responses)),
        margin=max_staleness + 1 if max_staleness else 0,
    )


def engine_rates(plan: Plan, max_staleness: int = 0) -> tuple[int, float, float]:
    """Responses that an engine computes at a time, seconds of its decoding step, and what each response adds to that.

    They are the line through what the plan says of one response alone, and of as many as the fullest engine has
    at a time: its part of a step's, and of those that follow as far as ``max_staleness`` lets it.
    """
    scenario, b, engine = plan.scenario, plan.scenario.batches, plan.engine
    slots = max(1, min(engine.sequences, engine.tokens // (b.prompt_tokens + b.response_tokens)))

    def step_s(groups: int, size: int) -> float:
        seconds = sample_s(
            scenario.shape,
            engine,
            replace(b, prompts=groups, group_size=size),
            scenario.sample_share,
            scenario.cluster.device,
            engines=1,
            size=plan.layout.engine_size,
        )
        return seconds / b.response_tokens

    size = min(slots, b.group_size)
    full = size * min(slots // size, math.ceil(b.prompts * (1 + max_staleness) / plan.layout.engines))
    alone, together = step_s(1, 1), step_s(full // size, size)
    each = max(0.0, together - alone) / max(1, full - 1)
    return slots, max(alone - each, 1e-9), each
