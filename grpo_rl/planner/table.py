"""A plan as a person sees it in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_rl.planner.advice import Split, written
from grpo_rl.planner.hardware import GIB
from grpo_rl.planner.memory import VLLM_SEQUENCES
from grpo_rl.planner.plan import Plan
from grpo_rl.planner.simulate import Simulated, Simulation


def plan_view(
    plan: Plan,
    title: str,
    advice: Mapping[str, Sequence[str]],
    parallel: Split | None,
    turns: Split | None,
    chosen: Sequence[str] = (),
) -> RenderableType:
    """Devices, memory by role, seconds by phase, and what else would do.

    Args:
        advice: of :func:`grpo_rl.planner.advice.remedies`.
        parallel: the best split with sampling beside training; None: there is none.
        turns: the best with both in turns.
        chosen: settings that were not in the config.
    """
    shape, question = plan.question.shape, plan.question
    adapters = f", of which {shape.adapters / 1e6:,.1f} M in adapters are trained" if shape.adapters else ""
    model = f"{question.cfg.model.name}: {shape.parameters / 1e9:,.2f} billion parameters{adapters}"
    parts: list[RenderableType] = [
        Text(title, style="bold"),
        Text(),
        _line("Model", f"{model}, {shape.layers} layers"),
        _line("Cluster", str(question.cluster)),
        _line("Devices", _devices(plan)),
        Text(),
        _memory(plan),
        Text(),
        *_room(plan),
        Text(),
        *_time(plan, parallel, turns),
        Text(),
    ]
    for role, gib in plan.missing.items():
        moment = next(r.moment for r in plan.roles if r.name == role)
        parts.append(Text(f"Does not fit: {role} lacks {gib:,.1f} GiB on each device ({moment}).", style="bold red"))
        if role == "train" and len(plan.devices.train) == question.most_ranks < question.cluster.count:
            parts.append(
                Text(
                    f"No more than {question.most_ranks} can train, as a step has so many groups of answers; for more: "
                    "env.num_envs, and with it train.optim_batch_size."
                )
            )
        settings = advice.get(role, ())
        parts.append(Text("Would fit:" if settings else "No single setting or pair of them makes it fit."))
        parts += [Text(f"  {setting}") for setting in settings]
    if plan.fits:
        parts.append(Text("Fits.", style="bold green"))
    if plan.refused:
        parts.append(Text(f"No script runs it: {plan.refused}.", style="bold red"))
    if chosen:
        parts.append(Text(f"With {' '.join(chosen)}"))
    return Group(*parts)


def _line(label: str, text: str) -> Text:
    return Text.assemble((f"{label:<9}", "bold"), text)


def _devices(plan: Plan) -> str:
    devices, train = plan.devices, len(plan.devices.train)
    how = f" ({'fsdp' if plan.question.sharded(train) else 'ddp'})" if train > 1 else ""
    engines = f"{devices.replicas} engine" + ("s" if devices.replicas > 1 else "")
    engines += f" of {devices.tensor_parallel_size}" if devices.tensor_parallel_size > 1 else ""
    said = [f"train {train}{how}"]
    if plan.question.reference_apart:
        said.append("reference beside it" if devices.ref == devices.train else f"reference {len(devices.ref)}")
    beside = "on the same" if devices.colocated else f"{len(devices.inference)}"
    said.append(f"inference {beside}, {engines}")
    return ", ".join(said) + f"; {plan.question.mode}"


def _memory(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("GiB on each device")
    for role in plan.roles:
        table.add_column(role.name, justify="right")
    for name in dict.fromkeys(name for role in plan.roles for name, size in role.parts.items() if size):
        table.add_row(f"  {name}", *(_gib(role.parts.get(name, 0.0)) for role in plan.roles))
    table.add_row("needed", *(f"{role.needed / GIB:,.2f}" for role in plan.roles))
    table.add_row("usable", *(f"{role.usable / GIB:,.2f}" for role in plan.roles))
    return table


def _gib(size: float) -> str:
    """
    >>> _gib(0.0), _gib(3 * 2**20), _gib(3 * 2**30)
    ('', '0.00', '3.00')
    """
    return f"{size / GIB:,.2f}" if size else ""


def _room(plan: Plan) -> list[Text]:
    question, cfg = plan.question, plan.question.cfg
    train = next(role for role in plan.roles if role.name == "train")
    longest = question.longest_group
    said = f"train is fullest in {train.moment}, with {plan.tokens:,} tokens; "
    said += f"largest train.micro_batch_tokens {plan.largest_tokens:,}"
    if longest > cfg.train.micro_batch_tokens and not plan.question.batches.accumulation:
        said += f" (a group at its longest has {longest:,}, and is never split)"
    answers = plan.engine.tokens // cfg.inference_model.max_model_len
    engine = f"an engine's cache holds {plan.engine.tokens:,} tokens, {min(answers, VLLM_SEQUENCES):,} answers of "
    engine += f"{cfg.inference_model.max_model_len:,}; largest max_model_len {plan.largest_len:,}"
    return [_line("Room", said), _line("", engine)]


def _time(plan: Plan, parallel: Split | None, turns: Split | None) -> list[Text]:
    b = plan.question.batches
    lines = [_line("Step", f"{b.answers:,} answers of {b.answer_tokens:,} tokens to prompts of {b.prompt_tokens:,}")]
    how = "at once" if plan.question.mode == "async" else "in turns"
    lines.append(_line("", f"{phases(plan.seconds)}; {how} {_seconds(plan.step_s)}"))
    if plan.question.cluster.count > 1:
        for split, what in (
            (parallel, "at once"),
            (turns, "in turns, the engine asleep while it trains (no script does)"),
        ):
            lines.append(_line("", f"best {what}: {_split(split)}"))
    return lines


def simulation_view(simulation: Simulation) -> RenderableType:
    """Splits in the twin, and which is best."""
    lengths, planned = simulation.lengths, simulation.planned
    said = f"lengths of answers: half under {lengths.median:,.0f} tokens, 1 in 100 over "
    said += (
        f"{min(lengths.median * lengths.p99_over_median, lengths.limit):,.0f}, none over {lengths.limit:,.0f}, mean "
    )
    said += f"{lengths.mean:,.0f}"
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in ("s a step", "answers/s", "trainer waits", "engines idle", "staleness"):
        table.add_column(name, justify="right")
    for simulated in simulation.all:
        outcome = simulated.outcome
        stale = f"{outcome.staleness_mean:.1f}, at most {outcome.staleness_max}" if simulated.max_staleness else "0"
        waits = f"{outcome.waiting:.0%}" if simulated.split.inference else ""
        numbers = (f"{simulated.step_s:,.1f}", f"{outcome.answers_per_s:,.1f}", waits, f"{simulated.idle:.0%}", stale)
        table.add_row(f"  {_name(simulated)}", *numbers)
    parts: list[RenderableType] = [Text(), _line("Twin", said), table]
    if planned is not simulation.turns:
        gain = f"at once is {simulation.gain:.2f} times as fast as in turns on the same devices; two phases of these "
        gain += f"lengths, overlapped, would be {simulation.ideal:.2f} times"
        parts.append(_line("", gain))
    if len(simulation.all) > 1:
        settings = written(simulation.best_settings)
        parts.append(_line("", f"best: {_name(simulation.best)} ({settings})"))
    return Group(*parts)


def _name(simulated: Simulated) -> str:
    split = simulated.split
    where = f"train {split.train}, inference {split.inference}" if split.inference else f"all {split.train}"
    return f"{where}, {f'max_staleness={simulated.max_staleness}' if simulated.max_staleness else 'in turns'}"


def phases(seconds: Mapping[str, float]) -> str:
    """
    >>> phases({"sample": math.inf, "score": 0.0, "train": 2.25})
    'sample never ends, train 2.2 s'
    """
    return ", ".join(f"{phase} {_seconds(s)}" for phase, s in seconds.items() if s)


def _seconds(s: float) -> str:
    return "never ends" if math.isinf(s) else f"{s:,.1f} s"


def _split(split: Split | None) -> str:
    if split is None:
        return "nothing fits"
    where = f"train {split.train}, inference {split.inference}" if split.inference else f"all {split.train}"
    engines = f"engines of {split.size} in {split.utilization:.0%} of the memory"
    return f"{split.step_s:,.1f} s a step with {where}, {engines} ({phases(split.seconds)})"
