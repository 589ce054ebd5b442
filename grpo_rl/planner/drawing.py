"""A plan of batches as a picture in the terminal, and a plan of memory and time as a table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.table import Column, Table
from rich.text import Text

from grpo_rl.planner.batches import BatchPlan
from grpo_rl.planner.hardware import GIB
from grpo_rl.settings.derived import Where, needs_old_log_probs
from grpo_rl.settings.devices import USABLE

if TYPE_CHECKING:
    from grpo_rl.planner.plan import Plan

COLUMNS = 79
"""Width of the drawing: one less than the narrowest terminal that is still common."""
BAR = 38
"""Columns of the longest micro-batch."""
MARKS = 32
"""Marks in a row of responses; in a larger group each stands for several."""
ROWS = 8
"""Rows of groups or micro-batches; of more those in the middle are left out."""
COLOURS = ("blue", "green", "magenta", "cyan", "yellow")
"""Colours of optimizer steps, in turn."""


def picture(plan: BatchPlan, title: str) -> RenderableType:
    """The drawing: what is sampled, what an optimizer step takes, how it is computed, how often, on which devices."""
    body = Table.grid(padding=(0, 2))
    body.add_column(style="bold", no_wrap=True)
    body.add_column(width=COLUMNS - 11)
    errors = {error.where: Text(f"{error.what}. Use {error.remedy}.", style="bold red") for error in plan.errors}

    def row(heading: str, text: str, settings: str, *where: Where, drawn: Text | None = None) -> None:
        line = next((errors[place] for place in where if place in errors), Text(text))
        body.add_row(heading, Group(line, Text(settings, style="dim"), *([drawn] if drawn else [])))
        body.add_row()

    text = f"{_count(plan.prompts, 'prompt')} x {plan.group_size} responses = {plan.responses:,} responses a collection"
    most, wanted = plan.settings.train.max_resamples, plan.settings.train.total_dialog_turns
    resamples = f" train.max_resamples={most}" * bool(most)
    settings = f"env.num_envs={plan.prompts} env.repeats={plan.group_size}{resamples}"
    row("1 Sample", text, settings, drawn=_responses(plan))
    text = f"{_count(plan.batches, 'optimizer step')} of {plan.batch_responses:,} responses "
    text += f"({_count(plan.batch_groups, 'group')})" + f", in each of {plan.epochs} epochs" * (plan.epochs > 1)
    settings = f"train.optim_batch_size={plan.batch_responses} train.epochs={plan.epochs}"
    row("2 Train", text, settings, "cut", "left_over")
    count = _count(len(plan.micro_batches), "micro-batch", "micro-batches")
    text = f"{'exactly' if plan.accumulation else 'about'} {count} a step; a prompt is computed once"
    limit = f"train.micro_batch_tokens={plan.max_tokens}"
    if plan.accumulation:
        limit = f"train.gradient_accumulation_steps={plan.accumulation}"
    row("3 Compute", text, limit, "micro_batches", drawn=_micro_batches(plan))
    text = f"{_count(plan.collections, 'collection')}, {_count(plan.optimizer_steps, 'optimizer step')}"
    if most:  # a collection that is filled up ends as soon as enough responses are sampled
        text = f"at most {text}: {wanted:,} responses or a few more"
    else:
        responses = plan.collections * plan.responses
        text += f", {responses:,} responses" + f" ({wanted:,} rounded up)" * (responses != wanted)
    stages = Text(" → ".join(_cycle(plan)))
    row("4 Repeat", text, f"train.total_dialog_turns={wanted}", "run", drawn=stages)
    body.add_row("5 Devices", Text("\n".join(f"{device} {does}" for device, does in _roles(plan).items())))
    notes = (
        "A group is a prompt and its responses; which groups meet in a step is drawn at random. "
        f"Assumed: every prompt has {plan.prompt_tokens:,} tokens and every response {plan.response_tokens:,} "
        "(--prompt-tokens, --response-tokens)."
    )
    if plan.skips_zero_variance:
        notes += " Zero-variance groups, whose responses all have the same reward, are counted, not computed."
    first, last = (Constrain(Text(text, style=style), COLUMNS) for text, style in ((title, "bold"), (notes, "dim")))
    return Group(first, Text(), body, Text(), last)


def _responses(plan: BatchPlan) -> Text:
    """A row a group, a mark a response, in the colour of its optimizer step."""
    rows = [Text("…") if group is None else _responses_to(plan, group) for group in shown(plan.prompts)]
    if plan.group_size > MARKS:
        rows.append(Text(f"a mark stands for {plan.group_size / MARKS:.3g} responses", style="dim"))
    return Text("\n").join(rows)


def _responses_to(plan: BatchPlan, group: int) -> Text:
    """The row of a group; a mark is full where an optimizer step takes the response, empty where it is left over."""
    size, marks, names = plan.group_size, min(MARKS, plan.group_size), []
    responses = (group * size + mark * size // marks for mark in range(marks))
    row = Text(f"prompt {group + 1:<{len(str(plan.prompts))}}  ")
    for step, taken in itertools.groupby(response // plan.batch_responses for response in responses):
        is_used = step < plan.batches
        drawn = ("■" if is_used else "□" for _ in taken)
        row.append("|" if names else "", "bold red")
        row.append((" " if 2 * size <= MARKS else "").join(drawn), COLOURS[step % len(COLOURS)] if is_used else "red")
        names.append(f"step {step + 1}" if is_used else "left over")
    text = f"  {' | '.join(names)}" + ": the group is cut" * (len(names) > 1)
    return row.append(text, "bold red" if len(names) > 1 or "left over" in names else "dim")


def shown(count: int) -> list[int | None]:
    """The rows that are drawn of so many, None for what is left out.

    >>> shown(3), shown(20)
    ([0, 1, 2], [0, 1, 2, None, 17, 18, 19])
    """
    return [*range(count)] if count <= ROWS else [0, 1, 2, None, count - 3, count - 2, count - 1]


def _micro_batches(plan: BatchPlan) -> Text:
    """A row a micro-batch: its groups, each a prompt and its responses, to scale."""
    budget, micro_batches = None if plan.accumulation else plan.max_tokens, plan.micro_batches
    scale = BAR / max([plan.group_tokens * max(micro_batches, default=0), budget or 1])
    end = round(budget * scale) if budget else BAR
    rows = []
    for number in shown(len(micro_batches)):
        if number is None:
            rows.append(Text("…"))
            continue
        groups = micro_batches[number]
        bar, tokens = _bar(plan, groups, scale), groups * plan.group_tokens
        limit, style = Text("|" if budget else "", "dim"), "bold red" if tokens > (budget or tokens) else ""
        label = Text(f" {_count(groups, 'group')}, {tokens:,} tokens", style)
        rows.append(Text(bar[:end].ljust(end)) + limit + Text(bar[end + 1 :]) + label)
    if plan.over_budget:
        text = f"{plan.group_size} responses take {plan.group_tokens:,} tokens, more than train.micro_batch_tokens"
        rows.append(Text(f"a group is never split: {text}", "bold red"))
    computed = plan.batch_groups * plan.group_tokens
    apart = plan.batch_groups * plan.group_size * (plan.prompt_tokens + plan.response_tokens)
    legend = (
        f"█ a prompt of {plan.prompt_tokens:,} tokens, computed once, ░ and its {plan.group_size} responses of "
        f"{plan.response_tokens:,}: {computed:,} tokens a step; with the prompt before each response, {apart:,}"
    )
    return Text("\n").join([*rows, Text(legend, "dim")])


def _bar(plan: BatchPlan, groups: int, scale: float) -> str:
    """The columns of so many groups; too small ones are drawn without their prompts."""
    edges = [round(group * plan.group_tokens * scale) for group in range(groups + 1)]
    prompt, bar = max(1, round(plan.prompt_tokens * scale)), ""
    for columns in (end - start for start, end in itertools.pairwise(edges)):
        bar += ("█" * min(prompt, columns - 1)).ljust(columns, "░")
    return bar


def _cycle(plan: BatchPlan) -> list[str]:
    """The events of one collection, in order; optimizer steps of an epoch are given by the first and the last."""
    stages = [f"sample {plan.responses:,}" + " or more" * bool(plan.settings.train.max_resamples)]
    stages += ["score reference"] * bool(plan.settings.policy.kl_coef)
    stages += ["score policy"] * needs_old_log_probs(plan.settings)
    for epoch in range(min(plan.epochs, ROWS)):
        first, last = epoch * plan.batches + 1, (epoch + 1) * plan.batches
        stages.append(f"step {first}" if first == last else f"steps {first} to {last}")
    return [*stages, *["…"] * (plan.epochs > ROWS), "push weights"]


def _roles(plan: BatchPlan) -> dict[str, str]:
    """The part on what each device does."""
    named = {"trains": plan.devices.train, "scores the reference": plan.devices.ref, "samples": plan.devices.inference}
    devices = dict.fromkeys(str(device) for group in named.values() for device in group)
    does = {device: [role for role, group in named.items() if device in map(str, group)] for device in devices}
    return {device: ", ".join(roles) + ", in turns" * (len(roles) > 1) for device, roles in does.items()}


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def show(view: RenderableType) -> None:
    """Prints a view; in a pipe its lines are as long as they are."""
    console = Console(highlight=False)
    console.print(view, soft_wrap=not console.is_terminal)


def plan_view(
    plan: Plan, title: str, advice: Mapping[str, Sequence[str]], best: Plan | None, chosen: str = ""
) -> RenderableType:
    """Devices, memory by role, seconds by phase, and remedies (``advice``) where something does not fit.

    ``best`` is the split of all devices with the shortest step, if it is another; ``chosen`` are overrides of ours.
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
        parts.append(_line("", f"shortest in async mode: {text}"))
    parts.append(Text())
    for role in plan.roles:
        if role.missing_gib:
            lacks = f"{role.name} lacks {role.missing_gib:,.1f} GiB on each device ({role.moment})"
            parts.append(Text(f"Does not fit: {lacks}.", style="bold red"))
            if role.name == "train" and plan.layout.train == scenario.most_ranks < scenario.cluster.count:
                few = f"No more than {scenario.most_ranks} can train, as a step has so many groups of responses; "
                parts.append(Text(f"{few}for more: env.num_envs, and with it train.optim_batch_size."))
            overrides = advice.get(role.name, ())
            parts.append(Text("Would fit, with any one line:" if overrides else "No setting or pair makes it fit."))
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
