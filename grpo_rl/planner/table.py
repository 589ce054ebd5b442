"""A plan as a person sees it in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from grpo_rl.planner.hardware import GIB
from grpo_rl.planner.plan import USABLE, Plan


def plan_view(
    plan: Plan, title: str, advice: Mapping[str, Sequence[str]], best: Plan | None, chosen: str = ""
) -> RenderableType:
    """Devices, memory by role, seconds by phase, and what to do where something does not fit.

    Args:
        advice: from `grpo_rl.planner.advice.remedies`.
        best: the split of all devices with the shortest step, where it is another.
        chosen: overrides that were not in the config.
    """
    scenario, shape, b = plan.scenario, plan.scenario.shape, plan.scenario.batches
    adapters = f", of which {shape.adapters / 1e6:,.1f} M in adapters are trained" if shape.adapters else ""
    model = f"{scenario.settings.model.name}: {shape.parameters / 1e9:,.2f} billion parameters{adapters}"
    how = "at once on one device, at most" if plan.shared else "at once" if scenario.overlaps else "in turns"
    parts: list[RenderableType] = [
        Text(title, style="bold"),
        Text(),
        _line("Model", f"{model}, {shape.layers} layers"),
        _line("Cluster", str(scenario.cluster)),
        _line("Devices", _devices(plan)),
        Text(),
        _memory(plan),
        Text(),
        *_room(plan),
        Text(),
        _line("Step", f"{b.responses:,} responses of {b.response_tokens:,} tokens to prompts of {b.prompt_tokens:,}"),
        _line("", f"{phases(plan.seconds)}; {how} {_seconds(plan.step_s)}"),
    ]
    if best is not None:
        share = best.scenario.settings.inference_model.gpu_memory_utilization
        split = f"train {best.layout.train}, inference {best.layout.inference}, engines of {best.layout.engine_size}"
        text = f"{_seconds(best.step_s)} a step with {split} in {share:.0%} of the memory ({phases(best.seconds)})"
        parts.append(_line("", f"best at once: {text}"))
    parts.append(Text())
    for role in plan.roles:
        if role.missing_gib:
            lacks = f"{role.name} lacks {role.missing_gib:,.1f} GiB on each device ({role.moment})"
            parts.append(Text(f"Does not fit: {lacks}.", style="bold red"))
            if role.name == "train" and plan.layout.train == scenario.most_ranks < scenario.cluster.count:
                few = f"No more than {scenario.most_ranks} can train, as a step has so many groups of responses; "
                parts.append(Text(f"{few}for more: env.num_envs, and with it train.optim_batch_size."))
            overrides = advice.get(role.name, ())
            parts.append(Text("Would fit:" if overrides else "No single setting or pair of them makes it fit."))
            parts += [Text(f"  {override}") for override in overrides]
    if plan.fits:
        parts.append(Text("Fits.", style="bold green"))
    if plan.refused:
        parts.append(Text(f"No script runs it: {plan.refused}.", style="bold red"))
    if chosen:
        parts.append(Text(f"With {chosen}"))
    return Group(*parts)


def _line(label: str, text: str) -> Text:
    return Text.assemble((f"{label:<9}", "bold"), text)


def _devices(plan: Plan) -> str:
    layout, ranks = plan.layout, plan.layout.train
    how = f" ({'fsdp' if plan.scenario.shards(ranks) > 1 else 'ddp'})" if ranks > 1 else ""
    text = f"train {ranks}{how}, "
    if plan.scenario.has_reference:
        text += f"reference {layout.ref}, " if layout.ref else "reference next to it, "
    text += f"inference {'on the same' if layout.colocated else layout.inference}, "
    text += f"{layout.engines} engine" + "s" * (layout.engines > 1)
    text += f" of {layout.engine_size}" * (layout.engine_size > 1)
    text += f"; {plan.scenario.settings.mode}"
    if plan.shared:
        share = plan.scenario.settings.inference_model.gpu_memory_utilization
        text += f"; the engine has {share:.0%} of its memory, the trainer {USABLE - share:.0%}"
    return text


def _memory(plan: Plan) -> Table:
    columns = (Column(role.name, justify="right") for role in plan.roles)
    table = Table("GiB on each device", *columns, box=None, pad_edge=False, header_style="bold")
    for name in dict.fromkeys(name for role in plan.roles for name, size in role.parts.items() if size):
        sizes = (role.parts.get(name, 0.0) for role in plan.roles)
        table.add_row(f"  {name}", *(f"{size / GIB:,.2f}" if size else "" for size in sizes))
    table.add_row("needed", *(f"{role.needed / GIB:,.2f}" for role in plan.roles))
    table.add_row("usable", *(f"{role.usable / GIB:,.2f}" for role in plan.roles))
    return table


def _room(plan: Plan) -> list[Text]:
    scenario, settings, train = plan.scenario, plan.scenario.settings, plan.roles[0]
    tokens, longest = scenario.micro_batch_tokens(plan.layout.train), scenario.longest_group
    text = f"train is fullest in {train.moment}, with {tokens:,} tokens; "
    text += f"largest train.micro_batch_tokens {plan.largest_tokens:,}"
    if longest > settings.train.micro_batch_tokens and not scenario.batches.accumulation:
        text += f" (a group at its longest has {longest:,}, and is never split)"
    context = settings.inference_model.max_model_len
    responses = min(plan.engine.tokens // context, plan.engine.sequences)
    engine = f"an engine's cache holds {plan.engine.tokens:,} tokens, {responses:,} responses of "
    return [_line("Room", text), _line("", f"{engine}{context:,}; largest max_model_len {plan.largest_len:,}")]


def phases(seconds: Mapping[str, float]) -> str:
    """The phases that take time.

    >>> phases({"sample": math.inf, "score": 0.0, "train": 2.25, "sync": 0.0181})
    'sample never ends, train 2.2 s, sync 18 ms'
    """
    return ", ".join(f"{phase} {_seconds(s)}" for phase, s in seconds.items() if s)


def _seconds(s: float) -> str:
    if math.isinf(s):
        return "never ends"
    return f"{1000 * s:.0f} ms" if 0 < s < 0.05 else f"{s:,.1f} s"
