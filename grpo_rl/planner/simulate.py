"""What becomes of a plan where answers differ in length: its split in the digital twin, others beside it, and turns.

A plan takes all answers to be alike. Here their lengths are log-normal and the collector is that of a run
(`grpo_rl.planner.simulator`); rates are the plan's own, so that with answers alike and phases in turns the same
seconds come out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_rl.planner.advice import Split, in_turns, neighbours
from grpo_rl.planner.memory import VLLM_SEQUENCES
from grpo_rl.planner.plan import Plan
from grpo_rl.planner.question import Question
from grpo_rl.planner.simulator import LogNormal, Outcome, Scenario, simulate
from grpo_rl.planner.time import Work, sample_s

TAIL = 8.0
"""Of lengths: the 99th percentile over the median."""
ANSWERS = 60_000
"""That a simulation counts, as far as they make :data:`STEPS`."""
STEPS = (6, 40)
"""Fewest and most steps that a simulation counts."""


@dataclass(frozen=True)
class Simulated:
    """A split in the twin.

    Args:
        split: of the devices.
        max_staleness: the bound; 0: sampling and training in turns.
        outcome: what the twin gave.
        answers: of a step.
    """

    split: Split
    max_staleness: int
    outcome: Outcome
    answers: int

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.answers / self.outcome.answers_per_s

    @property
    def idle(self) -> float:
        """Share of the time in which an engine has nothing to sample; of devices that do both, while they sample."""
        return self.outcome.idle if self.split.inference else self.outcome.idle - (1 - self.outcome.waiting)


@dataclass(frozen=True)
class Simulation:
    """The plan's split and what else could be done with the devices.

    Args:
        mode: of the plan.
        lengths: of answers.
        planned: as the plan has it; in turns where nothing can go on at once.
        turns: on the same devices, in turns.
        colocated: all devices sample, then all train; None: it does not fit.
        others: splits near the plan's, at once; none where the plan is in turns.
    """

    mode: str
    lengths: LogNormal
    planned: Simulated
    turns: Simulated
    colocated: Simulated | None
    others: tuple[Simulated, ...]

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
    def best_settings(self) -> dict[str, object]:
        """The keys that ask for it."""
        bound = {} if self.mode == "sync" else {"train.max_staleness": self.best.max_staleness}
        return {"mode": self.mode, **bound, **self.best.split.settings}

    @property
    def gain(self) -> float:
        """Of the plan's split over the same in turns."""
        return self.turns.step_s / self.planned.step_s

    @property
    def ideal(self) -> float:
        r"""What overlapping two phases of these lengths can give: $(T_s + T_t) / \max(T_s, T_t)$."""
        sample, train = self.turns.outcome.waiting, self.turns.outcome.training
        return (sample + train) / max(sample, train)


def answer_lengths(question: Question, tail: float = TAIL) -> LogNormal:
    """Lengths whose mean is the question's; where it has none, 1 answer in 100 reaches ``sampling.max_new_tokens``.

    Raises:
        ValueError: a number is out of range.
    """
    limit = question.answer
    if tail < 1:
        raise ValueError(f"--length-tail is {tail:g}; the 99th percentile is 1 median or more")
    if question.answer_tokens is None:
        return LogNormal(max(1.0, limit / tail), tail, limit)
    if question.answer_tokens >= limit:
        raise ValueError(
            f"--answer-tokens={question.answer_tokens} as the mean of lengths up to sampling.max_new_tokens={limit}; "
            "give fewer, or leave it out"
        )
    return LogNormal.of_mean(question.answer_tokens, tail, limit)


def simulate_plan(plan: Plan, tail: float = TAIL) -> Simulation:
    """The plan in the twin, beside what else could be done with its devices.

    Args:
        plan: one that fits.
        tail: the 99th percentile of answers' lengths over their median.

    Raises:
        ValueError: the lengths can't be had.
    """
    lengths = answer_lengths(plan.question, tail)
    question = replace(plan.question, answer_tokens=round(lengths.mean))
    devices, bound = plan.devices, plan.question.cfg.train.max_staleness
    ranks, size = len(devices.train), devices.tensor_parallel_size
    seconds = question.seconds(ranks, len(devices.ref), devices.replicas, size, devices.colocated)
    utilization = question.cfg.inference_model.gpu_memory_utilization
    inference = 0 if devices.colocated else len(devices.inference)
    split = Split(ranks, inference, size, utilization, seconds, 0.0)

    def run(split: Split, bound: int) -> Simulated:
        scenario = scenario_of(question, split, lengths, bound)
        return Simulated(split, bound, simulate(scenario), scenario.groups_per_step * scenario.group_size)

    turns = run(split, 0)
    if question.cluster.count == 1 or devices.colocated:
        return Simulation(question.mode, lengths, turns, turns, None, ())
    at_once = question.mode == "async" and bound > 0
    planned = run(split, bound) if at_once else turns
    everything = in_turns(question)
    others = [run(near, bound) for near in neighbours(question, split)] if at_once else []
    return Simulation(question.mode, lengths, planned, turns, run(everything, 0) if everything else None, tuple(others))


def scenario_of(question: Question, split: Split, lengths: LogNormal, max_staleness: int) -> Scenario:
    """A split as the twin takes it.

    Args:
        question: whose answers are as long as ``lengths`` are in the mean.
    """
    b = question.batches
    replicas = (split.inference or split.train) // split.size
    slots, token_s, token_s_per_answer = engine_rates(question, split)
    train_s = sum(s for phase, s in split.seconds.items() if phase in ("score", "train"))
    steps = max(STEPS[0], min(STEPS[1], ANSWERS // b.answers))
    return Scenario(
        engines=replicas,
        slots=slots,
        token_s=token_s,
        token_s_per_answer=token_s_per_answer,
        lengths=lengths,
        group_size=b.group_size,
        groups_per_step=b.prompts,
        train_tokens_per_s=b.answers * lengths.mean / train_s,
        push_s=split.seconds["sync"],
        max_staleness=max_staleness,
        steps=steps,
        margin=max_staleness + 1 if max_staleness else 0,
    )


def engine_rates(question: Question, split: Split) -> tuple[int, float, float]:
    """Answers that an engine computes at a time, seconds of its decoding step, and what each answer adds to that.

    The line through what the plan says of one answer alone and of as many as there is room for.
    """
    b, device = question.batches, question.cluster.device
    engine = question.having({"inference_model.gpu_memory_utilization": split.utilization}).engine(split.size)
    slots = max(1, min(VLLM_SEQUENCES, engine.tokens // (b.prompt_tokens + b.answer_tokens)))

    def step_s(groups: int, size: int) -> float:
        work = Work(replace(b, prompts=groups, group_size=size), question.train_share, question.sample_share)
        return sample_s(question.shape, engine, work, device, 1, split.size) / b.answer_tokens

    size = min(slots, b.group_size)
    full = slots // size * size
    alone, together = step_s(1, 1), step_s(full // size, size)
    each = max(0.0, together - alone) / max(1, full - 1)
    return slots, max(alone - each, 1e-9), each
