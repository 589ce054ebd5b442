"""A plan of batches as a picture, in the terminal or as SVG."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from grpo_rl.planner.batches import BatchPlan, IndivisibleBatchError

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


def svg(plan: BatchPlan, title: str) -> str:
    """The picture as an SVG document; the same plan gives the same bytes."""
    console = Console(width=COLUMNS + 1, record=True, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(picture(plan, title))
    return console.export_svg(title="", theme=DEFAULT_TERMINAL_THEME, unique_id="batches", code_format=SVG)


SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px monospace }}
{styles}
</style>
<rect width="100%" height="100%" fill="#ffffff"/>
<defs>{lines}</defs>
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Rich's own format without a window's frame and without fonts from the network."""


def picture(plan: BatchPlan, title: str) -> RenderableType:
    """The drawing: what is sampled, what an optimizer step takes, how it is computed, how often, on which devices."""
    body = Table.grid(padding=(0, 2))
    body.add_column(style="bold", no_wrap=True)
    body.add_column(width=COLUMNS - 11)

    def row(
        heading: str, text: str, settings: str, error: IndivisibleBatchError | None = None, drawn: Text | None = None
    ) -> None:
        line = Text(f"{error.what}. Use {error.remedy}.", style="bold red") if error else Text(text)
        body.add_row(heading, Group(line, Text(settings, style="dim"), *([drawn] if drawn else [])))
        body.add_row()

    text = f"{_count(plan.prompts, 'prompt')} x {plan.group_size} responses = {plan.responses:,} responses a collection"
    resamples = f" train.max_resamples={plan.max_resamples}" * bool(plan.max_resamples)
    row(
        "1 Sample",
        text,
        f"env.num_envs={plan.prompts} env.repeats={plan.group_size}{resamples}",
        None,
        _responses(plan),
    )
    row(
        "2 Train",
        f"{_count(plan.batches, 'optimizer step')} of {plan.batch_responses:,} responses "
        f"({_count(plan.batch_groups, 'group')})" + (f", in each of {plan.epochs} epochs" * (plan.epochs > 1)),
        f"train.optim_batch_size={plan.batch_responses} train.epochs={plan.epochs}",
        plan.error_in("cut", "left_over"),
    )
    count = _count(len(plan.micro_batches), "micro-batch", "micro-batches")
    limit = f"train.micro_batch_tokens={plan.max_tokens}"
    if plan.accumulation:
        limit = f"train.gradient_accumulation_steps={plan.accumulation}"
    row(
        "3 Compute",
        f"{'exactly' if plan.accumulation else 'about'} {count} a step; a prompt is computed once",
        limit,
        plan.error_in("micro_batches"),
        _micro_batches(plan),
    )
    run = f"{_count(plan.collections, 'collection')}, {_count(plan.optimizer_steps, 'optimizer step')}"
    if plan.max_resamples:  # a collection that is filled up ends as soon as enough responses are sampled
        run = f"at most {run}: {plan.wanted:,} responses or a few more"
    else:
        responses = plan.collections * plan.responses
        run += f", {responses:,} responses" + f" ({plan.wanted:,} rounded up)" * (responses != plan.wanted)
    stages = Text(" → ".join(cycle(plan)))
    row("4 Repeat", run, f"train.total_dialog_turns={plan.wanted}", plan.error_in("run"), stages)
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
    picture = Text()
    gap = " " if 2 * plan.group_size <= MARKS else ""
    for group in shown(plan.prompts):
        picture.append("\n" if picture else "")
        if group is None:
            picture.append("…")
            continue
        picture.append(f"prompt {group + 1:<{len(str(plan.prompts))}}  ")
        owners = _owners(plan, group)
        for mark, owner in enumerate(owners):
            cut = mark and owner != owners[mark - 1]
            picture.append("|" if cut else gap if mark else "", "bold red")
            style = "red" if owner is None else COLOURS[owner % len(COLOURS)]
            picture.append("□" if owner is None else "■", style)
        steps = list(dict.fromkeys(owners))
        names = " | ".join("left over" if step is None else f"step {step + 1}" for step in steps)
        names += ": the group is cut" * (len(steps) > 1)
        picture.append(f"  {names}", "dim" if len(steps) == 1 and steps != [None] else "bold red")
    if plan.group_size > MARKS:
        picture.append(f"\na mark stands for {plan.group_size / MARKS:.3g} responses", "dim")
    return picture


def _owners(plan: BatchPlan, group: int) -> list[int | None]:
    """The optimizer step of each mark of a group, from 0, or None where responses are left over."""
    marks = min(MARKS, plan.group_size)
    responses = [group * plan.group_size + mark * plan.group_size // marks for mark in range(marks)]
    steps = [response // plan.batch_responses for response in responses]
    return [step if step < plan.batches else None for step in steps]


def shown(count: int) -> list[int | None]:
    """The rows that are drawn of so many, None for what is left out.

    >>> shown(3), shown(20)
    ([0, 1, 2], [0, 1, 2, None, 17, 18, 19])
    """
    return [*range(count)] if count <= ROWS else [0, 1, 2, None, count - 3, count - 2, count - 1]


def _micro_batches(plan: BatchPlan) -> Text:
    """A row a micro-batch: its groups, each a prompt and its responses, to scale."""
    picture = Text()
    budget = None if plan.accumulation else plan.max_tokens
    loads = [groups * plan.group_tokens for groups in plan.micro_batches]
    scale = BAR / max([*loads, budget or 1])
    for row in shown(len(loads)):
        picture.append("\n" if picture else "")
        if row is None:
            picture.append("…")
            continue
        bar = "".join(_group_bars(plan, plan.micro_batches[row], scale))
        end = round(budget * scale) if budget else BAR
        picture.append(bar[:end].ljust(end)).append("|" if budget else "", "dim").append(bar[end + 1 :])
        over = budget is not None and loads[row] > budget
        label = f" {_count(plan.micro_batches[row], 'group')}, {loads[row]:,} tokens"
        picture.append(label, "bold red" if over else "")
    if plan.over_budget:
        tokens = f"{plan.group_size} responses take {plan.group_tokens:,} tokens"
        picture.append(f"\na group is never split: {tokens}, more than train.micro_batch_tokens", "bold red")
    apart = plan.batch_groups * plan.group_size * (plan.prompt_tokens + plan.response_tokens)
    legend = (
        f"\n█ a prompt of {plan.prompt_tokens:,} tokens, computed once, ░ and its {plan.group_size} responses of "
        f"{plan.response_tokens:,}: {sum(loads):,} tokens a step; with the prompt before each response, {apart:,}"
    )
    return picture.append(legend, "dim")


def _group_bars(plan: BatchPlan, groups: int, scale: float) -> Iterable[str]:
    """The columns of each group; too small ones are drawn without their prompts."""
    edges = [round(group * plan.group_tokens * scale) for group in range(groups + 1)]
    prompt = max(1, round(plan.prompt_tokens * scale))
    for start, end in itertools.pairwise(edges):
        columns = end - start
        yield "░" * columns if columns < 2 else ("█" * min(prompt, columns - 1)).ljust(columns, "░")


def cycle(plan: BatchPlan) -> list[str]:
    """The events of one collection, in order; optimizer steps of an epoch are given by the first and the last."""
    stages = [f"sample {plan.responses:,}" + " or more" * bool(plan.max_resamples)]
    stages += ["score reference"] * plan.has_reference + ["score policy"] * plan.needs_old_log_probs
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
